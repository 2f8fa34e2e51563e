"""Streamed logits equal resident logits bit for bit, whatever streams and however slowly."""

import mmap
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from offload.checkpoint import read_checkpoint
from offload.errors import CheckpointError, StreamError
from offload.layer_store import LayerRecord, LayerStore
from offload.loaders import CpuLoader
from offload.pages import MappedFile
from offload.skeleton import build_skeleton
from offload.streamed_model import StreamedModel
from tests.offload.streaming import CPU, logits, skeleton_of, unlimited_placement
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model, save_folder
from tests.support.tiny_configs import tiny_config


@contextmanager
def streamed(folder: Path, *, dtype: torch.dtype, resident: int) -> Iterator[PreTrainedModel]:
    skeleton = skeleton_of(folder, dtype)
    placement = unlimited_placement(skeleton, resident=resident)
    assert placement.num_resident == resident
    with closing(StreamedModel(skeleton, placement, device=CPU)) as model:
        yield model.model


def passes(model: PreTrainedModel, count: int) -> None:
    for _ in range(count):
        logits(model)


def is_cached(path: Path) -> bool:
    """Return whether the system's cache holds a file's first page."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system does not say what it caches")
def test_dropped_pages_leave_the_systems_cache_where_they_are_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    os.sync()  # pages that wait to be written stay
    file = MappedFile(path)
    file.populate(0, 2 * mmap.PAGESIZE)
    file.drop(0, 2 * mmap.PAGESIZE)
    assert is_cached(path)
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(path):
        pytest.skip("these files are in memory")
    file.populate(0, 2 * mmap.PAGESIZE)
    file.drop(0, 2 * mmap.PAGESIZE, from_cache=True)
    assert not is_cached(path)


@pytest.mark.parametrize("is_cacheable", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as-stored", "converted"])
def test_layers_that_stream_leave_the_systems_cache_where_it_cannot_hold_them(
    dtype: torch.dtype, is_cacheable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path, make_model(FAMILIES["llama"](), dtype=torch.bfloat16))
    skeleton = skeleton_of(folder, dtype)
    placement = replace(unlimited_placement(skeleton, resident=0), is_cacheable=is_cacheable)
    dropped: set[tuple[int, bool]] = set()
    drop = LayerStore.drop

    def spied(store: LayerStore, record: LayerRecord, *, from_cache: bool = False) -> None:
        if record.tensors:
            dropped.add((record.index, from_cache))
        drop(store, record, from_cache=from_cache)

    with closing(StreamedModel(skeleton, placement, device=CPU)) as model:
        monkeypatch.setattr(LayerStore, "drop", spied)
        passes(model.model, 2)  # some layers are read before
    assert dropped == {(record.index, not is_cacheable) for record in skeleton.records}


# All pairs of how it is stored, what it is computed in, and how many layers stay; neighbours in one half each.
HALVES = (
    (("10KB", torch.bfloat16, 0), ("10KB", torch.float32, 1), ("5GB", torch.float32, 3)),
    (("5GB", torch.float32, 0), ("5GB", torch.bfloat16, 1), ("10KB", torch.bfloat16, 3)),
)


@pytest.mark.parametrize(
    ("family", "shard", "dtype", "resident"),
    [(family, *HALVES[index % 2][(index // 2 + more) % 3]) for index, family in enumerate(FAMILIES) for more in (0, 1)]
    + [(family, "10KB", torch.bfloat16, 0) for family in RECURRENT],
)
def test_streamed_logits_equal_resident_logits_bit_for_bit(
    family: str, shard: str, dtype: torch.dtype, resident: int, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path, make_model({**FAMILIES, **RECURRENT}[family](), dtype=torch.bfloat16), shard=shard)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with streamed(folder, dtype=dtype, resident=resident) as model:
        for rows in (20, 1, 40):
            assert torch.equal(logits(model, rows=rows), logits(reference, rows=rows))


@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as-stored", "converted"])
@pytest.mark.parametrize("is_transposed", [True, False], ids=["transposed", "as-computed"])
def test_experts_that_are_stored_transposed_are_seen_through_a_view(
    is_transposed: bool, dtype: torch.dtype, resident: int, tmp_path: Path
) -> None:
    """Qwen publishes Qwen3-VL's so, and transformers writes them as it computes with them; their shapes tell."""
    config = tiny_config("qwen3_vl_moe")
    config.text_config.moe_intermediate_size = 24
    folder = save_folder(tmp_path, AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16))
    if is_transposed:
        file = folder / "model.safetensors"
        tensors = {
            name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor
            for name, tensor in load_file(file).items()
        }
        assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 48)
        save_file(tensors, file, metadata={"format": "pt"})
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    with streamed(folder, dtype=dtype, resident=resident) as model:
        for rows in (20, 1):
            torch.testing.assert_close(logits(model, rows=rows), logits(reference, rows=rows))


