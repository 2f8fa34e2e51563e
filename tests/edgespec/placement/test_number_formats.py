"""Formats and numbers follow from the user's words, the device, its kernels, and what the folder has."""

import functools
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from edgespec.pair.folder import ModelFolder, open_model
from edgespec.placement.number_formats import resolve_formats
from edgespec.placement.weights import weights_by_size
from offload.formats.storage import PackedStorage
from offload.layouts.int4_orders import kernel_order
from offload.layouts.known import REPACKED
from offload.layouts.layout import Kernel
from offload.streamed_model import StreamedModel
from offload.unpacked_once import added_bytes, with_unpacked
from tests.offload.formats import definitions
from tests.offload.formats.bitsandbytes_checkpoints import published as publish_bitsandbytes
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import WHOLE_BLOCKS, publish
from tests.offload.layouts.pretend_kernels import pretend_kernels
from tests.offload.streaming import CPU, logits, unlimited_placement
from tests.support.families import EXPERTS, make_model, save_folder

F32, BF16 = torch.float32, torch.bfloat16
KERNELS = ("int4", "nf4-cpu", "int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFolder]:
    """Return models by their form: plain, or a published one; with groups of 32, or those of `FORM/16` with 16."""
    root = tmp_path_factory.mktemp("models")
    plain = save_folder(root / "plain", make_model(WHOLE_BLOCKS, dtype=BF16))

    @functools.cache
    def made(name: str) -> ModelFolder:
        form, _, group = name.partition("/")
        folder = plain if name == "plain" else Path(shutil.copytree(plain, root / name.replace("/", "-")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(definitions, "GROUP", int(group or 32))
            if form in {"nf4-nested", "int8"}:
                publish_bitsandbytes(folder, form)
            elif form != "plain":
                publish(folder, PUBLISHED[form])
        return open_model(folder)

    return made


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU multiply weights in these formats, in bf16, and in no others."""

    def kernel(
        _: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_there: bool
    ) -> Kernel | None:
        has_kernel = is_there and len(shape) == 2 and dtype == BF16 and device.type == "cpu"
        return Kernel(max_rows=64, multiply=lambda *_: pytest.fail("nothing is computed")) if has_kernel else None

    found = {name: functools.partial(kernel, is_there=name in request.param.split()) for name in KERNELS}
    pretend_kernels(found, monkeypatch)


BOTH, INT4, INT8, NONE = "int4 nf4-cpu", "int4", "int8", ""
AUTO = "auto"


@pytest.mark.parametrize(
    ("kernels", "form", "device", "dtype", "word", "expected"),
    [
        # Plain weights stay, and are computed in float32 on a CPU, unless they are to be packed.
        (BOTH, "plain", "cpu", AUTO, None, (F32, None)),
        (BOTH, "plain", "cpu", AUTO, "none", (F32, "none")),
        (BOTH, "plain", "cuda", AUTO, None, (BF16, None)),
        (BOTH, "plain", "cpu", "bfloat16", None, (BF16, None)),
        # Four bits: what the machine multiplies, the fastest first.
        (BOTH, "plain", "cpu", AUTO, "auto", (BF16, "nf4-cpu")),
        (INT4, "plain", "cpu", AUTO, "auto", (BF16, "int4")),
        (NONE, "plain", "cpu", AUTO, "auto", (F32, "nf4")),
        (BOTH, "plain", "cuda", AUTO, "auto", (BF16, "nf4")),
        (BOTH, "plain", "cpu", "float32", "auto", (F32, "nf4")),
        (BOTH, "plain", "cpu", torch.float32, "auto", (F32, "nf4")),
        (BOTH, "plain", "cpu", "bfloat16", "auto", (BF16, "nf4-cpu")),
        # A format's name is that format; nf4 may stand in the order of the CPU's kernel.
        (BOTH, "plain", "cpu", AUTO, "nf4", (BF16, "nf4-cpu")),
        (BOTH, "plain", "cpu", AUTO, "4bit", (BF16, "nf4-cpu")),
        (INT4, "plain", "cpu", AUTO, "nf4", (F32, "nf4")),
        (BOTH, "plain", "cpu", "float32", "nf4", (F32, "nf4")),
        (BOTH, "plain", "cuda", AUTO, "nf4", (BF16, "nf4")),
        (BOTH, "plain", "cpu", AUTO, "int4", (BF16, "int4")),
        (NONE, "plain", "cpu", AUTO, "int4", (F32, "int4")),
        (BOTH, "plain", "cpu", "float32", "int4", (F32, "int4")),
        (BOTH, "plain", "cpu", AUTO, "int8", (F32, "int8")),
        (INT8, "plain", "cpu", AUTO, "int8", (BF16, "int8")),
        (INT8, "int8", "cpu", AUTO, None, (BF16, None)),
        (INT8, "int8", "cpu", AUTO, "none", (F32, "none")),
        (NONE, "int8", "cpu", AUTO, None, (F32, None)),
        (BOTH, "int8", "cpu", AUTO, "auto", (BF16, "nf4-cpu")),
        # Published four bits are kept where they are multiplied.
        *((BOTH, form, "cpu", AUTO, None, (BF16, "repacked")) for form in ("awq", "gptq-act-order", "compressed-int4")),
        (BOTH, "nf4-nested", "cpu", AUTO, None, (BF16, "repacked")),
        (INT4, "nf4-nested", "cpu", AUTO, None, (F32, None)),
        (INT4, "awq", "cpu", AUTO, "auto", (BF16, "repacked")),
        (INT4, "awq", "cpu", "bfloat16", None, (BF16, "repacked")),
        (INT4, "awq", "cpu", AUTO, "none", (F32, "none")),
        (INT4, "awq", "cpu", "float32", None, (F32, None)),
        (NONE, "awq", "cpu", AUTO, None, (F32, None)),
        (NONE, "awq", "cpu", AUTO, "auto", (F32, None)),
        (BOTH, "awq", "cuda", AUTO, None, (BF16, None)),
        (BOTH, "awq", "cuda", AUTO, "auto", (BF16, None)),
        (BOTH, "awq", "cpu", AUTO, "int4", (BF16, "int4")),
        # What no kernel can keep stays as it is published; eight bits may become four where that is said.
        (BOTH, "awq/16", "cpu", AUTO, None, (F32, None)),
        (BOTH, "awq/16", "cpu", AUTO, "auto", (F32, None)),
        (BOTH, "compressed-mxfp4", "cpu", AUTO, None, (BF16, "repacked")),
        (BOTH, "compressed-mxfp4", "cpu", AUTO, "auto", (BF16, "repacked")),
        (INT4, "compressed-mxfp4", "cpu", AUTO, None, (BF16, "repacked")),
        (NONE, "compressed-mxfp4", "cpu", AUTO, None, (F32, None)),
        (BOTH, "fp8-blocks", "cpu", AUTO, None, (F32, None)),
        (INT4, "fp8-blocks", "cpu", AUTO, "auto", (BF16, "int4")),
        (NONE, "fp8-blocks", "cpu", AUTO, "auto", (F32, "nf4")),
    ],
    indirect=["kernels"],
)  # fmt: skip
@pytest.mark.usefixtures("kernels")
def test_words_stand_for_what_the_machine_is_fastest_with(
    model: Callable[[str], ModelFolder],
    form: str,
    device: str,
    dtype: str | torch.dtype,
    word: str | None,
    expected: tuple[torch.dtype, str | None],
) -> None:
    found = resolve_formats(model(form), None, device=torch.device(device), dtype=dtype, quants=(word, None))
    assert (found.dtype, found.quant, found.draft_quant) == (*expected, None)


@pytest.mark.parametrize("kernels", [BOTH], indirect=True)
@pytest.mark.parametrize(
    ("target", "word", "draft", "draft_word", "expected"),
    [
        ("plain", None, "awq", None, (F32, None, None)),  # the target's numbers are the draft's
        ("awq", None, "awq", None, (BF16, "repacked", "repacked")),
        ("awq", None, "awq", "none", (BF16, "repacked", "none")),
        ("awq", "none", "awq", None, (F32, "none", None)),
        ("plain", "auto", "awq", None, (BF16, "nf4-cpu", "repacked")),
        ("plain", "int4", "plain", "auto", (BF16, "int4", "nf4-cpu")),
        ("plain", None, "plain", "auto", (F32, None, "nf4")),
        ("plain", None, "plain", None, (F32, None, None)),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_a_draft_has_formats_of_its_own_and_the_targets_numbers(
    model: Callable[[str], ModelFolder],
    target: str,
    word: str | None,
    draft: str,
    draft_word: str | None,
    expected: tuple[torch.dtype, str | None, str | None],
) -> None:
    found = resolve_formats(model(target), model(draft), device=torch.device("cpu"), quants=(word, draft_word))
    assert (found.dtype, found.quant, found.draft_quant) == expected


@pytest.mark.parametrize("kernels", [BOTH], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_a_form_of_twice_the_bytes_is_for_models_that_fit(model: Callable[[str], ModelFolder]) -> None:
    """Four bits that stay four may stream from the disk; two terms of four are kept in memory, or not at all."""
    for form, is_kept in (("compressed-mxfp4", False), ("awq", True)):
        small, large = (
            resolve_formats(model(form), None, device=torch.device("cpu"), max_cpu_bytes=room_bytes)
            for room_bytes in (1000, 1 << 30)
        )
        assert (small.quant, large.quant) == ("repacked" if is_kept else None, "repacked"), form


@pytest.mark.parametrize("kernels", [BOTH], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_a_checkpoint_of_which_little_can_be_kept_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel multiplies whole blocks of 64 rows: here those of one matrix in seven."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    config = LlamaConfig(
        **{**WHOLE_BLOCKS.to_dict(), "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 96}
    )
    folder = save_folder(tmp_path / "model", make_model(config))
    publish(folder, PUBLISHED["awq"])
    found = resolve_formats(open_model(folder), None, device=torch.device("cpu"))
    assert (found.dtype, found.quant) == (F32, None)


@pytest.mark.parametrize("kernels", [BOTH], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_experts_that_a_cpu_computes_beside_a_card_are_packed_for_the_cpu(
    model: Callable[[str], ModelFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "GROUP", 32)
    config = Qwen3MoeConfig(
        **{**EXPERTS, "hidden_size": 64}, head_dim=16, num_experts=4, moe_intermediate_size=64, norm_topk_prob=True
    )
    folder = save_folder(tmp_path / "mixture", make_model(config, dtype=BF16))
    publish(folder, PUBLISHED["awq"])
    mixture, dense = open_model(folder), model("awq")
    for target, mode, word, expected in (
        (mixture, "auto", None, None), (mixture, "cpu", None, "repacked"), (mixture, "cpu", "int4", "int4"),
        (mixture, "cpu", "none", "none"), (dense, "cpu", None, None),
    ):  # fmt: skip
        found = resolve_formats(target, None, device=torch.device("cuda"), quants=(word, None), expert_mode=mode)
        assert (found.dtype, found.quant) == (BF16, expected), (mode, word)


@pytest.mark.skipif(kernel_order() is None, reason="no kernel for int4")
@pytest.mark.parametrize("form", ["awq", "compressed-packed-int8"])
def test_none_puts_no_weights_in_a_kernels_form(model: Callable[[str], ModelFolder], form: str) -> None:
    """Resident weights have the numbers of streamed ones then; int4's form rounds their scales to bf16."""
    found = {}
    for word in (None, "none"):
        quant = resolve_formats(model(form), None, device=CPU, dtype=BF16, quants=(word, None)).quant
        quant = None if quant == REPACKED else quant
        for resident in (None, 0):
            skeleton = weights_by_size(model(form), dtype=BF16, quant=quant).skeleton
            placement = unlimited_placement(skeleton, resident=resident)
            records = (skeleton.outside, *skeleton.records)
            halved = added_bytes(skeleton, records, CPU, in_slow_layouts=True)
            room = max(module.num_weights for module in skeleton.packed) * BF16.itemsize
            placement = with_unpacked(
                replace(placement, device_budget_bytes=placement.planned_bytes + room + halved), skeleton, CPU
            )
            assert bool(placement.unpacked) == (resident is None), (word, resident)
            with closing(StreamedModel(skeleton, placement, device=CPU)) as streamed:
                found[word, resident] = logits(streamed.model)
    assert torch.equal(found["none", None], found["none", 0])
    assert torch.equal(found[None, 0], found["none", 0])
    assert not torch.equal(found[None, None], found["none", 0])
