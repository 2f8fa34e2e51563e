"""A model without weights is built without a thought for their values, and is otherwise the one that is built with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from offload.skeleton import build_on_meta
from offload.text_part import model_from_config
from tests.support.families import FAMILIES, RECURRENT

CONFIGS = {
    name: {**FAMILIES, **RECURRENT}[name] for name in ("llama", "qwen3-moe", "gemma3", "gemma4", "qwen3-next", "mamba2")
}


class Draws(TorchDispatchMode):
    """Counts random numbers for tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        is_random = any(word in str(function) for word in ("normal", "uniform"))
        self.count += is_random and isinstance(arguments[0], torch.Tensor) and arguments[0].is_meta
        return function(*arguments, **(named or {}))


def build_with_values(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    with init_empty_weights(include_buffers=False):
        model = model_from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@pytest.mark.parametrize("make_config", CONFIGS.values(), ids=CONFIGS)
def test_no_values_are_drawn_for_weights_that_are_not_there(make_config: Callable[[], PretrainedConfig]) -> None:
    with Draws() as usual:
        expected = build_with_values(make_config(), torch.bfloat16)
    with Draws() as draws:
        found = build_on_meta(make_config(), "a folder", dtype=torch.bfloat16)
    assert (usual.count > 0, draws.count) == (True, 0)
    parameters = [
        {name: (part.shape, part.dtype, part.device.type) for name, part in model.named_parameters()}
        for model in (found, expected)
    ]
    assert parameters[0] == parameters[1]
    buffers = dict(expected.named_buffers())
    assert buffers.keys() == dict(found.named_buffers()).keys()
    for name, buffer in found.named_buffers():  # which are real
        assert torch.equal(buffer, buffers[name]), name


def test_weights_that_are_there_have_their_values() -> None:
    """Outside of the building, that is."""
    build_on_meta(FAMILIES["llama"](), "a folder", dtype=torch.float32)
    assert torch.nn.Linear(8, 8).weight.std() > 0.1
