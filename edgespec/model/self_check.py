"""Check by trial that the installed transformers reads trees rightly for a family.

A random model of the same configuration, with few and narrow layers and a short window, reads a
text in chunks and then trees, twice, with a commit between; every node's logits must be those of a
plain forward over its path. Some families count cache slots instead of positions, and some ignore the
mask that they are given: both give wrong tokens without any error.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree

VOCAB = 96
WINDOW = 8  # shorter than the text, so that a missing one shows
TEXT_TOKENS = 41  # so that recurrent layers fold some of it into their state, and leave some
OTHER_TOKENS = 14
CHUNK_ROWS = 9  # so that the text takes three
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4)
COMMITTED_PATH = (1, 4)
TOLERANCE = 1e-3  # of the largest logit; right readings differ by some 1e-6 of it
# Reduced where a configuration has them; what they are multiples of each other for is kept.
WINDOW_NAMES = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
MAMBA_NAMES = (  # of heads, their width, their groups, and of the layer's width over the model's
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_expand"),
    ("num_heads", "head_dim", "n_groups", "expand"),
)
NARROW = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def check_tree_reading(config: PretrainedConfig, *, device: torch.device) -> None:
    """Raise EdgespecError when trees are read wrongly, or when that cannot be tried."""
    try:
        small = narrow_copy(config)
        key = small.model_type, small.to_json_string(use_diff=False), config._attn_implementation, device
        failure = _failure(_Trial(key=key, config=small))
        verdict = "does not read token trees rightly"
    except Exception as error:  # whatever a family's code raises, it cannot be verified
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        verdict = "could not be shown to read token trees rightly"
    if failure is not None:
        raise EdgespecError(
            "E_SELF_CHECK",
            f"model type '{config.model_type}' {verdict} with transformers {transformers.__version__} ({failure}).",
            "Use a model with rotary or learned positions; `self_check=False` runs it all the same, at your own risk.",
        )


def narrow_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with two layers, or one of each kind, and little width."""
    small = copy.deepcopy(config)
    small.__dict__.pop("quantization_config", None)
    text: Any = small.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or text.num_heads  # pure Mamba models have the latter
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    changes: dict[str, Any] = {name: value for name, value in NARROW.items() if getattr(text, name, None)}
    layers = _one_layer_of_each_kind(text)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            changes[name] = [value[layer] for layer in layers]  # what is said of each layer
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            changes[name] = 0
    if getattr(text, "num_key_value_heads", None):
        changes["num_key_value_heads"] = 1 if text.num_key_value_heads < heads else 2
    if "head_dim" in vars(text):
        changes["head_dim"] = head_dim
    if getattr(text, "word_embed_proj_dim", None):
        changes["word_embed_proj_dim"] = 2 * head_dim
    changes |= {name: WINDOW for name in WINDOW_NAMES if getattr(text, name, None)}
    changes |= {"num_hidden_layers": len(layers), "num_attention_heads": 2, "hidden_size": 2 * head_dim}
    changes |= _recurrent_changes(text, 2 * head_dim)
    for name, value in {**changes, "vocab_size": VOCAB}.items():
        setattr(text, name, value)
    for name in getattr(small, "sub_configs", {}):  # a vision tower is built, and not looked at
        other: Any = getattr(small, name, None)
        if other is not text and getattr(other, "num_hidden_layers", 0) > 1:
            other.num_hidden_layers = 1
    return small


def _one_layer_of_each_kind(text: Any) -> list[int]:
    """Return indices of the first layer of each kind, and of at least two layers where there are two."""
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    firsts = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return sorted({*firsts.values(), *range(min(2, len(kinds)))} if len(firsts) == 1 else firsts.values())


