"""The options of a run's place: what they may be, and what is refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import EdgespecError, MemoryLimits
from edgespec.pair.folder import ModelFolder
from edgespec.placement.run_config import RunConfig, resolve_run_config
from offload.checkpoint import Checkpoint
from tests.support.families import FAMILIES

TARGET = ModelFolder(
    folder=Path("llama"), config=FAMILIES["llama"](), checkpoint=Checkpoint(folder=Path("llama"), tensors={}),
    generation_config={},
)  # fmt: skip


def run_config(**options: Any) -> RunConfig:
    return resolve_run_config(TARGET, 256, **{"device": "cpu", **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_number_format_has_its_name_or_is_torchs_own(dtype: str | torch.dtype) -> None:
    assert run_config(dtype=dtype).dtype == torch.bfloat16
    assert run_config(device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(EdgespecError, match=r"dtype=int8.*is unknown"):
        run_config(dtype=torch.int8)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": 5}, {"device": 5}, {"quant": 5}, {"experts": 5}, {"context_tokens": "8k"}, {"context_tokens": 0},
        {"context_tokens": 2.5}, {"prompt_tokens": "x"}, {"prompt_tokens": -1}, {"cache_tokens": "x"}, {"threads": "2"},
        {"parallel": 2.5}, {"parallel": "2"}, {"cuda_graphs": "x"}, {"limits": 5}, {"limits": {"max_cpu_bytes": 5}},
    ],
)  # fmt: skip
def test_an_option_of_the_wrong_kind_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(EdgespecError, match=next(iter(options))) as caught:
        run_config(**options)
    assert caught.value.code == "E_SETTING"


def test_none_is_an_options_default_and_an_unknown_name_is_a_mistake_of_the_program() -> None:
    found = run_config(limits=None, threads=None, prompt_tokens=None, quant=None, cache_tokens=None)
    assert (found.limits, found.prompt_tokens) == (MemoryLimits(), found.context_tokens)
    with pytest.raises(TypeError, match="no option 'context'"):
        run_config(context=64)
