"""`edgespec models`: what is here, whether it can run, and what can draft for what."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig, MptConfig

from edgespec.hub.other_programs import llama_cpp_folder
from tests.cli.conftest import RunCli
from tests.hub import Cache
from tests.offload.formats.bitsandbytes_checkpoints import published
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_refused import TINY
from tests.support.families import FAMILIES, GROUPED, make_model, make_tokenizer, save_folder


def listed(run_cli: RunCli, *arguments: str) -> dict[str, dict[str, Any]]:
    outcome = run_cli([*arguments, "--json"], command="models").ended()
    return {model["name"]: model for model in json.loads(outcome.out)["models"]}


def test_models_are_listed_with_their_drafts(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Drafts have the target's token ids and fewer parameters; a folder's models count like the cache's."""
    cache.put("acme/Target-70B", pair_folders[0])
    cache.put("acme/Other-1B", save_folder(
        tmp_path / "other", make_model(FAMILIES["opt"]()), tokenizer=make_tokenizer(swapped=True)
    ))  # fmt: skip
    draft = shutil.copytree(pair_folders[1], tmp_path / "models" / "small" / "draft")
    found = listed(run_cli, str(tmp_path / "models"))
    target = found["acme/Target-70B"]
    assert target["drafts"] == [str(draft)]
    assert found[str(draft)]["drafts"] == found["acme/Other-1B"]["drafts"] == []
    assert (target["type"], target["dtype"], target["quant"], target["context"]) == ("llama", "bfloat16", None, 256)
    assert (target["problem"], found["acme/Other-1B"]["type"]) == (None, "opt")
    # 257 tokens of width 32, tied; three layers of attention with two of four heads for keys, a gated MLP, norms
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert target["parameters"] == 257 * 32 + 3 * layer + 32
    assert target["bytes"] == 2 * target["parameters"]


