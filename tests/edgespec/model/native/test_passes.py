"""Few rows in one native call: the family's own numbers, and a row's bits alone, in trees, in company, on threads."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec import Engine, TreeSettings
from edgespec.config import MemoryLimits
from edgespec.draft.dflash_network import GuessedBlock
from edgespec.model.causal_model import CausalModel
from edgespec.model.length_rotation import LengthRotation
from edgespec.model.mechanisms.windows import AttentionWindow
from edgespec.model.native import attention, delta_rule, functions, layers, mixture, pass_text, passes, trial
from edgespec.model.native.delta_rule import DeltaRuleSteps
from edgespec.model.native.fields import RecordFields
from edgespec.model.native.mixture import MixtureSteps
from edgespec.model.native.shape import DecoderShape
from edgespec.model.native.state_rows import Ancestors, OwnRow
from edgespec.model.native.workspace import planned_bytes
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.text_cache import TextCache
from edgespec.pair.pair import open_pair
from edgespec.tree.token_tree import ancestors_mask, depths
from offload.native import weights
from offload.native.code import Code, Value
from offload.native.compiler import compiled
from offload.text_part import model_from_config
from tests.support.families import make_model, save_folder
from tests.support.row_bits import compared, let_states_last

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
WINDOW = 12
EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GROWING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-bias": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral-window": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=WINDOW),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-shares-of-all": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **{**SIZES, "intermediate_size": 32},
        num_local_experts=10,
        num_experts_per_tok=3,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=YARN,
    ),
    # Weights in one: queries, keys and values, and gates and ups
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    # Two sets of factors of rotations, for texts of 40 tokens and for longer ones
    "phi3-longrope": lambda: transformers.Phi3Config(
        **SIZES,
        pad_token_id=0,
        original_max_position_embeddings=40,
        rope_parameters={
            **ROPE,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [2.0 + number for number in range(8)],
            "original_max_position_embeddings": 40,
        },
    ),
    # An expert that all rows have, by a share of its own
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64),
    # The same without one; experts are chosen by corrected scores, and the first layer's MLP is dense
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **{**SIZES, "head_dim": 32}, **ROUTED, norm_topk_prob=True, use_qk_norm=True, n_shared_experts=2
    ),
    # A row's only expert has all of its share, whichever scores it is chosen by
    "dots1-one": lambda: transformers.Dots1Config(
        **SIZES, **{**ROUTED, "num_experts_per_tok": 1}, norm_topk_prob=True, n_shared_experts=1
    ),
    "dots1": lambda: transformers.Dots1Config(**SIZES, **ROUTED, norm_topk_prob=False, n_shared_experts=1),
    # Gates of what heads attend to
    "qwen3-next-attention": lambda: transformers.Qwen3NextConfig(
        **{**SIZES, "head_dim": 32},
        **EXPERTS,
        shared_expert_intermediate_size=32,
        layer_types=["full_attention"] * 3,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
    ),
    "qwen3.5-attention": lambda: transformers.Qwen3_5TextConfig(
        **{**SIZES, "head_dim": 32},
        layer_types=["full_attention"] * 3,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, sliding_window_pattern=2),
    # A layer without positions
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[1, 0, 1]),
    # Queries behind 16 tokens grow
    "ministral3": lambda: transformers.Ministral3Config(
        **SIZES, rope_parameters={**GROWING, "original_max_position_embeddings": 16}
    ),
    # States in the place of keys: a product each for what is convolved and for gates
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **{**SIZES, "head_dim": 32}, **DELTA_RULE, rope_parameters={**ROPE, "partial_rotary_factor": 0.5}
    ),
    # All in one product, side by side for each head of keys; and experts
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **{**SIZES, "head_dim": 32},
        **DELTA_RULE,
        **EXPERTS,
        shared_expert_intermediate_size=32,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
    ),
}
PARENTS = (-1, 0, 0, 1, 2, 3, 5)
PATH = (0, 1, 3, 5, 6)
DTYPES = (torch.float32, torch.bfloat16)
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.03}


@functools.cache
def random_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_from_config(FAMILIES[family](), dtype=dtype).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.ndim == 1:  # weights of norms, and biases
                parameter += torch.randn_like(parameter) / 8
        for buffer in model.buffers():
            if buffer.ndim == 1 and not buffer.any():  # corrections of a router's scores
                buffer += torch.randn_like(buffer) / 8
    return model


def both(
    family: str = "llama", dtype: torch.dtype = torch.float32, *, fuse: nn.Module | None = None, block: Any = None,
    change: Callable[[PreTrainedModel], None] = lambda _: None,
) -> tuple[CausalModel, CausalModel]:  # fmt: skip
    """The same model as torch runs it, and natively; with `fuse` a head, which reads features, or a `block`."""
    models = [copy.deepcopy(random_model(family, dtype)) for _ in range(2)]
    for model in models:
        change(model)
    for model in models if fuse is not None else ():
        model.fuse = fuse
        if block is not None:
            model.block = block
    usual, native = (CausalModel(model, device=CPU, keeps_row_bits=True) for model in models)
    native.use_native_passes()
    assert native.is_native
    return usual, native


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (200,), generator=torch.Generator().manual_seed(1))


def text(model: CausalModel, ids: Tensor) -> TextCache:
    cache = model.new_text()
    model.read([next_rows(cache, ids)])
    cache.commit_next(ids.tolist())
    return cache


def tree(cache: TextCache, ids: Tensor) -> PassRows:
    parents = torch.tensor(PARENTS)
    positions = cache.length + depths(parents)
    return PassRows(cache=cache, ids=ids[: len(PARENTS)], positions=positions, visible=ancestors_mask(parents))


def kept_by(cache: TextCache, count: int) -> list[Tensor]:
    """What a text keeps in its layers: keys and values, or states and the rows behind them."""
    found = [rows for layer in cache.layers if layer.capacity for rows in layer.rows(count)]
    for state in cache._recurrent:
        found += [state._last.state.float(), *(rows.float() for rows in state._last.rows)]
    return found


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_texts_and_trees_are_near_those_of_the_familys_own_forward(
    family: str, dtype: torch.dtype, tokens: Tensor
) -> None:
    usual, native = both(family, dtype)
    caches = [text(model, tokens[:30]) for model in (native, usual)]
    found, expected = (
        model.read([tree(cache, tokens[30:])])[0] for model, cache in zip((native, usual), caches, strict=True)
    )
    assert far(found, expected) < NEAR[dtype]
    for one, other in zip(*(kept_by(cache, 37) for cache in caches), strict=True):
        assert far(one, other) < NEAR[dtype]


def _one_large(model: PreTrainedModel) -> None:
    """Gemma 3 270M has norms whose other weights are below 3, and one is 250."""
    for name, norm in model.named_parameters():
        if name.endswith("layernorm.weight"):
            norm[-1] = 250


def _small_behind_large(model: PreTrainedModel) -> None:
    """On small rows a softmax and sigmoids choose with alike shares."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter /= 100
        elif name.endswith("post_attention_layernorm.weight"):
            parameter *= 100