@pytest.mark.skipif("step3p7" not in CONFIG_MAPPING, reason="this transformers does not have it")
@pytest.mark.parametrize("resident", [0, 4])
def test_gates_of_all_experts_and_their_other_half_may_be_stored_apart(resident: int, tmp_path: Path) -> None:
    """Step publishes two tensors of all experts, and transformers computes with one."""
    torch.manual_seed(0)
    folder = save_folder(tmp_path, AutoModelForImageTextToText.from_config(tiny_config("step3p7")))
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    assert "model.layers.3.moe.up_proj.weight" in load_file(folder / "model.safetensors")
    with streamed(folder, dtype=torch.float32, resident=resident) as model:
        for rows in (20, 1):
            torch.testing.assert_close(logits(model, rows=rows), logits(reference, rows=rows))


@pytest.mark.parametrize("slow", ["reader", "compute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as-stored", "converted"])
def test_results_do_not_depend_on_what_is_slow(
    slow: str, dtype: torch.dtype, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CpuLoader.load

    def slow_load(self: CpuLoader, record: LayerRecord, slot: int) -> None:
        time.sleep(0.02)
        load(self, record, slot)

    if slow == "reader":
        monkeypatch.setattr(CpuLoader, "load", slow_load)
    reference = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=dtype).eval()
    with streamed(pair_folders[0], dtype=dtype, resident=0) as model:
        if slow == "compute":
            for layer in model.model.layers:
                layer.mlp.register_forward_hook(lambda *_: time.sleep(0.02))
        for _ in range(3):
            assert torch.equal(logits(model), logits(reference))


