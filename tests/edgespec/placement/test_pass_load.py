"""The load of a pass: packed weights count by their kernel where one multiplies them, and else as unpacked."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig

from edgespec.config import MemoryLimits
from edgespec.pair.folder import open_architecture
from edgespec.placement.pass_load import model_load, moved_bytes
from edgespec.placement.plain_memory import plain_memory
from edgespec.placement.run_config import RunConfig
from edgespec.placement.traffic import TRAFFIC_BYTES, between_bytes
from edgespec.placement.weights import weights_by_size
from edgespec.tree.settings import TreeSettings
from offload.checkpoint import TensorEntry
from offload.formats.gguf import GGUF
from offload.formats.gguf_blocks import TYPES
from offload.formats.storage import StoredParameter
from offload.layouts import int4, int4_orders
from offload.layouts.known import kernel_of
from offload.packed_weight import PackedModule, PackedWeight
from offload.text_part import decoder_layers, model_from_config
from profiles.roofline import ModelLoad
from tests.offload.streaming import unlimited_placement
from tests.support.tiny_configs import tiny_config

CPU = torch.device("cpu")
NUM_WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # of two layers' matrices
needs_kernel = pytest.mark.skipif(int4_orders.kernel_order() is None, reason="torch has no kernel here")


def load_of(
    folder: Path,
    dtype: torch.dtype,
    quant: str | None,
    *,
    method: dict[str, object] | None = None,
    device: torch.device = CPU,
) -> ModelLoad:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if method is not None:
        config.quantization_config = method
    config.save_pretrained(folder)
    weights = weights_by_size(open_architecture(folder), dtype=dtype, quant=quant)
    return model_load(weights, None, keys=1, num_texts=1, device=device)


@needs_kernel
def test_packed_weights_count_by_their_kernel_where_the_number_format_has_one(tmp_path: Path) -> None:
    plain, unpacked, multiplied = (
        load_of(tmp_path, dtype, quant)
        for dtype, quant in ((torch.bfloat16, None), (torch.float32, "nf4"), (torch.bfloat16, "int4"))
    )
    assert unpacked.multiplied == ()
    assert unpacked.unpacked_bytes == 4 * NUM_WEIGHTS
    assert unpacked.row_flops == plain.row_flops
    [packed] = multiplied.multiplied
    kernel = kernel_of(int4.INT4, (64, 64), torch.bfloat16, CPU)
    assert (packed.packed_format, packed.num_weights, packed.max_rows) == ("int4", NUM_WEIGHTS, kernel.max_rows)
    assert packed.num_bytes == NUM_WEIGHTS * 5 // 8
    assert packed.unpacked_bytes == 2 * NUM_WEIGHTS
    assert multiplied.unpacked_bytes == 0
    assert multiplied.row_flops == plain.row_flops - 2 * NUM_WEIGHTS
    assert math.isclose(multiplied.layer_bytes, packed.num_bytes, rel_tol=0.02), "norms are left"


@needs_kernel
def test_a_published_model_that_is_a_config_alone_counts_as_it_would_be_kept(tmp_path: Path) -> None:
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    published, kept = (load_of(tmp_path, torch.bfloat16, quant, method=method) for quant in (None, "int4"))
    assert published.multiplied == ()
    assert [(packed.packed_format, packed.num_weights) for packed in kept.multiplied] == [("int4", NUM_WEIGHTS)]


def test_a_card_moves_more_than_packed_and_unpacked_weights_where_torch_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows, whose torch comes without Triton."""
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    cuda = torch.device("cuda", 0)
    found = {}
    for platform in ("win32", "linux"):
        monkeypatch.setattr("edgespec.placement.traffic.sys.platform", platform)
        for quant, of in ((None, method), ("int4", None), ("int8", None)):
            load = load_of(tmp_path, torch.bfloat16, quant, method=of, device=cuda)
            found[platform, quant] = load.between_bytes / NUM_WEIGHTS
    assert load_of(tmp_path, torch.bfloat16, None, method=method).between_bytes == 0
    assert found["win32", None] == pytest.approx(8.4 - 2 - 0.5, rel=0.05)
    assert found["linux", None] == 0
    for platform in ("win32", "linux"):  # no kernel, or no need of one
        assert found[platform, "int4"] == pytest.approx(32.1 - 2 - 5 / 8, rel=0.02)
        assert found[platform, "int8"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("name", "has_kernel"), [("Q4_K", True), ("IQ2_XS", False)])