def _blind_to_even_rows(model: PreTrainedModel) -> None:
    """Rows of nearly one number choose experts by corrections alone."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter -= parameter.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", _one_large),
        ("gemma3", _one_large),
        ("glm4-moe", _small_behind_large),
        ("dots1-one", _blind_to_even_rows),
    ],
)
def test_norms_of_large_weights_and_routers_behind_them_count_from_where_their_family_does(
    family: str, change: Callable[[PreTrainedModel], None], tokens: Tensor
) -> None:
    usual, native = both(family, change=change)
    expected, found = (model.read([next_rows(model.new_text(), tokens[:30])])[0] for model in (usual, native))
    assert far(found, expected) < NEAR[torch.float32]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_weights_for_which_a_call_computes_something_else_are_read_by_torch(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family's narrow copy is not asked: what is wrong may lie in these weights alone."""
    native = CausalModel(copy.deepcopy(random_model("gemma3", torch.bfloat16)), device=CPU)
    if is_wrong:
        of_module = layers._Norm.of
        monkeypatch.setattr(layers._Norm, "of", lambda module: norm_without_one(of_module(module)))
    native.use_native_passes()
    trial.try_weights(native, takes_features=False)
    assert native.is_native != is_wrong


def norm_without_one(norm: layers._Norm | None) -> layers._Norm | None:
    return None if norm is None else replace(norm, factor=norm.factor - 1)


