"""Tables of embeddings and heads in blocks: rows looked up, products in chunks and in a kernel's order."""

import re
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma4TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from edgespec.model.family_logits import family_logits
from edgespec.pair.folder import open_model
from offload import packed_outside, streamed_model, unpacked_once
from offload.allocated import allocated_bytes
from offload.checkpoint import TensorEntry
from offload.formats.gguf import GGUF
from offload.formats.gguf_blocks import TYPES
from offload.formats.published import PublishedWeight
from offload.formats.storage import StoredParameter
from offload.gguf.header import TextList, read_gguf
from offload.layouts import at_load, byte_lanes, gguf_blocks, onednn
from offload.layouts.int4_lanes import LaneOrder
from offload.layouts.int4_orders import kernel_order
from offload.native.compiler import is_available
from offload.packed_outside import PackedHead, PackedTable
from offload.packed_weight import PackedModule, PackedWeight
from offload.placement import OUTSIDE_INDEX
from offload.streamed_model import StreamedModel
from offload.unpacked_once import added_bytes, layout_when_loaded, unpacked_modules, with_unpacked
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import WHOLE_BLOCKS, publish
from tests.offload.gguf.files import write_gguf
from tests.offload.streaming import CPU, logits, skeleton_of, unlimited_placement
from tests.support.families import make_model, save_folder

TINY = Path(__file__).parent / "gguf" / "tiny"
VOCAB, HIDDEN = 320, 2048
BF16 = torch.bfloat16
MOST_ERROR = 1.06  # over that of weights in bf16: Q4_1's minimum is rounded as well


