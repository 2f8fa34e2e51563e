"""Heads that read a target's features, in one native call: first layers, a first row that none sees, and features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig

from edgespec.model.aux_states import AuxStates
from edgespec.model.causal_model import CausalModel
from edgespec.model.native import passes, trial
from edgespec.model.native.fields import RecordFields
from edgespec.model.native.pass_text import _Stages
from edgespec.model.native.shape import TakenFeature
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.tree.token_tree import ancestors_mask, depths
from offload.native.code import Code, Value
from offload.text_part import model_from_config
from tests.support.feature_drafts import new_drafts, new_target

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.03}
PARENTS, PATH = (-1, 0, 0, 1, 2, 3, 5), (0, 1, 3, 5, 6)
TEXT = 5  # tokens
IDS = torch.randint(96, (TEXT + len(PARENTS),), generator=torch.Generator().manual_seed(1))
FEATURES = torch.randn(len(IDS), 64, generator=torch.Generator().manual_seed(2))


def target_of(form: str) -> Any:
    """A Llama, or a model with layers of states, whose layer that guesses further has attention with gates."""
    if form != "mtp of Qwen3.5":
        return new_target(form, SIZES)
    kinds = ["linear_attention", "full_attention", "full_attention"]
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    config = Qwen3_5TextConfig(**SIZES, head_dim=32, layer_types=kinds, rope_parameters=rotation)
    return model_from_config(config, dtype=torch.float32)


def head(form: str, dtype: torch.dtype, **flags: bool) -> Any:
    """A head whose norms have weights of their own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = new_drafts(target_of(form), form.split()[0], seed=1).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) / 4
    for name, flag in flags.items():
        setattr(model.model.layers[0], name, flag)
    return model.to(dtype)


def both(form: str, dtype: torch.dtype = torch.float32, **flags: bool) -> tuple[CausalModel, CausalModel]:
    """The same head as torch runs it, and natively."""
    usual, native = (CausalModel(copy.deepcopy(head(form, dtype, **flags)), device=CPU) for _ in range(2))
    native.use_native_passes()
    assert native.is_native
    return usual, native


def read(model: CausalModel) -> list[Tensor]:
    """A text's rows and a tree's."""
    cache, features = model.new_text(), FEATURES.to(model.model.dtype)
    of_text = model.read([next_rows(cache, IDS[:TEXT], previous=features[:TEXT])])
    cache.commit_next(IDS[:TEXT].tolist())
    parents = torch.tensor(PARENTS)
    positions, visible = cache.length + depths(parents), ancestors_mask(parents)
    rows = PassRows(cache=cache, ids=IDS[TEXT:], positions=positions, visible=visible, previous=features[TEXT:])
    return [*of_text, *model.read([rows])]


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


WAYS = [("mtp", {}), ("mtp of Qwen3.5", {})] + [
    ("eagle3", {"norm_before_residual": is_normed, "has_feature_first": is_first})
    for is_normed, is_first in ((False, False), (True, False), (False, True))
]


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(("form", "flags"), WAYS)
def test_a_heads_rows_are_near_those_of_its_own_forward(
    form: str, flags: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first row, which has no feature before it, is seen by no other."""
    usual, native = both(form, dtype, **flags)
    monkeypatch.setattr(native, "_read", None)  # no row goes by torch
    for found, expected in zip(read(native), read(usual), strict=True):
        assert found.shape == expected.shape
        for one, other in zip(found, expected, strict=True):
            assert far(one, other) < NEAR[dtype]


@pytest.mark.parametrize("form", ["eagle3", "mtp", "mtp of Qwen3.5"])
def test_a_heads_row_has_its_bits_alone_and_in_a_tree(form: str) -> None:
    _, native = both(form, torch.bfloat16)
    _, in_tree = read(native)
    cache, features = native.new_text(), FEATURES.bfloat16()
    native.read([next_rows(cache, IDS[:TEXT], previous=features[:TEXT])])
    cache.commit_next(IDS[:TEXT].tolist())
    for node in PATH:
        number = slice(TEXT + node, TEXT + node + 1)
        (alone,) = native.read([next_rows(cache, IDS[number], previous=features[number])])
        cache.commit_next(IDS[number].tolist())
        assert torch.equal(alone[0], in_tree[node])


def test_a_head_that_is_tried_in_another_way_is_read_by_torch_then() -> None:
    usual, native = both("eagle3", norm_before_residual=False)
    before = read(native)
    for model in (usual, native):
        model.model.model.layers[0].norm_before_residual = True
    for one, other in zip(read(native), read(usual), strict=True):
        assert torch.equal(one, other)
    native.use_native_passes()
    for one, other, earlier in zip(read(native), read(usual), before, strict=True):
        assert far(one, other) < NEAR[torch.float32] < far(earlier, other)


def feature_in_the_embeddings_place(
    steps: _Stages,
    code: Code,
    record: RecordFields,
    row: Value,
    layer: RecordFields,
    scratch: Value,
    feature: TakenFeature,
) -> None:
    NORM_BOTH(steps, code, record, row, layer, scratch, replace(feature, is_first=not feature.is_first))


NORM_BOTH = _Stages._norm_both
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda _: None,
    "halves the other way round": lambda patch: patch.setattr(_Stages, "_norm_both", feature_in_the_embeddings_place),
    "the first row is seen": lambda patch: patch.setattr(
        passes, "replace", lambda window, **named: replace(window, first=0, **named)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_natively_computes_something_else_is_read_by_torch(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes._compiled.cache_clear()
    FAULTS[fault](monkeypatch)
    _, native = both("eagle3", torch.bfloat16 if fault == "none" else torch.float32)
    trial.try_weights(native, takes_features=True)
    assert native.is_native == (fault == "none")
    passes._compiled.cache_clear()


def features_of(model: CausalModel, ids: Sequence[Tensor]) -> list[Tensor]:
    """What texts keep of the target's rows."""
    caches = [model.new_text() for _ in ids]
    model.read([next_rows(cache, text) for cache, text in zip(caches, ids, strict=True)])
    for cache, text in zip(caches, ids, strict=True):
        cache.commit_next(text.tolist())
    return [cache.features_before(1, len(text) + 1) for cache, text in zip(caches, ids, strict=True)]


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_target_hands_out_the_stream_between_its_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_target("eagle3", SIZES).eval().requires_grad_(False).to(dtype)
    aux = AuxStates(layers=(0, 2, 3), make=lambda states: states[:, :64] + 2 * states[:, 64:128] - states[:, 128:])
    usual, native = (CausalModel(copy.deepcopy(model), device=CPU, keeps_hidden=aux) for _ in range(2))
    native.use_native_passes()
    monkeypatch.setattr(native, "_read", None)
    texts = [IDS, *(IDS.roll(number).repeat(6) for number in range(5))]  # of two calls
    found, expected = (features_of(one, texts) for one in (native, usual))
    for one, other in zip(found, expected, strict=True):
        assert far(one, other) < NEAR[dtype]
    assert torch.equal(found[0], features_of(native, texts[:1])[0])
