"""Published checkpoints stream as they are: outputs are those of transformers on the weights that they mean."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.folder import open_model
from offload.architecture import architecture_checkpoint
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.errors import CheckpointError
from offload.formats.storage import content_of
from offload.quantize import quantized_checkpoint
from offload.quantized_cache import load_or_quantize
from offload.skeleton import build_skeleton
from tests.offload.experts.mixtures import found_logits
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import publish, publish_gpt_oss, save
from tests.offload.streaming import CPU, logits, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import VOCAB, make_model, save_folder

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
NUM_EXPERTS = 12  # more than ten, whose names sort otherwise than their numbers
MODELS = {
    "dense": lambda: LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=True),
    "experts": lambda: Qwen3MoeConfig(
        **SIZES, intermediate_size=96, moe_intermediate_size=32, num_experts=NUM_EXPERTS, num_experts_per_tok=3
    ),
    "mixtral": lambda: MixtralConfig(
        **SIZES, intermediate_size=32, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, sliding_window=None
    ),
    "gpt-oss": lambda: GptOssConfig(
        **SIZES, intermediate_size=32, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
ROOTS: list[tempfile.TemporaryDirectory[str]] = []
CASES = [
    *((form, "dense") for form in PUBLISHED),
    *((form, "experts") for form in PUBLISHED),
    ("fp8-blocks", "mixtral"), ("awq", "mixtral"), ("mxfp4", "gpt-oss"),
]  # fmt: skip
# Each form once, of dense weights and of experts in turn
IN_TURN = [(form, ("dense", "experts")[index % 2]) for index, form in enumerate(PUBLISHED)] + CASES[
    2 * len(PUBLISHED) :
]


def published(folder: Path, form: str, model: str) -> Path:
    """A checkpoint in `form` at `folder`; returns the plain one of the same weights."""
    made = _made(form, model)
    shutil.copytree(made, folder)
    return Path(shutil.copytree(f"{made}-plain", f"{folder}-plain"))


@functools.cache
def _made(form: str, model: str) -> Path:
    """A checkpoint that is made once; it lives as long as the tests."""
    root = tempfile.TemporaryDirectory()
    ROOTS.append(root)
    folder = save_folder(Path(root.name) / "model", make_model(MODELS[model]()))
    torch.manual_seed(1)
    publish_gpt_oss(folder) if form == "mxfp4" else publish(folder, PUBLISHED[form])
    return folder


@pytest.mark.parametrize(("form", "model"), CASES, ids=str)
def test_streamed_and_resident_logits_are_those_of_the_meant_weights(form: str, model: str, tmp_path: Path) -> None:
    plain = published(tmp_path / "model", form, model)
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), rows=40)
    for resident in (0, 2):
        found = found_logits(skeleton_of(tmp_path / "model"), resident=resident)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    if model != "dense":
        assert torch.equal(found_logits(skeleton_of(tmp_path / "model"), resident=0, on_demand=True), found)


@pytest.mark.parametrize(("form", "model"), IN_TURN, ids=str)
def test_trees_over_streamed_layers_write_what_transformers_writes(form: str, model: str, tmp_path: Path) -> None:
    """The draft is the plain model, so that nodes are accepted; a pass reads the layers as they are published."""
    folder = tmp_path / "model"
    plain = published(folder, form, model)
    prompt = "def main("
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with Engine.from_pretrained(
        folder,
        draft=plain,
        tree=TreeSettings(size=12, lookup=False),  # the clock leaves no draft out
        dtype="float32",
        quant="none",  # in no order of a kernel's
        context_tokens=96,
        limits=MemoryLimits(max_resident_layers=0),
    ) as engine:
        ids = torch.tensor([engine.encode(prompt)])
        found = engine.generate(prompt, max_new_tokens=24)
        placement = engine.placement
    expected = reference.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=256)[0, ids.shape[1] :]
    assert list(found.token_ids) == expected.tolist()
    assert len(found.steps) < 0.75 * len(found.token_ids)
    assert placement.num_resident == 0
    layers = [entry for name, entry in read_checkpoint(folder).tensors.items() if ".layers." in name]
    unread = ("weight_shape", "activation_scale", *(() if "act-order" in form else ("g_idx",)))
    kept_bytes = placement.experts.kept_bytes if placement.experts else 0  # the experts' of layers that stream
    read_bytes = sum(entry.num_bytes for entry in layers if not entry.name.endswith(unread))
    assert (placement.streamed_bytes, bool(kept_bytes)) == (read_bytes - kept_bytes, model != "dense")


@pytest.mark.parametrize(("form", "model"), CASES, ids=str)
def test_a_config_alone_has_the_sizes_of_what_is_published(form: str, model: str, tmp_path: Path) -> None:
    """Experts are planned as one matrix each, which has fewer scales and indices than two that lie together."""
    published(tmp_path / "model", form, model)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    stored, planned = (
        build_skeleton(config, checkpoint, dtype=torch.float32)
        for checkpoint in (read_checkpoint(tmp_path / "model"), architecture_checkpoint(config, tmp_path / "model"))
    )
    assert planned.packed_formats == stored.packed_formats
    assert planned.num_scratch(torch.float32, CPU) == stored.num_scratch(torch.float32, CPU)
    tolerance = 0.0 if model == "dense" else 0.05
    for ours, theirs in zip(planned.records, stored.records, strict=True):
        assert ours.stored_bytes == pytest.approx(theirs.stored_bytes, rel=tolerance, abs=0)
    assert planned.outside.stored_bytes == stored.outside.stored_bytes


def lose(folder: Path, end: str, *, layer: int = 1) -> None:
    """Leave one tensor out."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if f".{layer}." in name and name.endswith(end))]
    save(folder, tensors, None)