def all_short(_rotation: LengthRotation, part: PassRows) -> Tensor:
    return torch.zeros(part.count, dtype=torch.bool)


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(("num_tokens", "prompt_tokens"), [(30, 0), (38, 0), (60, 0), (30, 50)])
def test_rows_rotate_by_the_lengths_of_their_texts(
    num_tokens: int, prompt_tokens: int, is_wrong: bool, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree's first rows may lie before the limit, and its last ones behind it."""
    usual, native = both("phi3-longrope")
    if is_wrong:
        monkeypatch.setattr(LengthRotation, "are_long", all_short)
    found = []
    for model in (usual, native):
        cache = model.new_text()
        cache.prompt_tokens = prompt_tokens
        rows = model.read([next_rows(cache, tokens[:num_tokens])])
        cache.commit_next(tokens[:num_tokens].tolist())
        found.append(torch.cat([*rows, *model.read([tree(cache, tokens[60:])])]))
    assert (far(found[1], found[0]) < NEAR[torch.float32]) == (not is_wrong or (num_tokens, prompt_tokens) == (30, 0))


@pytest.mark.parametrize("family", ["phi3", "glm4-moe", "qwen3.5-attention", "qwen3.5", "qwen3-next", "ministral3"])
def test_a_trees_rows_follow_a_prompt_that_torch_has_read(family: str, tokens: Tensor) -> None:
    usual, native = both(family)
    found, expected = (model.read([tree(text(model, tokens[:100]), tokens[100:])])[0] for model in (native, usual))
    assert far(found, expected) < NEAR[torch.float32]


ALONE_AS_IN_TREES = [
    *itertools.product(
        ["llama", "mistral-window", "gemma3", "qwen3-moe", "gpt-oss", "phi3", "qwen2-moe", "glm4-moe"], DTYPES
    ),
    # States of float32 show the order of sums
    ("qwen3.5", torch.bfloat16),
    ("qwen3-next", torch.bfloat16),
]


@pytest.mark.parametrize(("family", "dtype"), ALONE_AS_IN_TREES, ids=str)
def test_a_row_has_its_bits_alone_and_in_a_tree(family: str, dtype: torch.dtype, tokens: Tensor) -> None:
    _, native = both(family, dtype)
    (in_tree,) = native.read([tree(text(native, tokens[:30]), tokens[30:])])
    alone = text(native, tokens[:30])
    for node in PATH:
        (hidden,) = native.read([next_rows(alone, tokens[30 + node : 31 + node])])
        alone.commit_next([int(tokens[30 + node])])
        assert torch.equal(hidden[0], in_tree[node]), f"{node} in {family}"


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_a_texts_bits_depend_on_no_prompt_no_tree_and_no_number_of_texts_beside_it(family: str, tokens: Tensor) -> None:
    _, native = both(family, torch.bfloat16)
    (expected,) = native.read([tree(text(native, tokens[:30]), tokens[30:])])
    cache, others = text(native, tokens[:30]), [text(native, tokens[40 : 50 + number]) for number in range(40)]
    parts = [next_rows(native.new_text(), tokens[:150]), *(tree(other, tokens[60:]) for other in others[:20])]
    parts += [next_rows(other, tokens[7:8]) for other in others[20:]]
    found = native.read([*parts[:30], tree(cache, tokens[30:]), *parts[30:]])
    assert torch.equal(found[30], expected)
    assert [rows.shape[0] for rows in found] == [part.count for part in [*parts[:30], tree(cache, tokens), *parts[30:]]]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "phi3", "glm4-moe", "qwen3.5"])
