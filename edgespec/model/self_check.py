"""A trial that the installed transformers reads trees correctly for a family.

A random model of the same configuration, with few and narrow layers and a short window, reads a text in chunks and then
two trees, with a commit between; every node's logits must be those of a plain forward over its path. Some families
count cache slots instead of positions, and some ignore their mask: both give wrong tokens without any error.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.family_logits import decoder_of
from edgespec.model.layer_attention import key_sources
from edgespec.model.layer_kinds import indexed_layers, keep_layers, layer_overrides
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from offload.skeleton import build_on_meta
from offload.text_part import drop_parameters, unread_names

WRONG = "does not read token trees correctly"
VOCAB = 96
HEADS = 4
HEAD_DIM = 16  # of families without heads
WINDOW = 8  # shorter than the text, so that a missing one shows
TEXT_TOKENS = 41  # so that recurrent layers fold a part of it into their state, and leave the rest open
OTHER_TOKENS = 14
CHUNK_ROWS = 7  # so that a text takes several chunks, and some end within a tree
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4)
COMMITTED_PATH = (1, 4)
TOLERANCE = 1e-3  # of the largest logit; correct readings differ by about 1e-6 of it
# Reduced where a configuration has them; their ratios are kept.
HEAD_NAMES = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
KNOWN_REASONS = {  # of families whose code takes positions, and uses other places too
    "bloom": "its biases go by places in the cache",
    "gpt_neo": "its local layers cut their window by places in the cache",
    "mpt": "its biases go by places in the cache",
}
WINDOW_NAMES = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
MAMBA_NAMES = (  # of heads, their width, their groups, and of the layer's width over the model's
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_expand"),
    ("num_heads", "head_dim", "n_groups", "expand"),
)
NARROW = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "floor_scale": 4,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": WINDOW,
}

UNTOUCHED = 0.1  # value of parameters that the family's own initialisation leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The facts of a trial, which is made once a process."""

    facts: str  # the whole configuration
    attention: str | None
    device: torch.device
    config: PretrainedConfig = field(compare=False)


def check_tree_reading(config: PretrainedConfig, *, device: torch.device) -> None:
    """Raise EdgespecError when trees are read wrongly, or when the trial fails."""
    try:
        small = narrow_copy(config)
        facts = small.to_json_string(use_diff=False)
        failure = _failure(_Trial(facts=facts, attention=config._attn_implementation, device=device, config=small))
        verdict = WRONG
    except Exception as error:  # a family's code may raise anything; then nothing is verified
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        verdict = "could not be shown to read token trees correctly"
    if failure is not None:
        raise EdgespecError(
            "E_SELF_CHECK",
            f"model type '{config.model_type}' {verdict} with transformers {transformers.__version__}: "
            f"{_known_reason(config, is_read=verdict == WRONG)}{failure}.",
            "Use a model with rotary or learned positions, or another version of transformers; `self_check=False` "
            "runs it without the check, at your own risk.",
        )


def _known_reason(config: PretrainedConfig, *, is_read: bool) -> str:
    """Return the reason that a family's code shows for its failure, as a prefix; `is_read` where it gave logits."""
    text = config.get_text_config(decoder=True)
    if text.model_type in KNOWN_REASONS:
        return f"{KNOWN_REASONS[text.model_type]}; "
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