def cut(folder: Path, end: str) -> None:
    """Leave out the last row of one tensor."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(end))
    save(folder, {**tensors, name: tensors[name][:-1].contiguous()}, None)


def as_numbers(folder: Path, end: str, dtype: torch.dtype) -> None:
    """Store one tensor in another type, unlike those of the other experts."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(end))
    save(folder, {**tensors, name: tensors[name].to(dtype)}, None)


def stated(folder: Path, **changes: object) -> None:
    """Change what config.json states."""
    config = json.loads((folder / "config.json").read_text())
    save(folder, load_file(folder / "model.safetensors"), config["quantization_config"] | changes)


@pytest.mark.parametrize(
    ("form", "model", "damage", "named"),
    [
        ("fp8-blocks", "dense", lambda f: lose(f, "q_proj.weight_scale_inv"), "q_proj.weight' holds .* without scales"),
        ("fp8-blocks", "dense", lambda f: cut(f, "q_proj.weight_scale_inv"),
         r"q_proj.weight_scale_inv' has shape \[3, 3\], and 64 rows of 64 columns need \[4, 3\]"),
        ("fp8-blocks", "dense", lambda f: stated(f, weight_block_size=[24, 16]), r"need \[3, 4\]"),
        ("fp8-blocks", "experts", lambda f: lose(f, "experts.3.up_proj.weight_scale_inv"),
         "layers.1.mlp.experts.3.up_proj.weight_scale_inv' is missing"),
        ("awq", "dense", lambda f: lose(f, "v_proj.qzeros"), "v_proj.qzeros' is missing"),
        ("awq", "dense", lambda f: lose(f, "v_proj.qweight"), "v_proj.qweight' is missing"),
        ("awq", "dense", lambda f: cut(f, "q_proj.scales"), "64 columns are no 7 equal groups"),
        ("awq", "dense", lambda f: cut(f, "q_proj.qzeros"), r"q_proj.qzeros' has shape \[7, 8\], .* need \[8, 8\]"),
        ("awq", "dense", lambda f: stated(f, quant_method="gptq"), r"q_proj.qweight' has shape \[64, 8\]"),
        ("awq", "experts", lambda f: lose(f, "experts.11.down_proj.scales"), "experts.11.down_proj.scales' is missing"),
        ("gptq", "dense", lambda f: stated(f, quant_method="awq"), r"q_proj.qweight' has shape \[8, 64\]"),
        ("gptq", "dense", lambda f: stated(f, quant_method="fp8"), "config.json states fp8"),
        ("gptq-act-order", "dense", lambda f: lose(f, "k_proj.g_idx"), "k_proj.g_idx' is missing"),
        ("gptq", "experts", lambda f: as_numbers(f, "experts.2.gate_proj.scales", torch.float32),
         "experts.2.gate_proj.scales' is .* unlike"),
        ("compressed-nvfp4", "dense", lambda f: lose(f, "o_proj.weight_global_scale"),
         "o_proj.weight_global_scale' is missing"),
        ("compressed-int4", "experts", lambda f: lose(f, "experts.0.up_proj.weight_scale"),
         "experts.0.up_proj.weight_scale' is missing"),
        ("compressed-int4", "dense", lambda f: cut(f, "q_proj.weight_packed"), r"weight_packed' has shape \[63, 8\]"),
        ("mxfp4", "gpt-oss", lambda f: lose(f, "gate_up_proj_scales"), "gate_up_proj_scales' is missing"),
        ("mxfp4", "gpt-oss", lambda f: cut(f, "down_proj_scales"), "is not of 12 experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a function's address differs by process
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_named_before_a_weight_is_read(
    form: str, model: str, damage: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    published(tmp_path / "model", form, model)
    damage(tmp_path / "model")
    opened = open_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match=named) as caught:
        opened.skeleton(opened.checkpoint, dtype=torch.float32)
    assert caught.value.code == ("E_TENSOR_MISSING" if "experts" in named and "up_proj" in named else "E_QUANTIZED")


def test_gpt_oss_experts_are_computed_as_they_are_packed(tmp_path: Path) -> None:
    """Its modules have them transposed: to turn them takes twice as long as to unpack them."""
    published(tmp_path / "model", "mxfp4", "gpt-oss")
    for group in skeleton_of(tmp_path / "model").expert_groups:
        for matrix in group.matrices:
            packed = group.tensors[f"{matrix.attribute}_packed.packed"]
            assert (matrix.packing.transposed, matrix.in_blocks, matrix.shape[0]) == (None, True, packed.shape[1])


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_weights_of_eight_bits_can_be_made_smaller(model: str, tmp_path: Path) -> None:
    """FP8 becomes nf4 by way of the bfloat16 weights that it means."""
    folder = tmp_path / "model"
    plain = published(folder, "fp8-blocks", model)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    save(plain, tensors, None)

    def quantized(folder: Path) -> Checkpoint:
        checkpoint = read_checkpoint(folder)
        return load_or_quantize(skeleton_of(folder), checkpoint, "nf4", cache_folder=tmp_path / "cache", device=CPU)

    found, expected = quantized(folder), quantized(plain)
    names = [name for name, entry in expected.tensors.items() if entry.file.parent != plain and "proj" in name]
    assert any(name.endswith("absmax") for name in names)
    assert {name: content_of(found.tensors[name]) for name in names} == {
        name: content_of(expected.tensors[name]) for name in names
    }


@pytest.mark.parametrize(("form", "quant"), [("fp8-blocks", "int8"), ("compressed-nvfp4", "nf4"), ("awq", "int8")])
def test_what_would_hardly_be_smaller_is_not_quantised_again(form: str, quant: str, tmp_path: Path) -> None:
    published(tmp_path / "model", form, "dense")
    opened = open_model(tmp_path / "model")
    skeleton = opened.skeleton(opened.checkpoint, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=rf"quantised already .* as {quant} it would have \d+% of") as caught:
        quantized_checkpoint(skeleton, opened.checkpoint, quant)
    assert caught.value.code == "E_QUANTIZED"


@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "awq"])
@pytest.mark.parametrize("has_experts", [False, True])
def test_numbers_of_four_bits_are_kept_in_int4(
    form: str, has_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates and projections of experts in one parameter, too, unless each has an order of columns of its own."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    sizes = {**SIZES, "num_key_value_heads": 4, "intermediate_size": 64}
    experts = Qwen3MoeConfig(**sizes, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    folder = save_folder(tmp_path / "model", make_model(experts if has_experts else LlamaConfig(**sizes)))
    plain = publish(folder, PUBLISHED[form])
    checkpoint, skeleton = read_checkpoint(folder), skeleton_of(folder)
    if has_experts and form == "gptq-act-order":
        with pytest.raises(CheckpointError, match="quantised already"):
            quantized_checkpoint(skeleton, checkpoint, "int4")
        return
    planned = quantized_checkpoint(skeleton, checkpoint, "int4")
    made = load_or_quantize(skeleton, checkpoint, "int4", cache_folder=tmp_path / "cache", device=CPU)
    assert {name: (entry.shape, entry.dtype) for name, entry in made.tensors.items()} == {
        name: (entry.shape, entry.dtype) for name, entry in planned.tensors.items()
    }
    kept = skeleton_of(folder, checkpoint=made)
    assert kept.packed_formats == ("int4",)
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), passes=1)
    found = streamed_logits(kept, unlimited_placement(kept, resident=1))
    assert (found - expected).norm() / expected.norm() < 0.02