def test_a_file_that_shrinks_is_named_and_the_next_pass_after_its_return_works(
    pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    layer_file = read_checkpoint(folder).tensors["model.layers.1.mlp.up_proj.weight"].file
    content = layer_file.read_bytes()
    with streamed(folder, dtype=torch.float32, resident=0) as model:
        before = logits(model)
        time.sleep(0.1)  # until the reader has filled its slots: a cut while it copies mapped pages kills the process
        with layer_file.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(StreamError, match=layer_file.name):
            passes(model, 3)  # layers read ahead before the cut may still be whole
        with layer_file.open("r+b") as file:
            file.write(content)
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("dtype", "resident"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_a_file_replaced_under_its_name_does_no_harm(
    dtype: torch.dtype, resident: int, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """As downloads do it: the mapping keeps the old file, of whatever length the new one is."""
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    with streamed(folder, dtype=dtype, resident=resident) as model:
        before = logits(model)
        for path in folder.glob("*.safetensors"):
            save_file({"none": torch.zeros(1)}, folder / "new", metadata={"format": "pt"})
            (folder / "new").replace(path)
        passes(model, 3)
        assert torch.equal(logits(model), before)


def write_over(path: Path, scratch: Path) -> bytes:
    """Give a file other weights in place, as `cp` does, and return what it held."""
    content = path.read_bytes()
    save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, scratch, metadata={"format": "pt"})
    with path.open("r+b") as file:
        file.write(scratch.read_bytes())
    return content


def write_back(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize(
    ("dtype", "resident", "tensor"),
    [
        (torch.bfloat16, 1, "model.layers.1.mlp.up_proj.weight"),
        (torch.float32, 1, "model.layers.1.mlp.up_proj.weight"),
        (torch.bfloat16, 3, "model.layers.1.mlp.up_proj.weight"),
        (torch.bfloat16, 3, "model.embed_tokens.weight"),
    ],
    ids=["streamed", "converted", "resident", "outside-layers"],
)
def test_a_file_written_over_is_named_and_its_old_content_is_taken_again(
    dtype: torch.dtype, resident: int, tensor: str, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    weights = read_checkpoint(folder).tensors[tensor].file
    with streamed(folder, dtype=dtype, resident=resident) as model:
        before = logits(model)
        content = write_over(weights, tmp_path / "new")
        with pytest.raises(StreamError, match=weights.name) as caught:
            passes(model, 3)
        assert caught.value.code == "E_FILE_CHANGED"
        write_back(weights, content)
        passes(model, 1)
        assert torch.equal(logits(model), before)


def test_what_was_converted_stays_as_it_was_when_its_file_is_written_over(
    pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    with streamed(folder, dtype=torch.float32, resident=3) as model:
        before = logits(model)
        for path in folder.glob("*.safetensors"):
            write_over(path, tmp_path / "new")
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("resident", [1, 3])
def test_a_file_that_is_touched_does_no_harm_and_what_is_written_behind_it_shows(
    resident: int, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """However soon it is written: a file's time may be that of its last touch."""
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    weights = read_checkpoint(folder).tensors["model.layers.0.mlp.up_proj.weight"].file
    with streamed(folder, dtype=torch.bfloat16, resident=resident) as model:
        before = logits(model)
        weights.touch()
        assert torch.equal(logits(model), before)
        state = weights.stat()
        write_over(weights, tmp_path / "new")
        os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
        with pytest.raises(StreamError, match=weights.name):
            logits(model)


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_resident_file_that_shrinks_is_named_before_its_pages_are_touched(
    tensor: str, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    weights = read_checkpoint(folder).tensors[tensor].file
    content = weights.read_bytes()
    with streamed(folder, dtype=torch.bfloat16, resident=3) as model:
        before = logits(model)
        with weights.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(StreamError, match="shrunk") as caught:
            logits(model)
        assert caught.value.code == "E_READ_FAILED"
        write_back(weights, content)
        assert torch.equal(logits(model), before)


def test_what_is_written_over_within_a_pass_is_seen_at_its_end(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    weights = read_checkpoint(folder).tensors["model.layers.1.mlp.up_proj.weight"].file
    with streamed(folder, dtype=torch.bfloat16, resident=3) as model:
        model.model.layers[0].register_forward_hook(lambda *_: write_over(weights, tmp_path / "new") and None)
        with pytest.raises(StreamError, match=weights.name):
            logits(model)


def test_a_forward_that_raises_leaves_the_stream_usable(pair_folders: tuple[Path, Path]) -> None:
    with streamed(pair_folders[0], dtype=torch.float32, resident=0) as model:
        before = logits(model)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model)
        hook.remove()
        assert torch.equal(logits(model), before)


def test_a_checkpoint_of_the_bare_body_loads(tmp_path: Path) -> None:
    """Some folders hold names without the 'model.' prefix; the head is tied."""
    model = make_model(FAMILIES["llama"]())
    body = LlamaModel(model.config)
    body.load_state_dict(model.model.state_dict())
    body.save_pretrained(tmp_path)
    with streamed(tmp_path, dtype=torch.float32, resident=1) as found:
        assert torch.equal(logits(found), logits(model))


def test_a_stored_head_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    """Both tables are stored and differ: they are two weights, as transformers reads it too."""
    save_folder(tmp_path, make_model(FAMILIES["llama"]()))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})
    with streamed(tmp_path, dtype=torch.float32, resident=0) as model:
        assert torch.equal(model.lm_head.weight, head)
        assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_a_tied_table_may_be_stored_under_either_name(tmp_path: Path) -> None:
    original = make_model(FAMILIES["llama"]())
    save_folder(tmp_path, original)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with streamed(tmp_path, dtype=torch.float32, resident=0) as model:
        assert torch.equal(logits(model), logits(original))


def test_stored_buffers_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's layer scalars, say: a buffer that is stored must not keep its initial value."""
    build = LlamaDecoderLayer.__init__

    def with_scalar(self: LlamaDecoderLayer, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.register_buffer("layer_scalar", torch.ones(1))

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", with_scalar)
    original = make_model(FAMILIES["llama"]())
    original.model.layers[1].layer_scalar.fill_(0.25)
    save_folder(tmp_path, original)
    with streamed(tmp_path, dtype=torch.float32, resident=0) as model:
        assert [float(layer.layer_scalar) for layer in model.model.layers] == [1.0, 0.25, 1.0]


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    save_folder(tmp_path, make_model(FAMILIES["llama"]()))
    checkpoint = read_checkpoint(tmp_path)
    deeper = LlamaConfig(**{**SMALL, "num_hidden_layers": 4}, num_key_value_heads=2, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lacks 9 tensors.*model\.layers\.3\."):
        build_skeleton(deeper, checkpoint, dtype=torch.float32)
    wider = LlamaConfig(**{**SMALL, "intermediate_size": 96}, num_key_value_heads=2, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"has shape \[64, 32\].*make it \[96, 32\]"):
        build_skeleton(wider, checkpoint, dtype=torch.float32)


def test_the_stream_is_not_used_for_resident_layers(pair_folders: tuple[Path, Path]) -> None:
    skeleton = skeleton_of(pair_folders[0])
    placement = unlimited_placement(skeleton)
    model = StreamedModel(skeleton, placement, device=CPU)
    assert placement.streamed_bytes == 0
    assert model._stream is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as-stored", "converted"])
@pytest.mark.parametrize("resident", [0, 1])
def test_layers_that_stay_are_in_large_pages(
    dtype: torch.dtype, resident: int, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file, or of memory where another dtype is computed in; those that stream are read as they were."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(MappedFile, "use_large_pages", lambda _file, start, end: told.append((start, end)))

    def note(memory: Tensor) -> Tensor:
        told.append((0, memory.nbytes))
        return memory

    monkeypatch.setattr("offload.streamed_model.in_large_pages", note)
    with streamed(pair_folders[0], dtype=dtype, resident=resident):
        pass
    layers = skeleton_of(pair_folders[0], dtype).records
    if dtype == torch.bfloat16:
        found = [{(start, end) for _, start, end in layer.mapped.ranges} <= set(told) for layer in layers]
        assert sum(found) == resident
    assert told.count((0, layers[0].copied.flat_bytes)) >= resident * (dtype == torch.float32)