def test_of_ggufs_types_those_without_a_kernel_move_more(
    name: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for a CPU unpacks both."""
    block, leaf = TYPES[name], f"p.gguf_{name.lower()}"
    for stored in ((64, block.num_bytes), (4, 16, block.num_bytes)):
        pieces = {leaf: (TensorEntry.planned(leaf, stored, torch.uint8),)}
        packing = GGUF.detect(StoredParameter(name="p.weight", shape=(64, 256), stored=pieces, stated={}))
        assert packing is not None
        module = PackedModule(nn.Linear(256, 64, device="meta"), [("weight", PackedWeight((64, 256), packing))])
        without = TRAFFIC_BYTES[name] - block.num_bytes / 256 - 2
        for platform, expected in (("win32", without), ("linux", 0 if has_kernel else without)):
            monkeypatch.setattr("edgespec.placement.traffic.sys.platform", platform)
            found = between_bytes(module, torch.bfloat16, torch.device("cuda", 0))
            assert found / (64 * 256) == pytest.approx(expected, abs=0.01)


HRM: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "vocab_size": 64, "pad_token_id": None, "H_cycles": 3, "L_cycles": 2,
}  # fmt: skip


@pytest.mark.parametrize("quant", [None, "nf4"])
def test_stacks_that_are_passed_several_times_count_as_often(quant: str | None, tmp_path: Path) -> None:
    """HRM's own forward runs its four layers 6, 6, 3 and 3 times: products are counted where they are made."""
    config = CONFIG_MAPPING["hrm_text"](**HRM, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    model = model_from_config(config, dtype=torch.float32).eval()
    run: list[int] = []  # weights of each product

    def counted(layer: nn.Module, _inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        run.append(layer.get_parameter("weight").numel())

    inside = [module for layer in decoder_layers(model)[1] for module in layer.modules()]
    matrices = [module for module in inside if isinstance(module, nn.Linear)]
    for matrix in matrices:
        matrix.register_forward_hook(counted)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    num_met, num_weights = sum(run), sum(matrix.get_parameter("weight").numel() for matrix in matrices)
    assert num_met == 4.5 * num_weights
    weights = weights_by_size(open_architecture(tmp_path), dtype=torch.bfloat16, quant=quant)
    placement = unlimited_placement(weights.skeleton, resident=0)
    resident, streamed = (
        model_load(weights, place, keys=0, num_texts=1, device=torch.device("cuda")) for place in (None, placement)
    )
    assert resident.num_layers == streamed.num_layers == 18
    assert streamed.disk_bytes == moved_bytes(weights, placement)
    if quant is None:
        assert resident.row_flops == streamed.row_flops == 2 * num_met
        assert math.isclose(resident.layer_bytes, 2 * num_met, rel_tol=0.01)
        assert math.isclose(streamed.disk_bytes, 2 * num_met, rel_tol=0.01)
    else:
        assert sum(packed.num_weights for packed in resident.multiplied) == num_met


@pytest.mark.parametrize("family", ["blt", "openai-gpt", "bloom"])
def test_a_pass_that_reads_whole_texts_is_counted_so(family: str, tmp_path: Path) -> None:
    """A row costs as much as its text where no cache is kept, and needs the memory of its text."""
    tiny_config(family).save_pretrained(tmp_path)
    weights = weights_by_size(open_architecture(tmp_path), dtype=torch.float32, quant=None)
    flops, memory = [], []
    for tokens in (64, 128):
        flops.append(model_load(weights, None, keys=tokens, num_texts=1, device=CPU).row_flops)
        run = RunConfig(device=CPU, dtype=torch.float32, limits=MemoryLimits(), context_tokens=tokens, prompt_tokens=16)
        memory.append(plain_memory(weights.skeleton.model, TreeSettings(policy="none"), run))
    is_whole = family != "bloom"
    assert (flops[1] > 1.9 * flops[0]) == is_whole
    assert (memory[1]["target: one pass"] > 1.9 * memory[0]["target: one pass"]) == is_whole
    assert (memory[1]["target: its own cache"] == 0) == is_whole


def test_the_widest_of_several_stacks_counts(tmp_path: Path) -> None:
    """The memory of BLT's pass grows with its model for patches."""
    needed = []
    for width in (32, 64):
        parts: dict[str, Any] = {"global_config": {"hidden_size": width, "intermediate_size": 2 * width}}
        CONFIG_MAPPING["blt"](**parts).save_pretrained(tmp_path)
        weights = weights_by_size(open_architecture(tmp_path), dtype=torch.float32, quant=None)
        run = RunConfig(device=CPU, dtype=torch.float32, limits=MemoryLimits(), context_tokens=4, prompt_tokens=4)
        needed.append(plain_memory(weights.skeleton.model, TreeSettings(policy="none"), run)["target: one pass"])
    assert needed[1] > 1.2 * needed[0]
