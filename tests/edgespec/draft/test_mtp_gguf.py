"""Multi-token-prediction layers in GGUF files, as llama.cpp's converter wrote them, are those of the safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from edgespec import EdgespecError
from edgespec.cli import run
from edgespec.draft.mtp import NAMED, OWN
from edgespec.hub.names import MTP
from edgespec.pair.drafts import planned_draft
from edgespec.pair.folder import ModelFolder, open_architecture, open_model
from edgespec.pair.mtp import own_draft
from edgespec.pair.pair import open_pair
from offload.formats.gguf_blocks import TYPES
from offload.gguf.header import GgufTensor, TextList, read_gguf
from tests.edgespec.draft.contract import DRAFTED, FURTHER, open_engine
from tests.edgespec.draft.gguf_drafts import BOUND, F32, KINDS, check_is_multiplied, random_blocks
from tests.edgespec.draft.test_mtp import first_guess
from tests.offload.gguf.files import copy_gguf, write_gguf
from tests.offload.gguf.test_tiny_models import TINY
from tests.support.families import make_tokenizer
from tests.support.plain_weights import weights, weights_of

NAMES = FURTHER
WIDENED = ("qwen3next-mtp", *(name for name in NAMES if name != "qwen3next-mtp"))
MEASURED = ("length", "length_mla", "lora_rank", "state_size", "inner_size", "dimension_count")  # ends of settings
COUNTED = ("count", "count_kv", "time_step_rank", "conv_kernel")  # of what a wider model has as many
LAYER = "blk.2."  # of files whose models have two


def layer_of(path: Path) -> ModelFolder:
    found = open_pair(path, MTP).draft
    assert found is not None
    return found


def published_names(layer: ModelFolder) -> Callable[[str], str]:
    """The names of the safetensors that the converter was given."""
    is_named = layer.config.model_type in NAMED
    own = {parameter: name for name, parameter in OWN.items() if (name in {"fc", "norm"} or "fc_" in name) == is_named}

    def name_of(parameter: str) -> str:
        module = parameter.removesuffix(".weight")
        if module in own:
            return f"{'mtp.' if is_named else 'model.layers.2.'}{own[module]}.weight"
        return parameter.replace("model.layers.0.", "mtp.layers.0." if is_named else "model.layers.2.")

    return name_of


def expanded(found: dict[str, Tensor], expected: dict[str, str]) -> dict[str, Tensor]:
    """Experts one by one, where the published tensors are so."""
    result = dict(found)
    for name in [name for name in found if name.endswith(".experts.gate_up_proj") and name not in expected]:
        start = name.removesuffix("gate_up_proj")
        down, gates = result.pop(f"{start}down_proj"), result.pop(name)
        for number, (gate_up, back) in enumerate(zip(gates, down, strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": back}
            result |= {f"{start}{number}.{part}.weight": one.contiguous() for part, one in parts.items()}
    return result


def published(path: Path, expected: dict[str, str]) -> dict[str, Tensor]:
    """The layer's weights under the names of the safetensors."""
    layer = layer_of(path)
    name_of = published_names(layer)
    return expanded({name_of(name): weight for name, weight in weights_of(layer).items()}, expected)


def differing(path: Path, name: str) -> list[str]:
    """The published tensors of a layer that are not what the converter was given."""
    expected = json.loads((TINY / f"{name}.json").read_text())["further"]
    expected = {key: one for key, one in expected.items() if ".indexer." not in key}  # which is not read
    found = {
        key: hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()[:16]
        for key, weight in published(path, expected).items()
    }
    return sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_weights_are_the_published_ones_by_bits(name: str) -> None:
    assert not differing(TINY / f"{name}.gguf", name)


def numbers_of(tensor: GgufTensor, content: bytes) -> Tensor:
    numbers = torch.empty(len(content) // tensor.block.num_bytes, tensor.block.weights)
    blocks = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, tensor.block.num_bytes)
    tensor.block.unpack(blocks, numbers)
    return numbers.view(tensor.shape)


# What another converter would make of a layer's input that hands on a token's embedding, which the target's next token
# follows, and what the check says
SAID: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "as it is": (lambda numbers: numbers, "its likeliest token is the target's for 9"),
    "the feature's half before the embedding's": (
        lambda numbers: torch.cat(numbers.chunk(2, -1)[::-1], -1), "when it reads the feature before the embedding",
    ),
    "rows for columns": (lambda numbers: numbers.flip(0), "where published layers reach"),
    "halves in turn": (lambda n: torch.stack(n.chunk(2, -1), -1).flatten(-2), "where published layers reach"),
}  # fmt: skip