def narrow_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with two layers, or one of each kind, and little width."""
    small = copy.deepcopy(config)
    small.__dict__.pop("quantization_config", None)
    text: Any = small.get_text_config(decoder=True)
    small.name_or_path = text.name_or_path = ""  # the trial of a family is that of all its folders
    if not any(text is part for part in (small, *vars(small).values())):
        text = small  # an encoder with a decoder: `get_text_config` returned a copy
    keep_layers(text, _one_layer_of_each_kind(text))
    overrides = layer_overrides(text)
    text.per_layer_config = None
    # Pure Mamba models have `num_heads`, or neither; their width is reduced to that of HEADS heads, too.
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "num_heads", None)
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else HEAD_DIM)
    names = (*NARROW, *HEAD_NAMES, "num_key_value_heads", *WINDOW_NAMES)
    changes = _narrowed({name: getattr(text, name, None) for name in names}, heads or 1)
    changes |= _recurrent_changes(text, HEADS * head_dim)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            changes[name] = 0
    if "head_dim" in vars(text):
        changes["head_dim"] = head_dim
    if getattr(text, "vocab_size_per_layer_input", None):
        changes["vocab_size_per_layer_input"] = VOCAB
    if getattr(text, "word_embed_proj_dim", None):
        changes["word_embed_proj_dim"] = HEADS * head_dim
    for name, value in {**changes, "hidden_size": HEADS * head_dim, "vocab_size": VOCAB}.items():
        setattr(text, name, value)
    if overrides:
        whole = config.get_text_config(decoder=True)
        num_heads = whole._getattr_without_heterogeneous_validation("num_attention_heads")
        text.per_layer_config = {layer: _narrowed(own, num_heads) for layer, own in overrides.items()}
    return small


def _narrowed(values: dict[str, Any], num_heads: int) -> dict[str, Any]:
    """Return the values of a configuration or of a layer, with small numbers in place of those that are set."""
    num_heads = values.get("num_attention_heads") or num_heads
    small = dict.fromkeys(HEAD_NAMES, HEADS) | dict.fromkeys(WINDOW_NAMES, WINDOW) | NARROW
    small["num_key_value_heads"] = HEADS // 2 if (values.get("num_key_value_heads") or 0) < num_heads else HEADS
    return {
        name: [small[name]] * len(value) if name in small and isinstance(value, list) else small.get(name, value)
        for name, value in values.items()
        if value
    }


def _one_layer_of_each_kind(text: Any) -> list[int]:
    """Return indices of the first layer of each kind, and of at least two layers where there are two."""
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    overrides, sources, indexed = layer_overrides(text), key_sources(text), indexed_layers(text)
    firsts: dict[str, int] = {}
    for layer, kind in enumerate(kinds):
        firsts.setdefault(f"{kind} {overrides.get(layer)} {sources[layer] != layer} {layer in indexed}", layer)
    kept = {*firsts.values(), *range(min(2, len(kinds)))} if len(firsts) == 1 else {*firsts.values()}
    lending = {sources[layer] for layer in kept} if getattr(text, "kv_source_layers", None) else set()
    return sorted(kept | lending)


def _recurrent_changes(text: Any, hidden_size: int) -> dict[str, Any]:
    """Return the changed heads of recurrent layers: at most two groups, with enough heads for the width."""
    changes: dict[str, Any] = {}
    if getattr(text, "linear_num_key_heads", None):
        groups = text.linear_num_value_heads // text.linear_num_key_heads
        changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * groups}
    for heads, width, groups_name, expand in MAMBA_NAMES:
        if getattr(text, heads, None) and getattr(text, expand, None) and not getattr(text, "mamba_d_ssm", None):
            changes[heads] = getattr(text, expand) * hidden_size // getattr(text, width)
            changes[groups_name] = min(2, getattr(text, groups_name))
    return changes


@functools.lru_cache
def _failure(trial: _Trial) -> str | None:
    """Return the fault that the trial found, or None."""
    config = copy.deepcopy(trial.config)
    config._attn_implementation = trial.attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _random_model(config, trial.device)
        tokens = torch.randint(1, VOCAB, (TEXT_TOKENS + 2 * len(PARENTS),), device="cpu").to(trial.device)
    return _difference(model, tokens, trial.device)


@torch.no_grad()
def _random_model(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Return the model with random weights, and without its towers for images."""
    model = build_on_meta(config, "a narrow copy", dtype=torch.float32)
    unread = unread_names(model)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{path}.{name}".removeprefix(".") not in unread:
                weight = torch.full_like(parameter, UNTOUCHED, device="cpu")
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        if not all(parameter.is_meta for parameter in module.parameters()):
            module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()
    model.tie_weights()
    drop_parameters(model, unread)
    nn.Module.to(model, device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)  # so that attention looks somewhere, and a wrong place shows
    return model


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
    expected_after_text = _plain_logits(plain, text)[-1:]
    rounds = [
        ("the text's", target.logits(after_text[-1:]), expected_after_text),
        ("another text's", target.logits(after_other[-1:]), _plain_logits(plain, other_text)[-1:]),
        ("a short text's", in_one_piece.read_text(in_one_piece.new_text(), text)[None], expected_after_text),
    ]
    for nodes in tokens[TEXT_TOKENS:].split(len(PARENTS)):
        trees = [target.tree_rows(_tree(nodes)), other.tree_rows(_tree(nodes.flip(0)))]
        hidden = target.read(trees)
        for of, start, these, seen in ((target, text, nodes, hidden[0]), (other, other_text, nodes.flip(0), hidden[1])):
            logits = of.logits(seen)
            for leaf in set(range(len(PARENTS))) - set(PARENTS):
                path = _path(leaf)
                expected = _plain_logits(plain, torch.cat([start, these[path]]))[-len(path) :]
                rounds.append((f"node {leaf}'s", logits[path], expected))
            of.commit(COMMITTED_PATH)
        text = torch.cat([text, nodes[[0, *COMMITTED_PATH]]])
        other_text = torch.cat([other_text, nodes.flip(0)[[0, *COMMITTED_PATH]]])
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
