"""A trial that the installed transformers reads trees correctly for a family.

A random model of the same configuration, with few and narrow layers and a short window, reads a text in chunks and then
two trees, with a commit between; every node's logits must be those of a plain forward over its path. Some families
count cache slots instead of positions, and some ignore their mask: both give wrong tokens without any error.
"""

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.machine.torch_threads import torch_threads
from edgespec.model.causal_model import CausalModel
from edgespec.model.family_logits import decoder_of
from edgespec.model.mechanisms.first_of_equal import FirstOfEqual
from edgespec.model.narrow_copy import VOCAB, narrow_copy, random_model
from edgespec.model.supported import no_tree_reason
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from offload.skeleton import build_on_meta
from offload.text_part import language_model

WRONG = "does not read token trees correctly"
TEXT_TOKENS = 41  # so that recurrent layers fold a part of it into their state, and leave the rest open
OTHER_TOKENS = 14
CHUNK_ROWS = 7  # so that a text takes several chunks, and some end within a tree
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4)
FEW_NODES = 2  # of two texts, which share a chunk
COMMITTED_PATH = (1, 4)
TOLERANCE = 1e-3  # of the largest logit; correct readings differ by about 1e-6 of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The facts of a trial, which is made once a process."""

    facts: str  # the whole configuration
    attention: str | None
    device: torch.device
    config: PretrainedConfig = field(compare=False)


def check_tree_reading(config: PretrainedConfig, *, device: torch.device) -> None:
    """Raise EdgespecError when trees are read wrongly, or when the trial fails."""
    if getattr(config, "num_kv_shared_layers", None) == getattr(config, "num_hidden_layers", 0):
        return  # an assistant's rows are in no tree, and attend another model's keys
    try:
        failure = _failure(trial_of(config, device=device))
        verdict = WRONG
    except Exception as error:  # a family's code may raise anything; then nothing is verified
        failure = first_line_of(error)
        verdict = "could not be shown to read token trees correctly"
    if failure is not None:
        raise EdgespecError(
            "E_SELF_CHECK",
            f"model type '{config.model_type}' {verdict} with transformers {transformers.__version__}: "
            f"{_known_reason(config, is_read=verdict == WRONG)}{failure}.",
            "Use a model with rotary or learned positions, or another version of transformers; `self_check=False` "
            "runs it without the check, at your own risk.",
        )


def trial_of(config: PretrainedConfig, *, device: torch.device) -> Trial:
    """Return the facts of a trial of a family; raises what making a narrow copy raises."""
    small = narrow_copy(config)
    facts = small.to_json_string(use_diff=False)
    attention = config.get_text_config(decoder=True)._attn_implementation
    return Trial(facts=facts, attention=attention, device=device, config=small)


def first_line_of(error: Exception) -> str:
    """Return what a family's code raised, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _known_reason(config: PretrainedConfig, *, is_read: bool) -> str:
    """Return the reason that a family's code shows for its failure, as a prefix; `is_read` where it gave logits."""
    known = no_tree_reason(config)
    if known is not None:
        return f"it {known}; "
    try:
        model = build_on_meta(narrow_copy(config), "a narrow copy", dtype=torch.float32)
        decoder = decoder_of(model)
    except Exception:  # the failure says it
        return ""
    if any(_is_required(parameter) for parameter in inspect.signature(model.forward).parameters.values()):
        return "it reads no words without an image; "
    takes_positions = not is_read or "position_ids" in inspect.signature(type(decoder).forward).parameters
    return "" if takes_positions else "it takes no positions, and counts a row's place in the cache instead; "


def _is_required(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return is_named and parameter.default is parameter.empty and parameter.name != "input_ids"


@functools.lru_cache
def _failure(trial: Trial) -> str | None:
    """Return the fault that the trial found, or None."""
    with torch_threads(1):  # beside other programs several take ten times as long for a model as small
        return _difference(*random_model_and_text(trial), trial.device)


def random_model_and_text(trial: Trial) -> tuple[PreTrainedModel, Tensor]:
    """Return the narrow copy with random weights, and tokens for the texts and trees that it reads."""
    config = copy.deepcopy(trial.config)  # with each part's own attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model(config, trial.device)
        tokens = torch.randint(1, VOCAB, (TEXT_TOKENS + 2 * len(PARENTS),), device="cpu").to(trial.device)
    return model, tokens


@torch.no_grad()
def _difference(model: PreTrainedModel, tokens: Tensor, device: torch.device) -> str | None:
    """Return the first logits that differ from a plain forward over their path, in two rounds of tree and commit.

    A second text is in every pass, so that a leak between texts shows.
    """
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=device, chunk_rows=CHUNK_ROWS)
    target, other = Target(causal), Target(causal)
    text, other_text = tokens[:TEXT_TOKENS], tokens.flip(0)[:OTHER_TOKENS]
    other.begin(other_text.tolist())
    target.begin(text.tolist())
    after_other, after_text = target.read([other.text_rows(OTHER_TOKENS), target.text_rows(TEXT_TOKENS)])
    other.took_in(OTHER_TOKENS)
    target.took_in(TEXT_TOKENS)
    in_one_piece = CausalModel(copy.deepcopy(plain), device=device)
    expected_after_text = plain_logits(plain, text)[-1:]
    rounds = [
        ("the text's", target.logits(after_text[-1:]), expected_after_text),
        ("another text's", target.logits(after_other[-1:]), plain_logits(plain, other_text)[-1:]),
        ("a short text's", in_one_piece.read_text(in_one_piece.new_text(), text)[None], expected_after_text),
    ]
    for nodes in (*tokens[TEXT_TOKENS:].split(len(PARENTS)), tokens[:FEW_NODES]):
        trees = [target.tree_rows(trial_tree(nodes)), other.tree_rows(trial_tree(nodes.flip(0)))]
        hidden = target.read(trees)
        for of, start, these, seen in ((target, text, nodes, hidden[0]), (other, other_text, nodes.flip(0), hidden[1])):
            logits = of.logits(seen)
            for leaf in set(range(len(nodes))) - set(PARENTS[: len(nodes)]):
                path = path_to(leaf)
                expected = plain_logits(plain, torch.cat([start, these[path]]))[-len(path) :]
                rounds.append((f"node {leaf}'s", logits[path], expected))
            if len(nodes) == len(PARENTS):
                of.commit(COMMITTED_PATH)
        if len(nodes) < len(PARENTS):
            break
        text = torch.cat([text, nodes[[0, *COMMITTED_PATH]]])
        other_text = torch.cat([other_text, nodes.flip(0)[[0, *COMMITTED_PATH]]])
    for what, found, expected in rounds:
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < TOLERANCE:
            return f"{what} logits are off by {error:.2g} of the largest"
    return None


def plain_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return transformers' own logits [n, vocab] of a text [n]; its indexes choose the first of equal keys."""
    words: Any = language_model(model)
    with FirstOfEqual():
        logits: Tensor = words(input_ids=text[None], use_cache=False).logits[0]
    return logits


def path_to(node: int) -> list[int]:
    """Return the nodes from the root to `node` of the trials' tree."""
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def trial_tree(tokens: Tensor) -> TokenTree:
    """Return the trials' tree of these tokens [n], or its first n nodes."""
    device = tokens.device
    return TokenTree(
        tokens=tokens,
        parents=torch.tensor(PARENTS[: len(tokens)], device=device),
        ranks=torch.zeros(len(tokens), dtype=torch.long, device=device),
        draw="chosen",
        draft_rows=torch.full((len(tokens),), -1, device=device),
        draft_probs=torch.empty(0, VOCAB, device=device),
    )