def packed_weight(kind: str, shape: tuple[int, int] = (VOCAB, HIDDEN)) -> PackedWeight:
    """A matrix of random numbers, with small scales."""
    block, (rows, columns) = TYPES[kind], shape
    row_bytes = columns // block.weights * block.num_bytes
    name = f"lm_head.gguf_{kind.lower()}"
    entry = TensorEntry.planned(name, (rows, row_bytes), torch.uint8)
    parameter = StoredParameter(name="lm_head.weight", shape=shape, stored={name: (entry,)}, stated={})
    packing = GGUF.detect(parameter)
    assert packing is not None
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(
        0, 256, (rows * columns // block.weights, block.num_bytes), dtype=torch.uint8, generator=draw
    )
    places = {
        "Q6_K": (208,),
        "Q2_K": (80, 82),
        "Q8_0": (0,),
        "Q4_0": (0,),
        "Q5_0": (0,),
        "IQ4_XS": (0,),
    }  # of float16 numbers
    for place in places.get(kind, (0, 2)):
        scales = torch.rand(len(blocks), 1, generator=draw).mul_(1e-3).half()
        blocks[:, place : place + 2] = scales.view(torch.uint8)
    packed = PackedWeight(shape, packing)
    packed._parameters["blocks"] = nn.Parameter(blocks.view(rows, row_bytes), requires_grad=False)
    return packed


def hooked(
    kind: type[PackedModule], module: nn.Module, packed: PackedWeight, dtype: torch.dtype, undo: ExitStack
) -> Any:
    module.requires_grad_(requires_grad=False)
    of_module = kind(module, [("weight", packed)])
    of_module.hook(torch.empty(0, dtype=dtype), undo)
    return of_module


def head_of(kind: str, undo: ExitStack, dtype: torch.dtype = BF16) -> tuple[nn.Module, Tensor, PackedHead]:
    """A head whose weight is packed, and the weight in float32."""
    with torch.device("meta"):
        module = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
    packed = packed_weight(kind)
    head = hooked(PackedHead, module, packed, dtype, undo)
    return module, packed.unpack(torch.empty(packed.shape)), head


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_table_gives_the_rows_of_the_unpacked_weight_and_keeps_its_own_forward(kind: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        table = Gemma3TextScaledWordEmbedding(VOCAB, HIDDEN, padding_idx=VOCAB - 1, embed_scale=3.0)
    table.embed_scale = torch.tensor(3.0)
    packed = packed_weight(kind)
    whole = packed.unpack(torch.empty(packed.shape, dtype=dtype))
    ids = torch.tensor([[7, 0, VOCAB - 1], [7, 5, 200]])
    with ExitStack() as undo:
        hooked(PackedTable, table, packed, dtype, undo)
        for _ in range(2):
            assert torch.equal(table(ids), whole[ids] * torch.tensor(3.0, dtype=dtype))
        assert table.weight.isnan().all()  # nothing is read by mistake
        assert table.weight.shape == (VOCAB, HIDDEN)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            table(torch.tensor([VOCAB]))
    assert table.padding_idx == VOCAB - 1


@pytest.fixture
def no_block_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none multiplies blocks."""
    for module in (byte_lanes, gguf_blocks):
        monkeypatch.setattr(module, "is_available", lambda: False)


@pytest.mark.usefixtures("no_block_kernels")
@pytest.mark.parametrize("in_form", [False, True], ids=["in chunks", "in a kernel's form"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"])
def test_a_head_is_as_near_as_weights_in_bf16_and_a_row_has_its_bits_among_any_number(
    kind: str, in_form: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_outside, "weights_at_once", lambda device: 100 * HIDDEN)  # no whole number of times
    monkeypatch.setattr(at_load, "SHARE_ROWS", 128)
    monkeypatch.setattr("offload.layouts.int4.rows_that_are_few", lambda *_: 80)  # which is timed
    rows = torch.randn(80, HIDDEN).to(BF16)
    with ExitStack() as undo:
        module, weight, head = head_of(kind, undo)
        form = head.layout_at_load(BF16, CPU)
        assert (form is None) == (kind == "Q6_K" or kernel_order() is None)
        if in_form and form is None:
            return
        if in_form and form is not None:
            assert form.layout.is_slow != kind.startswith("Q4")
            has_zeros = kind != "Q4_0" or not isinstance(kernel_order(), LaneOrder)
            assert form.num_bytes == weight.numel() * (1.25 if form.layout.is_slow else 0.625 if has_zeros else 0.5625)
            undo.close()
            head.put_in(form, undo)
        exact = rows.double() @ weight.double().T
        in_bf16 = functional.linear(rows, weight.to(BF16))
        errors = [(found.double() - exact).norm() / exact.norm() for found in (module(rows), in_bf16)]
        assert errors[0] <= (MOST_ERROR if in_form else 1.01) * errors[1]
        alone = torch.cat([module(row) for row in rows.split(1)])
        for count in (2, 3, 7, 16, 33, 64, 80):
            assert torch.equal(module(rows[:count]), alone[:count]), count
        assert torch.equal(module(rows[None, :2])[0], alone[:2])


@pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_head_multiplies_its_blocks_for_any_rows_and_is_never_unpacked_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of many texts have the bits that each has alone, also more than a layer's kernel takes of a prompt."""
    with ExitStack() as undo:
        module, weight, head = head_of("Q6_K", undo, dtype)
        monkeypatch.setattr(PackedWeight, "unpack", lambda *_: pytest.fail("the head is unpacked"))
        rows = torch.randn(100, HIDDEN).to(BF16).to(dtype)
        exact, found = rows.double() @ weight.double().T, module(rows)
        assert (found.double() - exact).norm() / exact.norm() < (0.003 if dtype == BF16 else 1e-4)
        few = module(rows[:80])
        assert torch.equal(found[:80], few)
        assert torch.equal(module(rows[:3]), few[:3])
        assert not torch.equal(few, functional.linear(rows[:80], weight.to(dtype)))
        assert head.num_unpacked(dtype, CPU) == 0


def test_a_head_gives_rows_of_its_weight() -> None:
    with ExitStack() as undo:
        module, weight, head = head_of("Q6_K", undo)
        head.offer_rows(BF16, CPU, undo)
        found: Any = module
        assert torch.equal(found.weight_rows(slice(3, 70)), weight[3:70].to(BF16))
        assert torch.equal(found.weight_rows(slice(300, None)), weight[300:].to(BF16))


@pytest.mark.usefixtures("no_block_kernels")
@pytest.mark.parametrize("lacks_onednn", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", ["llama-q8_0", "tied-q8_0"])
def test_a_model_says_the_same_however_its_table_and_head_lie(
    name: str, dtype: torch.dtype, lacks_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where oneDNN does not multiply this dtype: the unpacked head is then the layer's weight."""
    monkeypatch.setattr("offload.packed_weight.PART_BYTES", 4096)  # smaller than the head
    if lacks_onednn:
        for module in (onednn, streamed_model, unpacked_once):
            monkeypatch.setattr(module, "has_onednn", lambda _: False)

    def found(*, lends: bool = False, **places: Any) -> tuple[Tensor, Tensor]:
        folder = open_model(TINY / "llama-q8_0.gguf")
        checkpoint = folder.checkpoint
        if name.startswith("tied"):
            tensors = {key: entry for key, entry in checkpoint.tensors.items() if not key.startswith("lm_head.")}
            checkpoint = replace(checkpoint, tensors=tensors)
            folder.config.tie_word_embeddings = True
        skeleton = folder.skeleton(checkpoint, dtype=dtype)
        assert bool(skeleton.ties) == name.startswith("tied")
        assert not any(key.endswith("embed_tokens.weight") for key in skeleton.outside.tensors)
        placement = replace(unlimited_placement(skeleton), **places)
        with closing(StreamedModel(skeleton, placement, device=CPU, lends=lends)) as streamed:
            model: Any = streamed.model
            is_unpacked = OUTSIDE_INDEX in places.get("unpacked", ())
            assert model.lm_head.weight.is_meta != (lends or (is_unpacked and not onednn.has_onednn(dtype)))
            parts = vars(model.lm_head).get("kernel_order", [])
            assert all(part.nbytes <= 4096 for part in parts)
            is_ordered = is_unpacked and onednn.has_onednn(dtype)
            assert sum(part.shape[0] for part in parts) == (model.config.vocab_size if is_ordered else 0)
            if lends:
                is_one = model.lm_head.weight is model.model.embed_tokens.weight
                assert is_one == name.startswith("tied")
            hidden = torch.linspace(-1, 1, model.config.hidden_size).to(dtype)[None]
            part = family_logits(model, model.model, hidden, [slice(3, 9), slice(20, 30)])
            assert part.shape == (1, 16)
            return logits(model), part

    packed = found()
    for others in (found(unpacked=frozenset({OUTSIDE_INDEX})), found(lends=True)):
        for one, other in zip(packed, others, strict=True):
            assert torch.equal(one, other)


def gemma_4_in_blocks(folder: Path) -> tuple[Path, Path]:
    """A Gemma 4 whose table of the layers' inputs is in blocks, and one with the same numbers in float32."""
    header = read_gguf(TINY / "gemma4.gguf")
    stored, in_blocks, plain = header.path.read_bytes(), [], []
    blocks = packed_weight("Q8_0", (64, 32))
    for tensor in header.tensors.values():
        content = stored[tensor.offset : tensor.offset + tensor.num_bytes]
        numbers, kind = torch.frombuffer(bytearray(content), dtype=torch.float32).view(tensor.shape), TYPES["F32"]
        if re.fullmatch(r"per_layer_model_proj.*|per_layer_proj_norm.*|blk\.\d\.inp_gate.*", tensor.name):
            numbers = torch.cat((numbers, numbers.flip(0)))
        elif re.fullmatch(r"blk\.\d\.proj\.weight", tensor.name):
            numbers = torch.cat((numbers, numbers.flip(1)), dim=1)
        is_table = tensor.name == "per_layer_token_embd.weight"
        numbers = blocks.unpack(torch.empty(blocks.shape)) if is_table else numbers
        plain.append((tensor.name, tuple(numbers.shape), kind.number, numbers.numpy().tobytes()))
        in_q8 = (tensor.name, blocks.shape, TYPES["Q8_0"].number, blocks._parameters["blocks"].numpy().tobytes())
        in_blocks.append(in_q8 if is_table else plain[-1])
    settings = {key: one.read() if isinstance(one, TextList) else one for key, one in header.settings.items()}
    settings["gemma4.embedding_length_per_layer_input"] = 8
    return write_gguf(folder / "blocks.gguf", settings, in_blocks), write_gguf(folder / "plain.gguf", settings, plain)


@pytest.mark.skipif(not hasattr(Gemma4TextConfig, "kv_sharing_modes"), reason="an older transformers")
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gemmas_table_of_the_layers_inputs_stays_packed(tmp_path: Path, dtype: torch.dtype, lends: bool) -> None:
    found, num_bytes = [], []
    for path in gemma_4_in_blocks(tmp_path):
        folder = open_model(path)
        skeleton = folder.skeleton(folder.checkpoint, dtype=dtype)
        num_bytes.append(skeleton.outside.stored_bytes)
        with closing(StreamedModel(skeleton, unlimited_placement(skeleton), device=CPU, lends=lends)) as streamed:
            model: Any = streamed.model
            found.append(logits(model))
            assert bool(model.model.embed_tokens_per_layer.weight.isnan().all()) == (path.stem == "blocks")
    assert num_bytes[1] - num_bytes[0] == 64 * (32 * 4 - 34)
    assert torch.equal(*found)


def test_a_card_keeps_what_a_head_is_unpacked_from() -> None:
    """No file holds it there, and drafts are given rows of it: it is counted, and no form takes its place."""
    card = torch.device("cuda")
    folder = open_model(TINY / "llama-q8_0.gguf")
    skeleton = folder.skeleton(folder.checkpoint, dtype=BF16)
    (head,) = unpacked_modules(skeleton, skeleton.outside, card)
    assert added_bytes(skeleton, [skeleton.outside], card) == allocated_bytes(head.num_weights * 2)
    assert layout_when_loaded(skeleton, head, card) is None
    in_four_bits = PackedHead(head.module, [("weight", packed_weight("Q4_1", (64, 128)))])
    assert in_four_bits.layout_at_load(BF16, card) is not None
    assert layout_when_loaded(skeleton, in_four_bits, card) is None


@pytest.mark.usefixtures("no_block_kernels")
def test_layers_are_unpacked_once_where_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def skeleton_of_file() -> Any:
        folder = open_model(TINY / "llama-q8_0.gguf")
        return folder.skeleton(folder.checkpoint, dtype=torch.float32)

    skeleton = skeleton_of_file()
    all_resident = unlimited_placement(skeleton)
    records = (skeleton.outside, *skeleton.records)
    added = [added_bytes(skeleton, [record], CPU) for record in records]
    assert min(added) > 0
    most = max(module.num_weights for module in skeleton.packed) * 4
    by_budget = {}
    for count in range(len(records) + 1):
        left_bytes = most + sum(added[:count]) if count else 0
        by_budget[count] = placed = with_unpacked(
            replace(all_resident, device_budget_bytes=all_resident.planned_bytes + left_bytes), skeleton, CPU
        )
        used = [num_bytes for record, num_bytes in zip(records, added, strict=True) if record.index in placed.unpacked]
        assert placed.planned_bytes == all_resident.planned_bytes + sum(used) <= placed.device_budget_bytes
        assert {record.index for record in records[:count]} <= placed.unpacked
    assert by_budget[0].unpacked == frozenset()
    streams = unlimited_placement(skeleton, resident=1)
    assert with_unpacked(streams, skeleton, CPU) is streams
    unpacked = 0

    def counting(unpack: Any) -> Any:
        def counted(*arguments: Any) -> Tensor:
            nonlocal unpacked
            unpacked += not isinstance(arguments[-2], Tensor)  # rows of a table are looked up in each pass
            found: Tensor = unpack(*arguments)
            return found

        return counted

    monkeypatch.setattr(PackedWeight, "unpack", counting(PackedWeight.unpack))
    monkeypatch.setattr(PublishedWeight, "_unpack_some", counting(PublishedWeight._unpack_some))
    found: list[Tensor] = []
    for placed in (all_resident, by_budget[len(records)]):
        with closing(StreamedModel(skeleton_of_file(), placed, device=CPU)) as streamed:
            at_load, unpacked = unpacked, 0
            found.append(logits(streamed.model))
            per_pass, unpacked = unpacked, 0
            is_once = placed is not all_resident
            assert (at_load > 0, per_pass > 0) == (is_once, not is_once)
    assert torch.equal(*found)


@pytest.mark.skipif(kernel_order() is None, reason="no kernel for int4")
def test_layers_whose_form_takes_no_more_memory_are_put_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_1 has 20 bytes for 32 weights, and so has int4: a file of it would be unpacked in every pass."""
    packed = packed_weight("Q4_1")
    form = PackedModule(nn.Linear(HIDDEN, VOCAB, bias=False, device="meta"), [("weight", packed)]).layout_at_load(
        BF16, CPU
    )
    assert form.num_bytes == packed.num_bytes
    folder = open_model(TINY / "llama-q8_0.gguf")
    skeleton = folder.skeleton(folder.checkpoint, dtype=BF16)
    placement = unlimited_placement(skeleton)
    monkeypatch.setattr(unpacked_once, "_added_bytes", lambda *_, **__: 0)
    placed = with_unpacked(placement, skeleton, CPU)
    assert placed.unpacked >= {record.index for record in skeleton.records}
    assert placed.planned_bytes == placement.planned_bytes


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1", "Q2_K"])
def test_numbers_with_a_minimum_are_rounded_once(kind: str) -> None:
    packed = packed_weight(kind)
    exact = packed.unpack(torch.empty(packed.shape))
    assert torch.equal(packed.unpack(torch.empty(packed.shape, dtype=BF16)), exact.to(BF16))


@pytest.mark.skipif(kernel_order() is None, reason="no kernel for int4")
def test_numbers_are_in_halves_where_memory_does_not_suffice_for_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix of eight bits has 1.06 bytes a weight in its file, 1.25 in halves and 2 in bf16."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    folder = save_folder(tmp_path / "model", make_model(WHOLE_BLOCKS))
    publish(folder, PUBLISHED["compressed-packed-int8"])
    dense = skeleton_of(folder, BF16)
    all_resident = unlimited_placement(dense)
    records = (dense.outside, *dense.records)
    halved, whole = (added_bytes(dense, records, CPU, in_slow_layouts=in_form) for in_form in (True, False))
    assert 0 < halved < whole
    most = max(module.num_weights for module in dense.packed) * 2
    found = {}
    for name, added in (("packed", 0), ("halved", halved), ("whole", whole)):
        budget = all_resident.planned_bytes + (added + most if added else 0)
        skeleton = skeleton_of(folder, BF16)
        placed = with_unpacked(replace(all_resident, device_budget_bytes=budget), skeleton, CPU)
        assert bool(placed.unpacked) == (name != "packed")
        assert (placed.slow == placed.unpacked != frozenset()) == (name == "halved")
        assert placed.planned_bytes <= budget
        with closing(StreamedModel(skeleton, placed, device=CPU)) as streamed:
            found[name] = logits(streamed.model).float()
    for name in ("halved", "whole"):
        assert (found[name] - found["packed"]).norm() / found["packed"].norm() < 0.02, name