def _recurrent_changes(text: Any, hidden_size: int) -> dict[str, Any]:
    """Return what becomes of the heads of recurrent layers: two groups at most, of as many heads as are wide enough."""
    changes: dict[str, Any] = {}
    if getattr(text, "linear_num_key_heads", None):
        groups = text.linear_num_value_heads // text.linear_num_key_heads
        changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * groups}
    for heads, width, groups_name, expand in MAMBA_NAMES:
        if getattr(text, heads, None) and getattr(text, expand, None) and not getattr(text, "mamba_d_ssm", None):
            changes[heads] = getattr(text, expand) * hidden_size // getattr(text, width)
            changes[groups_name] = min(2, getattr(text, groups_name))
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A family that is tried; trials of one `key` have one outcome."""

    key: tuple[str, str, str | None, torch.device]
    config: PretrainedConfig = field(compare=False)


@functools.lru_cache
def _failure(trial: _Trial) -> str | None:
    """Return what is wrong, or None; it is tried once a process."""
    model_type, _, attention, device = trial.key
    config = CONFIG_MAPPING[model_type].from_dict(trial.config.to_dict())
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
        tokens = torch.randint(1, VOCAB, (TEXT_TOKENS + 2 * len(PARENTS),), device="cpu").to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that attention looks somewhere, and a wrong place shows
        return _difference(model, tokens, device)


def _difference(model: PreTrainedModel, tokens: Tensor, device: torch.device) -> str | None:
    """Compare two rounds of tree, commit, tree with plain forwards over every path; return what differs, if any.

    Another text is in every pass, so that one that leaks shows.
    """
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=device, chunk_rows=CHUNK_ROWS)
    target, other = Target(causal), Target(causal)
    text, company = tokens[:TEXT_TOKENS], tokens.flip(0)[:OTHER_TOKENS]
    other.begin(company.tolist())
    target.begin(text.tolist())
    after_company, after_text = target.read([other.text_rows(OTHER_TOKENS), target.text_rows(TEXT_TOKENS)])
    other.took_in(OTHER_TOKENS)
    target.took_in(TEXT_TOKENS)
    in_one_piece = CausalModel(copy.deepcopy(plain), device=device)
    expected_after_text = _plain_logits(plain, text)[-1:]
    rounds = [
        ("the text's", target.logits(after_text[-1:]), expected_after_text),
        ("another text's", target.logits(after_company[-1:]), _plain_logits(plain, company)[-1:]),
        ("a short text's", in_one_piece.read_text(in_one_piece.new_text(), text)[None], expected_after_text),
    ]
    for nodes in tokens[TEXT_TOKENS:].split(len(PARENTS)):
        trees = [target.tree_rows(_tree(nodes)), other.tree_rows(_tree(nodes.flip(0)))]
        hidden = target.read(trees)
        for of, start, these, seen in ((target, text, nodes, hidden[0]), (other, company, nodes.flip(0), hidden[1])):
            logits = of.logits(seen)
            for leaf in set(range(len(PARENTS))) - set(PARENTS):
                path = _path(leaf)
                expected = _plain_logits(plain, torch.cat([start, these[path]]))[-len(path) :]
                rounds.append((f"node {leaf}'s", logits[path], expected))
            of.commit(COMMITTED_PATH)
        text = torch.cat([text, nodes[[0, *COMMITTED_PATH]]])
        company = torch.cat([company, nodes.flip(0)[[0, *COMMITTED_PATH]]])
    for what, found, expected in rounds:
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < TOLERANCE:
            return f"{what} logits are off by {error:.2g} of the largest"
    return None


def _plain_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return transformers' own logits [n, vocab] of a text [n]."""
    logits: Tensor = model(input_ids=text[None], use_cache=False).logits[0]
    return logits


def _path(node: int) -> list[int]:
    """Return the nodes from the root to `node`."""
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def _tree(tokens: Tensor) -> TokenTree:
    device = tokens.device
    return TokenTree(
        tokens=tokens,
        parents=torch.tensor(PARENTS, device=device),
        ranks=torch.zeros(len(PARENTS), dtype=torch.long, device=device),
        draw="chosen",
        draft_rows=torch.full((len(PARENTS),), -1, device=device),
        draft_probs=torch.empty(0, VOCAB, device=device),
    )