@pytest.mark.parametrize(("kind", "quant"), [("int8", "int8"), ("nf4-nested", "nf4"), ("fp4", "fp4")])
def test_the_format_is_that_of_the_stored_tensors(
    kind: str, quant: str, cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    """config.json's own words for it are optional, and have defaults."""
    cache.put("acme/Plain-1B", pair_folders[1])
    packed = published(cache.put("acme/Packed-1B", pair_folders[1]), kind)
    assert "bnb_4bit_quant_type" not in (packed / "config.json").read_text()
    found = listed(run_cli)
    assert (found["acme/Plain-1B"]["quant"], found["acme/Packed-1B"]["quant"]) == (None, quant)
    assert found["acme/Packed-1B"]["parameters"] == found["acme/Plain-1B"]["parameters"]


def test_what_cannot_run_is_listed_with_the_reason(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    sorted(cache.put("acme/Cut-7B", pair_folders[0]).glob("*.safetensors"))[0].unlink()
    aqlm = cache.put("acme/Quant-7B", pair_folders[1])
    config = json.loads((aqlm / "config.json").read_text())
    (aqlm / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
    cache.put("acme/NoTokens-7B", shutil.copytree(
        pair_folders[1], tmp_path / "no-tokens", ignore=shutil.ignore_patterns("tokenizer*")
    ))  # fmt: skip
    mpt = MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=257, max_seq_len=64)
    cache.put("acme/Alibi-7B", save_folder(tmp_path / "mpt", make_model(mpt)))
    found = listed(run_cli)
    codes = {name.partition("/")[2]: model["problem"]["code"] for name, model in found.items() if model["problem"]}
    assert codes == {"Cut-7B": "E_SHARD_MISSING", "NoTokens-7B": "E_TOKENIZER", "Quant-7B": "E_QUANTIZED"}
    assert found["acme/Cut-7B"]["type"] == "llama"
    assert found["acme/Alibi-7B"]["decoding"] == "chains"
    assert found["acme/Alibi-7B"]["notes"][0].startswith(
        "is decoded by chains, trees without branches, because it adds"
    )
    assert all(model["drafts"] == [] for model in found.values())


def test_a_target_of_chains_has_language_models_for_drafts_and_is_none(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    wide = {**GROUPED, "hidden_size": 256, "intermediate_size": 1024}
    mpt = MptConfig(d_model=128, n_layers=4, n_heads=4, vocab_size=257, max_seq_len=64)
    cache.put("acme/Alibi-7B", save_folder(tmp_path / "mpt", make_model(mpt)))
    cache.put("acme/Large-7B", save_folder(tmp_path / "large", make_model(LlamaConfig(**wide))))
    cache.put("acme/Small-1B", pair_folders[1])
    found = listed(run_cli)
    assert found["acme/Alibi-7B"]["decoding"] == "chains"
    assert found["acme/Alibi-7B"]["drafts"] == found["acme/Large-7B"]["drafts"] == ["acme/Small-1B"]


def test_a_config_alone_says_what_would_be_refused(cache: Cache, run_cli: RunCli, tmp_path: Path) -> None:
    """The family's own reason comes before the weights, which are not there."""
    for name, config in {"bert": BertConfig(), "mpt": MptConfig(), "llama": FAMILIES["llama"]()}.items():
        config.save_pretrained(tmp_path / name)
    found = listed(run_cli, str(tmp_path))
    codes = {Path(name).name: model["problem"]["code"] for name, model in found.items()}
    assert codes == {"llama": "E_NO_SAFETENSORS", "bert": "E_UNSUPPORTED_ARCHITECTURE", "mpt": "E_NO_SAFETENSORS"}
    assert found[str(tmp_path / "llama")]["parameters"] > 0


def test_a_model_that_also_sees_is_listed_by_its_text_part(cache: Cache, run_cli: RunCli, tmp_path: Path) -> None:
    save_folder(tmp_path / "seeing", make_model(FAMILIES["gemma3-images"]()))
    save_folder(tmp_path / "text", make_model(FAMILIES["gemma3"]()))
    found = {Path(name).name: model for name, model in listed(run_cli, str(tmp_path)).items()}
    assert found["seeing"]["problem"] is None
    assert found["seeing"]["parameters"] == found["text"]["parameters"]
    assert found["seeing"]["unread_parameters"] > found["text"]["unread_parameters"] == 0
    assert found["seeing"]["reads_pictures"]
    assert not found["text"]["reads_pictures"]
    assert "gemma3 with pictures" in run_cli([str(tmp_path)], command="models").out


def test_a_model_at_a_revision_alone_is_named_with_it(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    cache.put("acme/Target-70B", pair_folders[0], commit="c" * 40, ref=None)
    assert list(listed(run_cli)) == [f"acme/Target-70B --revision {'c' * 40}"]


def test_the_table_reads_well(cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    cache.put("acme/Target-70B", pair_folders[0])
    cache.put("acme/Draft-1B", pair_folders[1])
    sorted(cache.put("acme/Cut-7B", pair_folders[0]).glob("*.safetensors"))[0].unlink()
    lines = run_cli([], command="models").out.splitlines()
    assert lines[0].split() == ["model", "type", "parameters", "size", "weights", "context"]
    assert lines[1].split()[:2] == ["acme/Cut-7B", "llama"]
    assert lines[2].startswith("    cannot run: 1 of ")
    assert lines[3].split() == ["acme/Draft-1B", "llama", "0.0121", "M", "0.0", "MiB", "bf16", "256"]
    assert lines[5].startswith("    draft: acme/Draft-1B (")


def test_an_empty_cache_is_said_to_be_so(cache: Cache, run_cli: RunCli) -> None:
    outcome = run_cli([], command="models")
    assert (outcome.code, outcome.out) == (0, "")
    assert str(cache.folder) in outcome.err
    assert run_cli(["nowhere"], command="models").code == 2


def test_gguf_files_are_listed_with_types_and_drafts(cache: Cache, run_cli: RunCli, tmp_path: Path) -> None:
    """In a folder, the cache and llama.cpp's; what is no model is left out, and named where it alone is asked for."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("mistral", "llama-q8_0"):
        shutil.copy(TINY / f"{name}.gguf", folder / f"{name}.gguf")
    projector = [("v.weight", (2, 32), 0, bytes(256))]
    write_gguf(folder / "mmproj.gguf", {"general.architecture": "clip"}, projector)
    (tmp_path / "one").mkdir()
    shutil.copy(TINY / "llama.gguf", tmp_path / "one/m.gguf")
    cache.put("acme/One-GGUF", tmp_path / "one")
    llama_cpp = llama_cpp_folder()
    llama_cpp.mkdir(parents=True)
    (llama_cpp / "cut.gguf").write_bytes((TINY / "llama.gguf").read_bytes()[:-9])
    found = listed(run_cli, str(folder))
    plain, packed = found[str(folder / "mistral.gguf")], found[str(folder / "llama-q8_0.gguf")]
    assert set(found) == {plain["name"], packed["name"], "acme/One-GGUF:F32", str(llama_cpp / "cut.gguf")}
    assert found[str(llama_cpp / "cut.gguf")]["problem"]["code"] == "E_SHARD_TRUNCATED"
    assert (list(plain["types"]), plain["bits_per_weight"]) == (["F32"], pytest.approx(32, rel=0.01))
    assert list(packed["types"]) == ["Q8_0", "F32"]
    assert 8.5 < packed["bits_per_weight"] < 12
    assert plain["parameters"] < packed["parameters"]
    assert packed["drafts"] == [plain["name"]]  # of the same vocabulary
    assert packed["name"] not in plain["drafts"]
    assert found["acme/One-GGUF:F32"]["problem"] is None
    lines = run_cli([str(folder / "llama-q8_0.gguf")], command="models").out.splitlines()
    assert any("Q8_0 " in line and " bits" in line for line in lines)
    refused = listed(run_cli, str(folder / "mmproj.gguf"))
    assert "projector" in refused[str(folder / "mmproj.gguf")]["problem"]["message"]
