"""A trial that the installed transformers reads pictures as we do for a family, before a model's first picture.

A random model of the same configuration, with few and narrow layers in its tower, too, reads the processor's own prompt
in parts and then a tree. The hidden states of every node must be those of the family's whole forward over its path: so
embedded rows, positions and their shift, features of layers and blocks are tried together, and no list names families.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.machine.torch_threads import torch_threads
from edgespec.model.causal_model import CausalModel
from edgespec.model.narrow_copy import VOCAB, narrow_copy, random_model
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seeing import refused, see
from edgespec.model.self_check import PARENTS, TOLERANCE, first_line_of, path_to, trial_tree
from edgespec.model.target import Target

CHUNK_ROWS = 32  # so that a prompt takes several chunks
FEW_ROWS = 512  # of a prompt that one thread reads fastest
LEAVES = (5, 7)  # of the trials' tree: a node's sibling's child, and the deepest
TOWER_HEADS = 2
TOWER_DEPTH = 4
DEPTHS = ("num_hidden_layers", "depth")
HEAD_COUNTS = ("num_attention_heads", "num_heads", "num_key_value_heads")
NARROW_TOWER = {"intermediate_size": 64, "hidden_size_per_layer_input": 8}
LAYERS_OF_TOWER = ("deepstack_visual_indexes", "fullatt_block_indexes")  # lists of a tower's layers


def check_seeing(config: PretrainedConfig, prompt: PicturePrompt) -> None:
    """Raise EdgespecError for a family whose pictures are read wrongly, or whose trial fails."""
    try:
        is_small = len(prompt.ids) <= FEW_ROWS
        with torch_threads(1) if is_small else nullcontext(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small, narrow = narrow_sight(config, prompt)
            failure = _difference(random_model(small, torch.device("cpu"), with_towers=True), narrow)
    except EdgespecError:
        raise
    except Exception as error:  # a family's code may raise anything; then nothing is read
        failure = f"they could not be shown to be read as by it ({first_line_of(error)})"
    if failure is not None:
        raise refused(config, f"{failure}, with transformers {transformers.__version__}")


def narrow_sight(config: PretrainedConfig, prompt: PicturePrompt) -> tuple[PretrainedConfig, PicturePrompt]:
    """Return a configuration with few and narrow layers, and the prompt in its small vocabulary."""
    small: Any = narrow_copy(config)
    text = small.get_text_config(decoder=True)
    if getattr(text, "hidden_size_per_layer_input", None):
        text.hidden_size_per_layer_input = NARROW_TOWER["hidden_size_per_layer_input"]
    tower = getattr(small, "vision_config", None)
    if tower is not None:
        _narrow_tower(tower, text_width=text.hidden_size)
    special = {
        name: value
        for name, value in vars(small).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    known = {token: VOCAB - 1 - number for number, token in enumerate(dict.fromkeys(special.values()))}
    for name, value in special.items():
        setattr(small, name, known[value])
    words = VOCAB - 1 - len(known)
    return small, replace(prompt, ids=[known.get(token, 1 + token % words) for token in prompt.ids])


def _narrow_tower(tower: Any, *, text_width: int) -> None:
    heads = getattr(tower, "num_attention_heads", None) or getattr(tower, "num_heads", None)
    width_name = "embed_dim" if getattr(tower, "embed_dim", None) else "hidden_size"
    changes = {name: TOWER_DEPTH for name in DEPTHS if getattr(tower, name, 0) > TOWER_DEPTH}
    changes |= {name: size for name, size in NARROW_TOWER.items() if getattr(tower, name, 0) > size}
    if heads and heads > TOWER_HEADS:
        changes |= dict.fromkeys((name for name in HEAD_COUNTS if getattr(tower, name, None)), TOWER_HEADS)
        changes[width_name] = getattr(tower, width_name) // heads * TOWER_HEADS
    for name in ("out_hidden_size", "hidden_size"):
        if name != width_name and getattr(tower, name, None):
            changes[name] = text_width
    for name in LAYERS_OF_TOWER:
        if getattr(tower, name, None):
            setattr(tower, name, list(range(min(len(getattr(tower, name)), TOWER_DEPTH))))
    for name, value in changes.items():
        setattr(tower, name, value)


@torch.no_grad()
def _difference(model: PreTrainedModel, prompt: PicturePrompt) -> str | None:
    """Return the first hidden states that differ from the family's whole forward."""
    whole: Any = copy.deepcopy(model)
    seen = see(whole, prompt)
    causal = CausalModel(model, device=torch.device("cpu"), chunk_rows=CHUNK_ROWS)
    target = Target(causal)
    target.seen = seen
    nodes = torch.randint(1, VOCAB // 2, (len(PARENTS),))
    found = []
    target.begin(prompt.ids)
    while target.num_unread:
        (hidden,) = target.read([rows := target.text_rows(target.rows_within(CHUNK_ROWS))])
        target.took_in(rows.count)
        found.append(hidden)
    behind = target.look(trial_tree(nodes))
    num_rows = len(prompt.ids)
    for leaf in LEAVES:  # a prompt may be long: each takes a forward over all of it
        path = path_to(leaf)
        ours, theirs = torch.cat([*found, behind[path]]), _states(whole, prompt, nodes[path].tolist())
        for what, part in (("the prompt's", slice(num_rows)), (f"node {leaf}'s", slice(num_rows, None))):
            error = float((ours[part] - theirs[part]).abs().max() / theirs[part].abs().max())
            if not error < TOLERANCE:
                return f"{what} hidden states are off by {error:.2g} of the largest"
    return None


def _states(whole: Any, prompt: PicturePrompt, behind: list[int]) -> Tensor:
    """Return the family's own last hidden states [n + k, h] of a prompt and of k tokens behind it."""
    ids = torch.tensor([[*prompt.ids, *behind]])
    num_rows = len(prompt.ids)
    inputs = {
        name: torch.nn.functional.pad(value, (0, len(behind))) if value.shape == (1, num_rows) else value
        for name, value in prompt.inputs.items()
    }
    for part in whole.modules():
        if hasattr(part, "rope_deltas"):
            part.rope_deltas = None
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.ones_like(ids)
    states: Tensor = whole.base_model(input_ids=ids, **inputs, use_cache=False).last_hidden_state[0]
    return states
