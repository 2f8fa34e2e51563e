"""`edgespec estimate`: the plan without the weights, for machines that are here and for others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MptConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.cli import run
from edgespec.config import parse_size
from edgespec.pair.pair import open_pair
from edgespec.placement.copied_layers import DEPTH
from tests.offload.test_file_tables import NGRAMS, needs_qwen4
from tests.support.adapters import write_adapter
from tests.support.families import FAMILIES, GROUPED, make_model, make_tokenizer, save_folder

CARD = ["--device", "cuda", "--max-gpu-mem", "2GiB", "--max-cpu-mem", "1GiB"]


@pytest.fixture(autouse=True)
def _no_weights(no_weights_read: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.doctor.machine_speed.BUDGET_S", 0.01)


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(["estimate", *arguments, "--json"]) == 0
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


def test_without_arguments_it_plans_the_built_in_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate"]) == 0
    out = capsys.readouterr().out
    assert "8 of 8 layers resident" in out
    assert "together" in out


@pytest.mark.parametrize("draft", ["of its own", "self:nf4"])
def test_it_is_the_plan_that_the_engine_makes(
    draft: str, capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = pair_folders
    of_copy = draft == "self:nf4"
    path = Path(draft) if of_copy else folder
    options = ["--max-cpu-mem", "400MiB", "-ngl", "1", "-c", "100", "--tree-size", "20", "--dtype", "bfloat16"]
    facts = estimate(capsys, "-m", str(target), "-md", str(path), *options)
    assert facts["draft"] == str(path)
    assert ("0.965 for a first child of a 4-bit copy" in str(facts["speed"])) == of_copy
    monkeypatch.undo()
    with Engine.from_pair(
        open_pair(target, path),
        tree=TreeSettings(size=20, depth=DEPTH if of_copy else 24),
        limits=MemoryLimits(max_cpu_bytes=parse_size("400MiB"), max_resident_layers=1),
        dtype="bfloat16",
        context_tokens=100,
    ) as engine:
        assert facts["device_bytes"] == engine.placement.device_bytes
        assert facts["resident_layers"] == engine.placement.num_resident == 1


def test_a_target_without_a_draft_is_told_what_is_at_hand(
    capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path]
) -> None:
    target = str(pair_folders[0])

    def copy(*options: str) -> dict[str, Any]:
        drafts = estimate(capsys, "-m", target, *options)["drafts"]
        assert isinstance(drafts, list)
        assert [one["draft"] for one in drafts] == ["none", "self", "draft"]
        return dict(drafts[1])

    assert copy("-ngl", "0")["tokens_per_pass"] > 1
    assert "stay in memory" in copy()["why_not"]
    assert "packed as nf4" in copy("-ngl", "0", "--quant", "nf4")["why_not"]
    assert run(["estimate", "-m", target, "-ngl", "0"]) == 0
    assert "most tokens a second: -md " in capsys.readouterr().out
    assert "drafts" not in estimate(capsys, "-m", target, "-md", "none", "-ngl", "0")


@pytest.mark.parametrize("quant", ["none", "int8", "nf4"])
def test_a_bare_config_is_enough(
    capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path], tmp_path: Path, quant: str
) -> None:
    shutil.copy(pair_folders[0] / "config.json", tmp_path)
    whole = estimate(capsys, str(pair_folders[0]), "--quant", quant, *CARD)
    bare = estimate(capsys, str(tmp_path), "--quant", quant, *CARD)
    assert {**bare, "target": ""} == {**whole, "target": ""}


def test_a_card_that_is_not_there_is_described_by_its_size(
    capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path]
) -> None:
    target = str(pair_folders[0])
    facts = estimate(capsys, target, *CARD, "-ngl", "1")
    assert facts["device"] == "cuda:0"
    assert (facts["resident_layers"], facts["ram_layers"], facts["disk_layers"]) == (1, 2, 0)
    bytes_by_quant = [
        estimate(capsys, target, *CARD, "-ngl", "0", "--quant", quant)["pass_bytes"]
        for quant in ("none", "int8", "nf4")
    ]
    assert sorted(bytes_by_quant, reverse=True) == bytes_by_quant


def test_what_does_not_fit_ends_with_code_5_the_table_and_cheaper_settings(
    capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path]
) -> None:
    target, draft = map(str, pair_folders)
    plan = ["estimate", "-m", target, "-md", draft, "-c", "256", "--prompt-tokens", "8"]
    assert run([*plan, "--tree-size", "768", "--max-cpu-mem", "220MiB"]) == 5
    err = capsys.readouterr().err
    assert "more than the limit" in err
    assert "RAM   libraries" in err
    assert "--tree-size 192 (from" in err
    assert "--policy none (from" in err
    assert run([*plan, "--tree-size", "192", "--max-cpu-mem", "220MiB"]) == 0
    assert run([*plan, "--max-cpu-mem", "10MiB"]) == 5
    assert "--policy none (from" in capsys.readouterr().err
    assert run(["estimate", target, "-c", "256", "--max-cpu-mem", "10MiB"]) == 5
    err = capsys.readouterr().err
    assert "--policy" not in err  # nothing is cheaper than what was asked for but another form of the weights
    assert "--quant" in err
    assert run(["estimate", "-ngl", "all", "--max-cpu-mem", "300MiB"]) == 5


@pytest.mark.parametrize("has_weights", [True, False])
def test_tokens_that_differ_are_refused_as_a_run_refuses_them(
    has_weights: bool, capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = (shutil.copytree(folder, tmp_path / folder.name) for folder in pair_folders)
    make_tokenizer(swapped=True).save_pretrained(draft)
    if not has_weights:
        for path in [*target.glob("*.safetensors*"), *draft.glob("*.safetensors*")]:
            path.unlink()
    pair = ["-m", str(target), "-md", str(draft)]
    assert run(["estimate", *pair]) == 2
    estimated = capsys.readouterr().err
    assert "the draft's token ids differ from the target's in 2 of 257: id 0 is '!' in the target" in estimated
    if has_weights:
        assert run(["generate", "-p", "x", *pair, "-q"]) == 2
        assert capsys.readouterr().err == estimated
    assert run(["estimate", *pair, "--policy", "none"]) == 0


def test_configs_alone_tell_vocabularies_that_cannot_match(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Tables of the same tokens may be padded differently."""
    for name, vocab in (("target", 151_936), ("padded", 152_064), ("other", 32_000)):
        (tmp_path / name).mkdir()
        LlamaConfig(**{**GROUPED, "vocab_size": vocab}).save_pretrained(tmp_path / name)
    assert run(["estimate", str(tmp_path / "target"), "-md", str(tmp_path / "padded")]) == 0
    capsys.readouterr()
    assert run(["estimate", str(tmp_path / "target"), "-md", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert (
        "the draft's token ids differ from the target's: its config.json has 32000 of them, and that 151936." in error
    )
    assert "Try: Use a draft of the same model family, or --policy none without a draft." in error


def test_the_text_part_is_planned_from_a_bare_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for family in ("gemma3", "gemma3-images"):
        FAMILIES[family]().save_pretrained(tmp_path / family)
    text, seeing = (estimate(capsys, str(tmp_path / family)) for family in ("gemma3", "gemma3-images"))
    assert seeing["unread_parameters"]
    assert seeing["device_bytes"].pop("tower for pictures") > 0
    same = ("device_bytes", "target_parameters", "pass_bytes")
    assert {key: seeing[key] for key in same} == {key: text[key] for key in same}
    assert run(["estimate", str(tmp_path / "gemma3-images")]) == 0
    assert "the text part of gemma3: " in capsys.readouterr().out


@needs_qwen4
@pytest.mark.parametrize("is_seeing", [False, True], ids=["text", "images"])
def test_tables_of_ngrams_are_named_and_take_no_memory(
    is_seeing: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those of Qwen3.8-Flash-Next have 51.2 B weights: 16 times 20 million rows of 160 numbers."""
    text = {**NGRAMS, "model_type": "qwen4_exp_text", "ngram_vocab_size_base": 20_000_000, "ple_embed_dim": 2560}
    config = {"model_type": "qwen4_exp", "text_config": text} if is_seeing else text
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
    options = [str(tmp_path), "--hardware", "rtx-4090", "--max-cpu-mem", "1GiB", "--quant", "nf4"]
    assert run(["estimate", *options]) == 0
    out = capsys.readouterr().out
    assert "51.2 B weights in tables, 95.368 GiB, stay in their files: a pass looks up few of their rows" in out
    facts = estimate(capsys, *options)
    assert facts["resident_layers"] == 3
    assert 51.2e9 < int(str(facts["target_parameters"])) < 51.3e9


def test_what_would_be_refused_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for model_type, reason in {"t5": "encoder with a decoder", "vit": "knows, and not as"}.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert run(["estimate", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert reason in err
        assert "update transformers" not in err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama9"}))
    assert run(["estimate", str(tmp_path)]) == 2
    assert "update transformers" in capsys.readouterr().err


def test_a_family_without_heads_is_planned_plainly(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "num_hidden_layers": 2}))
    assert run(["estimate", str(tmp_path)]) == 0
    outcome = capsys.readouterr()
    assert "rwkv: decoded plainly" in outcome.err
    assert "target: its own cache" in outcome.out


def test_a_family_of_chains_is_planned_with_a_language_model_for_a_draft(
    capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Without one, the target's own copy is no advice; what has branches is refused."""
    config = MptConfig(d_model=128, n_layers=4, n_heads=4, vocab_size=257, max_seq_len=64)
    target = str(save_folder(tmp_path / "mpt", make_model(config)))
    facts = estimate(capsys, target, "-md", str(pair_folders[1]), *CARD)
    assert facts["decoding"] == "chains"
    assert {"target: its own cache", "draft: weights"} <= set(facts["device_bytes"])
    assert "drafts" not in facts
    assert run(["estimate", target, "-md", str(pair_folders[1]), "--policy", "specinfer", *CARD]) == 2
    assert "mpt' grows no trees of --policy specinfer: it is decoded by chains" in capsys.readouterr().err
    assert run(["estimate", target, "-md", "self", "--policy", "chain", *CARD]) == 2
    assert "takes no draft that reads its hidden states or is its copy" in capsys.readouterr().err


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["estimate", str(tmp_path)]) == 4
    assert run(["estimate", "a", "-m", "b"]) == 2
    assert run(["estimate", "--quant", "gguf"]) == 2
    assert "gguf" in capsys.readouterr().err
    assert run(["estimate", "-c", "lots"]) == 2
    assert run(["estimate", "-md", "b"]) == 2
    assert run(["estimate", "-c", "100000"]) == 2
    assert "4096 positions" in capsys.readouterr().err
    assert run(["estimate", "--device", "cuda:banana", "--max-gpu-mem", "1GiB"]) == 2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert run(["estimate", str(tmp_path)]) == 2
    assert "bert" in capsys.readouterr().err
    config = {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["estimate", str(tmp_path)]) == 2
    assert "hqq" in capsys.readouterr().err


def test_the_advice_for_a_card_keeps_to_the_ram_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    card = ["estimate", "--device", "cuda", "--max-gpu-mem", "680MiB", "--max-cpu-mem", "210MiB", "-c", "1024"]
    card += ["--cuda-graphs", "off"]
    assert run([*card, "--tree-size", "768"]) == 5
    assert "or use --tree-size 96 (from" in capsys.readouterr().err
    assert run([*card, "--tree-size", "96"]) == 0


def test_adapters_are_in_the_plan(
    capsys: pytest.CaptureFixture[str], pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Their matrices in float32, also of those that only count in texts that name them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair_folders[0]))
    adapter = write_adapter(tmp_path / "one", model, ["q_proj", "down_proj"])
    pair = ["-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "-c", "100"]
    plain, found = (estimate(capsys, *pair, *lora) for lora in ([], ["--lora", f"{adapter}:0"]))
    stored = load_file(adapter / "adapter_model.safetensors")
    num_bytes = sum(tensor.numel() for tensor in stored.values()) * 4
    assert (plain["adapters"], found["adapters"]) == ({}, {"one": num_bytes})
    assert int(str(found["device_total_bytes"])) - int(str(plain["device_total_bytes"])) == num_bytes
    assert run(["estimate", *pair, "--lora", f"{adapter}:0"]) == 0
    assert "target: adapters" in capsys.readouterr().out
