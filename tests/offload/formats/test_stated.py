"""What config.json states decides, by name and before a weight is looked for, whether a checkpoint is read."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from offload.errors import CheckpointError
from offload.formats.stated import check_readable, format_stated, quantises_activations, stated_packing
from tests.offload.formats.definitions import PUBLISHED, compressed

GROUP = {"num_bits": 4}


@pytest.mark.parametrize("form", PUBLISHED)
def test_what_is_published_in_a_known_format_is_read(form: str) -> None:
    check_readable(PUBLISHED[form].stated, Path("model"))


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        *(
            ({"quant_method": method}, f"quantised with {method}, which edgespec does not read")
            for method in ("aqlm", "exl2", "exl3", "quip", "hqq", "torchao", "bitnet", "vptq", "quanto", "auto-round")
        ),
        ({"group_size": 64, "bits": 4}, "quantised with mlx"),
        ({"quant_method": "gptq", "bits": 3}, "its weights have 3 bits, not 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
        ({"quant_method": "awq", "bits": 8}, "its weights have 8 bits, not 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "its version is gemv, not gemm"),
        (compressed("marlin-24", GROUP), "compressed-tensors marlin-24, and marlin-24 is not read"),
        ({**compressed("dense", GROUP), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (
            {
                **compressed("pack-quantized", GROUP),
                "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
            },
            "its weights are rotated",
        ),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name_with_a_way_out(stated: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        check_readable(stated, Path("model"))
    assert caught.value.code == "E_QUANTIZED"
    assert "`quant=nf4`" in caught.value.fix
    assert "gptq, awq" in caught.value.fix


def test_plain_models_state_nothing() -> None:
    assert stated_packing(LlamaConfig()) == {}
    assert format_stated({}) is None
    check_readable({}, Path("model"))


def test_mlx_states_its_format_elsewhere() -> None:
    assert format_stated(stated_packing(LlamaConfig(quantization={"group_size": 64, "bits": 4}))) == "mlx"


def test_the_format_is_named_in_a_few_words() -> None:
    named = {form: format_stated(published.stated) for form, published in PUBLISHED.items()}
    assert named["gptq"] == "gptq"
    assert named["compressed-nvfp4"] == "compressed-tensors nvfp4-pack-quantized"
    assert named["modelopt-nvfp4"] == "modelopt NVFP4"


def test_formats_whose_runtimes_quantise_activations_are_known() -> None:
    quantising = {form for form, published in PUBLISHED.items() if quantises_activations(published.stated)}
    assert quantising == {
        "fp8-blocks", "fp8-matrix", "compressed-fp8-rows", "compressed-fp8-blocks", "compressed-mxfp8", "fbgemm-fp8",
        "compressed-int8", "compressed-nvfp4", "modelopt-nvfp4",
    }  # fmt: skip