def test_as_many_threads_as_there_are_make_the_same_bits(family: str, tokens: Tensor) -> None:
    _, native = both(family, torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found += native.read([tree(text(native, tokens[:30]), tokens[30:])])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_states_have_the_bits_of_plain_decoding_whatever_the_trees_before(family: str) -> None:
    """The state takes in rows at other moments."""
    model = copy.deepcopy(random_model(family, torch.bfloat16))
    let_states_last(model)
    found = compared(model, vocab=SIZES["vocab_size"], tokens=40, natively=True)
    assert all(same == rows for same, rows in found.values()), found


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.usefixtures("tried_anew")
def test_a_thread_gives_way_at_once_to_one_that_it_shares_a_processor_with(
    shares: bool, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has one alone looks for long: the others are about to come."""
    ways: list[int] = []

    def give_way() -> int:
        ways.append(threading.get_native_id())
        os.sched_yield()
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int)
    asked = {"give_way": kind(give_way), "processor": kind(lambda: 0 if shares else threading.get_native_id())}
    addresses = {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in asked.items()}
    facts = passes._of_openmp() | addresses
    monkeypatch.setattr(passes, "_of_openmp", lambda: facts)
    monkeypatch.setattr(pass_text, "PATIENCE", 1 << 40)
    _, native = both()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for _ in range(5):
            native.read([tree(text(native, tokens[:30]), tokens[30:])])
    finally:
        torch.set_num_threads(before)
    assert bool(ways) == shares


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", torch.float32),
        ("qwen3-moe", torch.bfloat16),
        ("glm4-moe", torch.float32),
        ("glm4-moe", torch.bfloat16),
        ("qwen3.5", torch.float32),
        ("qwen3.5", torch.bfloat16),
    ],
)
def test_code_for_an_older_processor_makes_the_same_bits(
    dtype: torch.dtype, family: str, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cpu in ("", "haswell"):
        for module in (passes, weights):
            monkeypatch.setattr(module, "compiled", functools.partial(compiled, cpu=cpu))
        for cache in (passes._compiled, weights._dense):
            cache.cache_clear()
        _, native = both(family, dtype)
        found += native.read([tree(text(native, tokens[:30]), tokens[30:])])
    assert torch.equal(*found)
    for cache in (passes._compiled, weights._dense):
        cache.cache_clear()


class Sum(nn.Module):
    """What a head may make of a token's embedding and the feature before it."""

    def forward(self, embedded: Tensor, previous: Tensor) -> Tensor:
        return embedded + 2 * previous


def test_a_heads_rows_are_made_of_embeddings_and_of_the_features_before_them(
    tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, native = both(fuse=Sum())
    monkeypatch.setattr(native, "_read", None)  # no row goes by torch
    features = torch.randn(40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    found = []
    for model in (usual, native):
        cache = model.new_text()
        of_text = model.read([next_rows(cache, tokens[:30], previous=features[:30])])
        cache.commit_next(tokens[:30].tolist())
        found.append([*of_text, *model.read([replace(tree(cache, tokens[30:]), previous=features[30:37])])])
    for expected, hidden in zip(*found, strict=True):
        assert far(hidden, expected) < NEAR[torch.float32]


def test_a_blocks_rows_pass_natively_and_its_rows_of_features_do_not(
    tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of a block drafter only keep what rows of features make of them; its other rows have no features."""
    block = GuessedBlock(size=5, mask_token=1, first_slot=1, causal_layers=(False,) * 3)
    usual, native = both(fuse=Sum(), block=block)
    features = torch.randn(30, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    read, seen = native._native.read, list[PassRows]()

    def noted(parts: list[PassRows], *rest: Any) -> Any:
        seen.extend(parts)
        return read(parts, *rest)

    monkeypatch.setattr(native._native, "read", noted)
    found = []
    for model in (usual, native):
        cache = model.new_text()
        model.read([next_rows(cache, tokens[:30], previous=features)])
        cache.commit_next(tokens[:30].tolist())
        rows = next_rows(cache, tokens[30:35])
        found += model.read([replace(rows, visible=torch.ones(5, 5, dtype=torch.bool))])
    assert [part.count for part in seen] == [5]
    assert far(found[1], found[0]) < NEAR[torch.float32]


def test_a_layer_that_scales_its_rows_is_read_by_torch() -> None:
    causal = CausalModel(copy.deepcopy(random_model("llama", torch.float32)), device=CPU)
    causal._layers[0].scale = 2.0
    causal.use_native_passes()
    assert not causal.is_native


def test_a_prompt_read_into_memory_of_another_has_the_bits_of_a_fresh_one(tokens: Tensor) -> None:
    _, native = both(dtype=torch.bfloat16)
    cache = text(native, tokens[50:70])
    cache.truncate(0)
    again, fresh = (native.read([next_rows(one, tokens[:20])])[0] for one in (cache, native.new_text()))
    assert torch.equal(again, fresh)


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_growing_a_trees_next_layer_sees_the_earlier_nodes_on_its_path(family: str, tokens: Tensor) -> None:
    """A draft reads a tree in parts: rows that are in the cache already belong to the tail."""
    usual, native = both(family)
    rows = []
    for model in (usual, native):
        cache = text(model, tokens[:30])
        parents = torch.tensor(PARENTS)
        visible, positions = ancestors_mask(parents), cache.length + depths(parents)
        first = PassRows(cache=cache, ids=tokens[30:33], positions=positions[:3], visible=visible[:3, :3])
        second = PassRows(cache=cache, ids=tokens[33:37], positions=positions, visible=visible[3:])
        rows.append(torch.cat([*model.read([first]), *model.read([second])]))
    assert far(rows[1], rows[0]) < NEAR[torch.float32]
    assert torch.equal(rows[1], native.read([tree(text(native, tokens[:30]), tokens[30:])])[0])


def test_a_row_of_the_largest_tree_has_its_bits_alone(tokens: Tensor) -> None:
    _, native = both(dtype=torch.bfloat16)
    count = 2 * passes.MOST_TOGETHER + 9  # nodes in a few calls: 0 over 1 over 2, and so on by 40 chains
    parents = torch.tensor([-1, *(max(0, node - 40) for node in range(1, count))])
    cache, ids = text(native, tokens[:30]), tokens.repeat(3)[:count]
    rows = PassRows(
        cache=cache, ids=ids, positions=cache.length + depths(parents), visible=ancestors_mask(parents)
    )  # fmt: skip
    (in_tree,) = native.read([rows])
    node, path = count - 1, list[int]()
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    alone = text(native, tokens[:30])
    for node in reversed(path):
        (hidden,) = native.read([next_rows(alone, ids[node : node + 1])])
        alone.commit_next([int(ids[node])])
        assert torch.equal(hidden[0], in_tree[node])


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "mixtral",
        "qwen3-moe",
        "qwen2-moe",
        "glm4-moe",
        "qwen3.5",
        "qwen3-next",
        "smollm3",
        "ministral3",
    ],
)
def test_passes_hold_the_memory_that_a_plan_counts(family: str, tokens: Tensor) -> None:
    """Whatever order they come in, with as many threads."""
    _, native = both(family)
    cache, planned = text(native, tokens[:30]), functools.partial(planned_bytes, FAMILIES[family]())
    native.read([tree(cache, tokens[30:])])
    before = native.native_bytes
    native.read([next_rows(text(native, tokens[:30]), tokens[30:100])])
    native.read([tree(cache, tokens[30:])])
    most = planned(num_rows=70, num_keys=100, max_path=len(PARENTS), num_threads=torch.get_num_threads())
    assert before < native.native_bytes <= most < 1.03 * native.native_bytes


@pytest.mark.parametrize(
    "config",
    [transformers.GPT2Config(), transformers.Mamba2Config(), transformers.Gemma3nTextConfig()],
    ids=lambda one: one.model_type,
)
def test_a_plan_counts_nothing_for_layers_that_state_no_such_sizes(config: PretrainedConfig) -> None:
    assert planned_bytes(config, num_rows=70, num_keys=100, max_path=7, num_threads=2) == 0


@pytest.mark.parametrize("streams", [False, True])
def test_the_plan_of_a_pair_has_room_for_what_its_passes_hold(streams: bool) -> None:
    limits = MemoryLimits(max_resident_layers=1 if streams else None)
    with Engine.from_pair(open_pair(None, None), context_tokens=512, limits=limits) as engine:
        engine.generate("Once upon a time there was", max_new_tokens=30)
        for role, model in (("target", engine.target_model), ("draft", engine.draft_model)):
            planned = engine.placement.device_bytes.get(f"{role}: passes in one call", 0)
            assert model is not None
            assert (model.native_bytes > 0) == (role == "draft" or not streams)
            assert model.native_bytes <= planned


@pytest.mark.parametrize(("family", "quant"), [("qwen2-moe", "none"), ("qwen2-moe", "int4"), ("qwen3-next", "int4")])
def test_an_engines_mixture_with_an_expert_that_all_rows_have_is_read_natively(
    family: str, quant: str, tmp_path: Path
) -> None:
    """Packed or not, a state's rates too; and its texts by trees are those of plain decoding."""
    sizes = {**SIZES, "vocab_size": 257, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    sizes |= {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    rates = {**DELTA_RULE, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 32}
    rotation = {**ROPE, "partial_rotary_factor": 0.5}
    configs: dict[str, Callable[[], PretrainedConfig]] = {
        "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**sizes),
        "qwen3-next": lambda: transformers.Qwen3NextConfig(**sizes, **rates, rope_parameters=rotation),
    }
    folder = save_folder(tmp_path / "mixture", make_model(configs[family]()))
    texts = []
    for policy in ("none", "default"):
        settings = TreeSettings(policy="none") if policy == "none" else TreeSettings()
        with Engine.from_pretrained(str(folder), draft="none", tree=settings, dtype="bfloat16", quant=quant) as engine:
            assert engine.target_model.is_native
            texts.append(engine.generate([*range(5, 40), *range(5, 30)], max_new_tokens=24).token_ids)
    assert texts[0] == texts[1]


def test_what_is_no_number_in_one_text_stays_there(tokens: Tensor) -> None:
    _, native = both(dtype=torch.bfloat16)
    (expected,) = native.read([tree(text(native, tokens[:30]), tokens[30:])])
    broken, whole = text(native, tokens[:30]), text(native, tokens[:30])
    broken.layers[0].storage[1][:, :, 3] = torch.nan
    found = native.read([next_rows(broken, tokens[:1]), tree(whole, tokens[30:])])
    assert found[0].isnan().all()
    assert torch.equal(found[1], expected)


def test_a_pass_that_is_ended_leaves_the_text_as_it_was(tokens: Tensor) -> None:
    _, native = both()
    cache = text(native, tokens[:30])
    (expected,) = native.read([next_rows(cache, tokens[30:31])])
    cache.truncate()

    def end(_share: float) -> None:
        raise KeyboardInterrupt

    native.watch = end
    with pytest.raises(KeyboardInterrupt):
        native.read([tree(cache, tokens[40:])])
    native.watch = None
    assert cache.length == 30
    assert torch.equal(native.read([next_rows(cache, tokens[30:31])])[0], expected)


def test_layers_of_other_parts_are_read_as_before(tokens: Tensor) -> None:
    config = transformers.Olmo2Config(**SIZES)  # whose norms are behind attention and MLP alone
    model = CausalModel(model_from_config(config, dtype=torch.float32).eval(), device=CPU)
    model.use_native_passes()
    assert not model.is_native
    assert not trial.is_read_natively(config)


@pytest.mark.parametrize(("num_groups", "groups_used"), [(1, 1), (2, 1), (5, 4)])
def test_a_router_that_chooses_among_groups_is_read_by_torch(num_groups: int, groups_used: int) -> None:
    """Where most groups are used, few rows have other experts than the largest: the sample's have none."""
    groups = {"n_group": num_groups, "topk_group": groups_used}
    config = transformers.Glm4MoeConfig(**{**SIZES, "head_dim": 32}, **{**ROUTED, **groups}, n_shared_experts=2)
    model = CausalModel(make_model(config), device=CPU)
    model.use_native_passes()
    assert model.is_native == (num_groups == groups_used)


UNREAD: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "a cap that is stated, and not used": (transformers.Gemma3TextConfig, {}, {"attn_logit_softcapping": 30.0}),
    "another gate": (
        transformers.MixtralConfig, {"num_local_experts": 4, "hidden_act": "gelu_new"}, {"hidden_act": "gelu"},
    ),
    "a limit": (
        transformers.MixtralConfig, {"num_local_experts": 4, "hidden_act": "gelu_new"}, {"hidden_act": "gelu_10"},
    ),
    "mixtures that choose among groups": (
        transformers.Dots1Config,
        {**ROUTED, "first_k_dense_replace": 2, "n_shared_experts": 1},
        {"n_group": 5, "topk_group": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_unread", [False, True])
@pytest.mark.parametrize("setting", UNREAD)
def test_a_setting_of_which_no_text_knows_shows_in_the_narrow_copy(setting: str, is_unread: bool) -> None:
    """It lies in later layers, behind more positions than a trial's text has, or beyond numbers of a small model."""
    family, stated, unread = UNREAD[setting]
    config = family(**{**SIZES, "pad_token_id": 0, **stated, **(unread if is_unread else {})})
    assert trial.is_read_natively(config) != is_unread


@pytest.fixture
def tried_anew() -> Iterator[None]:
    """Trials whose text is written, and judged, again."""
    caches = trial._is_right, passes._compiled
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def one_wider(_window: AttentionWindow, size: int | None) -> AttentionWindow:
    return AttentionWindow(None if size is None else size + 1)


def without_sinks(*arguments: Value, sink: Value | None) -> Value:
    return WEIGHTS(*arguments, sink=None)


WEIGHTS = attention._weights
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda _: None,
    "an activation": lambda patch: patch.setitem(pass_text.ACTIVATIONS, "silu", functions.gelu),
    "a window off by one": lambda patch: patch.setattr(passes, "replace", one_wider),
    "a rotation's halves": lambda patch: patch.setattr(
        attention, "_rotated", lambda _code, _shape, vectors, _rotation: vectors
    ),
    "a sink left out": lambda patch: patch.setattr(attention, "_weights", without_sinks),
    "the sum of weights": lambda patch: patch.setattr(
        attention, "exp", lambda code, value: functions.exp(code, code.fmul(value, functions.constant(0.99)))
    ),
}  # fmt: skip


def the_expert_behind(steps: MixtureSteps, code: Code, logits: Value) -> tuple[Value, Value]:
    """The expert after the one with the largest logit, and that logit."""
    best, most = LARGEST(steps, code, logits)
    return code.urem(code.add(best, code.number(1)), code.number(steps._mixture.experts)), most


def halves_of_pairs(code: Code, row: Value, column: Value, wide: int, *, in_pairs: bool) -> tuple[Value, Value]:
    return GATE_AND_UP(code, row, column, wide, in_pairs=False)


GATE_AND_UP, LARGEST = mixture._gate_and_up, MixtureSteps._largest


def without_correction(steps: MixtureSteps, code: Code, layer: RecordFields, *rest: Value) -> None:
    routing = replace(steps._mixture.routing, has_correction=False)
    SCORE(MixtureSteps(steps._shape, replace(steps._mixture, routing=routing), steps._round_row), code, layer, *rest)


def shares_of_corrected_scores(
    steps: MixtureSteps, code: Code, layer: RecordFields, logits: Value, scores: Value, *rest: Value
) -> None:
    SCORE(steps, code, layer, logits, scores, *rest)
    with code.loop(0, steps._mixture.logits, mixture.WIDTH) as expert:
        corrected = functions.read_floats(code, logits, expert, is_bf16=False)
        functions.write_floats(code, corrected, scores, expert, is_bf16=False)


SCORE, LIES_IN = MixtureSteps._score, DecoderShape.lies_in
FAULTS_OF_ROUTERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda _: None,
    "a shared expert left out": lambda patch: patch.setattr(MixtureSteps, "has_shared", False),
    "scores": lambda patch: patch.setattr(mixture, "logistic", functions.exp),
    "a correction left out": lambda patch: patch.setattr(MixtureSteps, "_score", without_correction),
    "shares of corrected scores": lambda patch: patch.setattr(MixtureSteps, "_score", shares_of_corrected_scores),
    "a gate left out": lambda patch: patch.setattr(attention, "logistic", lambda *_: functions.constant(1.0)),
    "the first of those in one": lambda patch: patch.setattr(
        DecoderShape, "lies_in", lambda shape, name: (LIES_IN(shape, name)[0], 0)
    ),
}  # fmt: skip
FAULTS_OF_MIXTURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda _: None,
    "an activation": lambda patch: patch.setitem(mixture.ACTIVATIONS, "silu", functions.gelu),
    "shares": lambda patch: patch.setattr(
        mixture, "exp", lambda code, value: functions.exp(code, code.fmul(value, functions.constant(0.99)))
    ),
    "an expert's pairs": lambda patch: patch.setattr(mixture, "_gate_and_up", halves_of_pairs),
    "another expert": lambda patch: patch.setattr(MixtureSteps, "_largest", the_expert_behind),
}  # fmt: skip


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("fault", FAULTS_OF_MIXTURES)
def test_a_mixtures_text_that_computes_something_else_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS_OF_MIXTURES[fault](monkeypatch)
    assert trial.is_read_natively(FAMILIES["gpt-oss"]()) == (fault in {"none", "an activation"})
    assert trial.is_read_natively(FAMILIES["qwen3-moe"]()) == (fault in {"none", "an expert's pairs"})


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize(
    ("fault", "family", "shows"),
    [
        *(
            (fault, "glm4-moe", fault not in {"none", "a gate left out", "the first of those in one"})
            for fault in FAULTS_OF_ROUTERS
        ),
        ("a shared expert left out", "qwen2-moe", True),
        ("scores", "qwen2-moe", True),  # of the share that the shared expert has
        ("none", "qwen2-moe", False),
        ("the first of those in one", "phi3", True),
        ("none", "phi3", False),
        ("a gate left out", "qwen3.5-attention", True),
        ("none", "qwen3.5-attention", False),
    ],
)
def test_a_layers_text_that_leaves_out_or_mistakes_a_part_is_not_used(
    fault: str, family: str, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS_OF_ROUTERS[fault](monkeypatch)
    assert trial.is_read_natively(FAMILIES[family]()) != shows


ROTATIONS = passes._Rotations.of_layers
FAULTS_OF_POSITIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda _: None,
    "all layers rotate": lambda patch: patch.setattr(
        passes._Rotations, "of_layers", lambda rotations, count: ROTATIONS(rotations, count)[:1] * len(rotations._kinds)
    ),
    "no query grows": lambda patch: patch.setattr(passes, "QUERY_GROWTH", "none"),
}


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("fault", FAULTS_OF_POSITIONS)
def test_layers_without_positions_and_queries_that_grow_by_theirs_are_read_as_such_or_by_torch(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in later layers of published models, and behind more positions than a trial's text has."""
    FAULTS_OF_POSITIONS[fault](monkeypatch)
    of_later_layers = transformers.SmolLM3Config(**{**SIZES, "pad_token_id": 0, "no_rope_layers": [1, 1, 0]})
    behind_long_texts = transformers.Ministral3Config(
        **SIZES, rope_parameters={**GROWING, "original_max_position_embeddings": 256}
    )
    assert trial.is_read_natively(of_later_layers) == (fault != "all layers rotate")
    assert trial.is_read_natively(behind_long_texts) == (fault != "no query grows")


def inputs_of_the_tap_before(steps: DeltaRuleSteps, code: Code, own: OwnRow, tap: int) -> tuple[Value, Value]:
    return INPUTS(steps, code, own, max(tap - 1, 0))


def gates_of_the_first_head(steps: DeltaRuleSteps, code: Code, record: RecordFields, row: Value, _head: Value) -> Value:
    return GATES(steps, code, record, row, code.number(0))


def all_but_the_last(ancestors: Ancestors, work: Callable[[Value, Value], None]) -> None:
    code = ancestors._code
    with code.loop(0, code.sub(ancestors.count, code.number(2))) as index:
        work(index, ancestors.place(index))


def parents_of_paths_in_order(ancestors: Ancestors, index: Value) -> Value:
    """Places as if a tree's rows followed each other."""
    return ancestors._code.add(ancestors._start, index)


INPUTS, GATES = DeltaRuleSteps._inputs, DeltaRuleSteps._gates
FAULTS_OF_STATES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda _: None,
    "a decay": lambda patch: patch.setattr(delta_rule, "softplus", functions.exp),
    "a rate": lambda patch: patch.setattr(delta_rule, "logistic", lambda *_: functions.constant(1.0)),
    "an activation": lambda patch: patch.setattr(delta_rule, "silu", functions.gelu),
    "a key's length": lambda patch: patch.setattr(delta_rule, "KEY_EPS", 0.1),
    "fading": lambda patch: patch.setattr(delta_rule, "exp_of_doubles", lambda *_: functions.of_doubles(1.0)),
    "a tap": lambda patch: patch.setattr(DeltaRuleSteps, "_inputs", inputs_of_the_tap_before),
    "gates": lambda patch: patch.setattr(DeltaRuleSteps, "_gates", gates_of_the_first_head),
    "a parent left out": lambda patch: patch.setattr(Ancestors, "each_before", all_but_the_last),
    "a sibling in its place": lambda patch: patch.setattr(Ancestors, "place", parents_of_paths_in_order),
}


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize(
    ("fault", "family"), [*((fault, "qwen3.5") for fault in FAULTS_OF_STATES), ("gates", "qwen3-next")]
)
def test_a_states_text_that_computes_something_else_is_not_used(
    fault: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS_OF_STATES[fault](monkeypatch)
    assert trial.is_read_natively(FAMILIES[family]()) == (fault == "none")


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_text_that_computes_something_else_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    family = "gpt-oss" if fault == "a sink left out" else "mistral-window"
    assert trial.is_read_natively(FAMILIES[family]()) == (fault == "none")