@pytest.mark.parametrize("written", SAID)
def test_the_first_run_names_what_is_wrong_with_the_layers_input(written: str, tmp_path: Path) -> None:
    (change, said), path = SAID[written], TINY / "qwen35-mtp.gguf"
    norm = next(one for one in read_gguf(path).tensors.values() if one.name == "output_norm.weight")
    last = path.read_bytes()[norm.offset : norm.offset + norm.num_bytes]
    size = norm.shape[0]

    def changed(tensor: GgufTensor, content: bytes) -> tuple[str, bytes]:
        numbers, part = numbers_of(tensor, content), tensor.name.removeprefix(LAYER)
        if tensor.name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            numbers = numbers * 0.01
        if part in {"nextn.enorm.weight", "nextn.shared_head_norm.weight"}:
            return tensor.name, last
        if part == "nextn.eh_proj.weight":
            numbers = change(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
        if part == "token_embd.weight":
            numbers = numbers * 50
        return tensor.name, numbers.contiguous().numpy().tobytes()

    found = copy_gguf(path, tmp_path / "a.gguf", change=changed)
    with open_engine(found, MTP, context_tokens=250, draft_check=True, tree=DRAFTED) as engine:
        assert engine.draft_check is not None
        assert said in engine.draft_check.in_words


def write_folder(path: Path, folder: Path) -> Path:
    """The safetensors of a file's model and of its layer."""
    about = json.loads((TINY / f"{path.stem}.json").read_text()) if path.parent == TINY else {}
    model = open_model(path)
    config = AutoConfig.for_model(**{name: value for name, value in model.config.to_dict().items()
                                     if name != "quantization_config"})  # fmt: skip
    config.save_pretrained(folder)
    tensors = {name: one.clone() for name, one in weights(path).items() if not name.startswith("lm_head.weight_")}
    save_file(tensors | {name: one.clone() for name, one in published(path, about.get("further", {})).items()},
              folder / "model.safetensors")  # fmt: skip
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_guesses_are_those_of_the_safetensors_by_bits(name: str, tmp_path: Path) -> None:
    with open_engine(write_folder(TINY / f"{name}.gguf", tmp_path / "folder"), MTP) as engine:
        expected = first_guess(engine)
    with open_engine(TINY / f"{name}.gguf", MTP) as engine:
        assert torch.equal(first_guess(engine), expected)


@pytest.fixture(scope="module")
def wide_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The widened file of a name."""
    folder = tmp_path_factory.mktemp("wide")
    return cache(lambda name: widened(name, folder / f"{name}.gguf"))


def widened(name: str, path: Path, *, by: int = 16) -> Path:
    """A file of random numbers whose model is so many times as wide, so that blocks of any type fit its rows."""
    header = read_gguf(TINY / f"{name}.gguf")
    settings = {key: one.read() if isinstance(one, TextList) else one for key, one in header.settings.items()}
    counts = {1, 257} | {one for key, one in settings.items() if key.endswith(COUNTED) and "indexer" not in key}
    counts |= {2 * one for key, one in settings.items() if key.endswith("time_step_rank")}  # of two that lie together
    wide = {key: one * by for key, one in settings.items() if key.endswith(MEASURED)}
    generator, tensors = torch.Generator().manual_seed(2), []
    for tensor in header.tensors.values():
        is_norm = tensor.name.endswith("norm.weight")
        shape = tuple(one if one in counts and not is_norm else one * by for one in tensor.shape)
        shape = (tensor.shape[0], *shape[1:]) if "indexer.proj" in tensor.name else shape  # a row for each head
        numbers = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        numbers = numbers + 1 if is_norm else numbers
        numbers = -1 - numbers.abs() if tensor.name.endswith("ssm_a") else numbers
        tensors.append((tensor.name, shape, F32, numbers.numpy().tobytes()))
    return write_gguf(path, {**settings, **wide}, tensors)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((WIDENED[0], kind) for kind in (*KINDS, "F16", "BF16")), *((name, "Q4_K") for name in WIDENED[1:])],
)
def test_a_layer_in_blocks_is_multiplied_so_and_guesses_as_its_numbers(
    name: str, kind: str, wide_of: Callable[[str], Path], tmp_path: Path
) -> None:
    block = TYPES[kind]

    def changed(tensor: GgufTensor, content: bytes, *, is_plain: bool) -> tuple[str, bytes, int]:
        is_packed = tensor.name.startswith(LAYER) and len(tensor.shape) > 1 and not tensor.shape[-1] % 256
        if not is_packed or "ffn_gate_inp" in tensor.name:
            return tensor.name, content, tensor.block.number
        stored, numbers = random_blocks(kind, len(content) // 4, seed=len(tensor.name))
        return tensor.name, numbers.numpy().tobytes() if is_plain else stored, F32 if is_plain else block.number

    path, plain = (
        copy_gguf(wide_of(name), tmp_path / f"{is_plain}.gguf", change=partial(changed, is_plain=is_plain))
        for is_plain in (False, True)
    )
    weights, expected = weights_of(layer_of(path)), weights_of(layer_of(plain))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())
    with open_engine(path, MTP) as engine:
        found = first_guess(engine)
        assert engine.pair.draft is not None
        leaves = {key.rpartition(".")[2] for key in engine.pair.draft.checkpoint.tensors}
        assert (f"gguf_{kind.lower()}" in leaves) == (not block.is_unpacked)
        if not block.is_unpacked:
            check_is_multiplied(engine)
    with open_engine(plain, MTP) as engine:
        torch.testing.assert_close(found, first_guess(engine), **BOUND)


def cut(name: str, folder: Path, *, keep: Callable[[str], bool], more: Any = None, **settings: Any) -> Path:
    """A file with some of the tensors."""

    def change(tensor: GgufTensor, content: bytes) -> tuple[str, bytes] | None:
        return (tensor.name, content) if keep(tensor.name) else None

    own = {f"{name.partition('-')[0]}.{key}": value for key, value in settings.items()}
    return copy_gguf(TINY / f"{name}.gguf", folder, change=change, settings={**own, **(more or {})})


def is_of_layer(tensor: str) -> bool:
    return not tensor.startswith("blk.") or tensor.startswith(LAYER)


@pytest.mark.parametrize("name", ["glm4moe-mtp", "qwen35-mtp"])
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_layer_in_a_file_of_its_own_drafts_as_within_the_model(
    name: str, is_named: bool, has_tokens: bool, tmp_path: Path
) -> None:
    target = cut(name, tmp_path / "Tiny-1B-Q4_K_M.gguf", keep=lambda tensor: not tensor.startswith(LAYER),
                 nextn_predict_layers=None, block_count=2)  # fmt: skip
    folder = tmp_path if not is_named else tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    side = cut(
        name,
        folder / "mtp-Tiny-1B-Q8_0.gguf",
        keep=lambda tensor: is_of_layer(tensor) and (has_tokens or tensor != "token_embd.weight"),
    )
    cut(name, folder / "mtp-Tiny-1B-Instruct-Q8_0.gguf", keep=is_of_layer)  # another model's
    pair = open_pair(target, side if is_named else None)
    assert pair.draft is not None
    assert pair.draft.notes == ("is the target's own multi-token-prediction layer, from 'mtp-Tiny-1B-Q8_0.gguf'",)
    assert pair.has_default_draft != is_named
    with open_engine(target, side if is_named else MTP) as engine:
        found = first_guess(engine)
    with open_engine(TINY / f"{name}.gguf", MTP) as engine:
        assert torch.equal(found, first_guess(engine))


def test_a_layers_file_is_no_target_and_no_layer_of_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = cut("glm4moe-mtp", tmp_path / "mtp-a.gguf", keep=is_of_layer)
    with pytest.raises(EdgespecError, match="is a multi-token-prediction layer of a target: it drafts for it"):
        open_pair(side, None)
    with pytest.raises(EdgespecError, match="is of a target with model_type = glm4_moe, and this one has qwen3_5_text"):
        open_pair(TINY / "qwen35-mtp.gguf", side)
    with pytest.raises(EdgespecError, match="is of a target with vocab_size = 257, and this one has 64"):
        open_pair(TINY / "glm4moe.gguf", side)
    other = cut("glm4moe-mtp", tmp_path / "mtp-b.gguf", keep=is_of_layer, embedding_length=24)
    with pytest.raises(EdgespecError, match="embedding_length = 24"):
        open_pair(TINY / "glm4moe-mtp.gguf", other)
    other.unlink()
    (tmp_path / "a.gguf").write_bytes((TINY / "glm4moe-mtp.gguf").read_bytes())
    assert run(["models", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert f"draft: {side} (" in listed
    assert "draft: mtp, its own multi-token-prediction layer (" in listed


def test_a_layers_file_of_other_tokens_is_refused(tmp_path: Path) -> None:
    tokens = ["other", *map(str, range(256))]
    side = cut("glm4moe-mtp", tmp_path / "mtp-a.gguf", keep=is_of_layer, more={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(EdgespecError, match="token ids differ"):
        open_pair(TINY / "glm4moe-mtp.gguf", side)


def test_a_file_and_its_layer_can_be_rounded_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    path = TINY / "qwen35-mtp.gguf"
    with open_engine(path, MTP) as engine:
        expected = first_guess(engine)
    with open_engine(path, MTP, quant="nf4", draft_quant="nf4") as engine:
        found = first_guess(engine)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.08, rtol=0.0)


@pytest.mark.parametrize("block_count", [2, 3])
def test_a_stated_layer_that_a_file_lacks_is_said_or_refused_by_name(block_count: int, tmp_path: Path) -> None:
    path = cut(
        "glm4moe-mtp", tmp_path / "a.gguf", keep=lambda tensor: not tensor.startswith(LAYER), block_count=block_count
    )
    pair = open_pair(path, None)
    assert pair.draft is None
    assert pair.target.config.num_hidden_layers == 2
    assert pair.target.notes == ("states a multi-token-prediction layer, and its file has none",)
    with pytest.raises(EdgespecError, match="has no multi-token-prediction layer, though its settings state one"):
        open_pair(path, MTP)


@pytest.mark.parametrize("block_count", [2, 3])
@pytest.mark.parametrize("name", ["glm4moe-mtp", "qwen35-mtp"])
def test_a_layer_that_a_file_does_not_state_drafts_and_is_said(name: str, block_count: int, tmp_path: Path) -> None:
    path = cut(name, tmp_path / "a.gguf", keep=lambda _: True, block_count=block_count, nextn_predict_layers=None)
    draft = open_pair(path, None).draft
    assert draft is not None
    assert draft.notes == ("is the target's own multi-token-prediction layer, which its file has and does not state",)
    assert not differing(path, name)


def test_a_layer_lies_in_the_last_part_of_a_split_file(tmp_path: Path) -> None:
    for number, keep in enumerate(
        (lambda tensor: not tensor.startswith(LAYER), lambda tensor: tensor.startswith(LAYER))
    ):
        path = tmp_path / f"a-0000{number + 1}-of-00002.gguf"
        cut("glm4moe-mtp", path, keep=keep, more={"split.no": number, "split.count": 2})
    assert not differing(tmp_path / "a-00001-of-00002.gguf", "glm4moe-mtp")


def test_a_layer_without_a_last_norm_has_the_targets(tmp_path: Path) -> None:
    path = cut("glm4moe-mtp", tmp_path / "a.gguf", keep=lambda tensor: "shared_head_norm" not in tensor)
    layer = layer_of(path)
    assert "model.norm.weight" in layer.skeleton(layer.checkpoint, dtype=torch.float32).lent
    with open_engine(path, MTP) as engine:
        assert engine.draft_model is not None
        assert engine.draft_model.model.model.norm.weight is engine.target_model.model.model.norm.weight
        first_guess(engine)


def test_a_layer_with_a_tensor_that_is_not_known_stops_nobody_who_has_not_named_it(tmp_path: Path) -> None:
    path = copy_gguf(TINY / "glm4moe-mtp.gguf", tmp_path / "a.gguf", further=[(f"{LAYER}ssm_a", (4,), 0, bytes(16))])
    pair = open_pair(path, None)
    assert pair.draft is None
    (note,) = pair.target.notes
    assert "cannot draft here" in note
    assert f"'{LAYER}ssm_a'" in note
    with pytest.raises(EdgespecError, match=f"'{LAYER}ssm_a'"):
        open_pair(path, MTP)


def test_a_layer_of_a_family_whose_layers_are_not_read_is_named(tmp_path: Path) -> None:
    settings = {"nemotron_h_moe.nextn_predict_layers": 1, "nemotron_h_moe.block_count": 4}
    path = copy_gguf(TINY / "nemotron_h.gguf", tmp_path / "a.gguf", settings=settings,
                     further=[("blk.3.nextn.eh_proj.weight", (4, 8), 0, bytes(128))])  # fmt: skip
    target, layer = own_draft(open_model(path))
    assert layer is None
    assert target.notes == (
        "has a multi-token-prediction layer of its own, which cannot draft here: of nemotron_h it is not read",
    )


def test_a_file_whose_header_alone_is_there_is_planned(tmp_path: Path) -> None:
    whole = (TINY / "glm4moe-mtp.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[: len(whole) // 2])
    _, layer = planned_draft(None, open_architecture(tmp_path / "a.gguf"))
    assert layer is not None
    assert layer.checkpoint.tensors["fuse.eh_proj.weight"].shape == (16, 32)
