"""`edgespec train head` and `train router`: from a folder of texts to a draft that `generate` takes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from edgespec.pair.folder import read_head_facts
from edgespec.train.feature_files import FeatureFiles
from tests.cli.conftest import Outcome, RunCli
from tests.support.tiny_checkpoints import make_model, save_folder
from tests.support.tiny_configs import tiny_config

FEW = [
    "--training-steps",
    "8",
    "--warmup-steps",
    "2",
    "--evaluate-every",
    "4",
    "--checkpoint-every",
    "3",
    "--batch",
    "3",
]
SMALL = ["--block-tokens", "32", *FEW]


@pytest.fixture
def target(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["-m", str(pair_folders[0])]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "cwd" / "texts"
    (folder / "below").mkdir(parents=True)
    for index in range(5):
        (folder / "below" / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * (2 + index))
    (folder / "b.md").write_bytes(b"caf\xe9 " * 30)
    (folder / "nothing.txt").write_text("")
    (folder / "binary.dat").write_bytes(b"\0" * 500)
    (folder / ".hidden").write_text("secret " * 40)
    return folder


def train(run_cli: RunCli, arguments: list[str], what: str = "head") -> Outcome:
    return run_cli([what, *arguments], command="train")


@pytest.mark.parametrize("method", ["eagle", "hass", "coral"])
def test_a_head_and_its_router_draft_for_their_target(
    method: str, run_cli: RunCli, target: list[str], texts: Path
) -> None:
    head = [*target, "--data", "texts", "--method", method, "-o", "head", *SMALL, "-ngl", "0", "--max-cpu-mem", "1GiB"]
    outcome = train(run_cli, [*head, "--json"]).ended()
    report = json.loads(outcome.out)
    assert report["method"] == method
    assert report["held_out"]["acceptance_length"] >= 1
    assert report["settings"]["feature_noise"] == 0.1
    assert ("alignment_weight" in report["held_out"]) == (method == "coral")
    assert report["settings"]["steps_of_forward"] == (1 if method == "eagle" else 3)
    assert re.search(r"features: \d+ MB go to 'head.features' \(.* GB free\)", outcome.err)
    assert re.search(r"step 4 of 8, held out: acceptance length \d", outcome.err)
    assert not Path("head.training").exists(), "a finished run leaves no checkpoint"
    assert FeatureFiles(Path("head.features")).num_blocks == report["features"]["blocks"]

    router = [*target, "-md", "head", "--groups", "8", "--top-groups", "2", "-o", "routed", *FEW]
    assert "mass kept" in train(run_cli, router, "router").ended().out
    assert read_head_facts(Path("routed")).router_groups == 8
    weights, before = load_file("routed/model.safetensors"), load_file("head/model.safetensors")
    assert all((weights[name] == before[name]).all() for name in before)
    assert {name for name in weights if name not in before} == {"router.inner.weight", "router.outer.weight"}

    prompt = ["-p", "def f", *target, "-n", "12", "--temp", "0", "-q"]
    plain = run_cli([*prompt, "--policy", "none"])
    for draft in ("head", "routed"):
        drafted = run_cli([*prompt, "-md", draft, "--policy", "eagle2", "--tree-size", "8"])
        assert (drafted.code, drafted.out) == (0, plain.out), drafted.err


def test_an_eagle3_head_is_written_as_published_ones_are_and_drafts(
    run_cli: RunCli, target: list[str], texts: Path
) -> None:
    given = [*target, "--data", "texts", "--method", "eagle3", "--draft-vocab", "90", "-o", "head", *SMALL, "--json"]
    report = json.loads(train(run_cli, given).ended().out)
    assert report["settings"]["steps_of_forward"] == 7
    assert report["settings"]["feature_noise"] == 0
    assert "regression_1" not in report["held_out"]
    config = json.loads(Path("head/config.json").read_text())
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], 90)

    prompt = ["-p", "def f", *target, "-n", "12", "--temp", "0"]
    plain = run_cli([*prompt, "--policy", "none", "-q"])
    drafted = run_cli([*prompt, "-md", "head", "--policy", "eagle2", "--tree-size", "8"])
    assert (drafted.code, drafted.out) == (0, plain.out), drafted.err
    assert "is an EAGLE-3 head" in drafted.err

    other = [*target, "--data", "texts", "--features", "plain", "-o", "other", *SMALL, "--training-steps", "1"]
    assert train(run_cli, other).code == 0
    without = train(run_cli, [*target, "--features", "plain", "--method", "eagle3", "-o", "x", *SMALL])
    assert without.code != 0
    assert "hidden states after [] layers, and not after [0, " in without.err
    router = train(run_cli, [*target, "-md", "head", "--groups", "8", "-o", "routed", *FEW], "router")
    assert (router.code != 0, "no feature head of eagle, hass or coral" in router.err) == (True, True)


def test_the_texts_of_a_folder_are_its_text_files(run_cli: RunCli, target: list[str], texts: Path) -> None:
    """Whatever their bytes; no hidden, empty or binary ones."""
    assert "texts: 6, " in train(run_cli, [*target, "--data", "texts", "-o", "head", *SMALL]).ended().err
    assert "texts: 1, " in train(run_cli, [*target, "--data", "texts/b.md", "-o", "one", *SMALL]).ended().err


def test_prompt_files_are_texts_too(run_cli: RunCli, target: list[str], texts: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"def name_{index}(x): return {index}"}) + "\n" for index in range(4))
    Path(texts.parent / "p.jsonl").write_text(rows)
    assert "texts: 4, " in train(run_cli, [*target, "--data", "p.jsonl", "-o", "head", *SMALL]).ended().err


def test_features_serve_other_heads_and_no_other_texts(run_cli: RunCli, target: list[str], texts: Path) -> None:
    head = [*target, "-o", "head", *SMALL]
    assert train(run_cli, [*head, "--data", "texts"]).code == 0
    again = [*target, "--features", "head.features", "-o", "second", "--method", "eagle", *SMALL]
    assert train(run_cli, again).code == 0, "no texts are needed where features are"
    (texts / "b.md").write_text("another text " * 20)
    other = train(run_cli, [*head, "--data", "texts", "--overwrite"])
    assert (other.code, "other texts" in other.err) == (2, True)
    shutil.rmtree("head.features")
    assert train(run_cli, [*head, "--data", "texts", "--overwrite"]).code == 0


@pytest.mark.parametrize(
    ("what", "options", "named"),
    [
        ("head", ["-o", "head"], "--data"),
        ("head", ["--data", "nowhere", "-o", "head"], "nowhere"),
        ("head", ["--data", "texts", "-o", "texts"], "--data and --output are one file"),
        ("head", ["--data", "texts", "-o", "no/where/head"], "no folder"),
        ("head", ["--data", "texts", "-o", "head", "--betas", "1"], "--betas"),
        ("head", ["--data", "texts", "-o", "head", "--betas", "1,2"], "cannot be done"),
        ("head", ["--features", "nowhere", "-o", "head"], "nowhere"),
        ("head", ["--data", "texts", "-o", "head", "--draft-vocab", "9"], "--draft-vocab 9"),
        ("head", ["--data", "texts", "-o", "head", "--method", "eagle3", "--alignment-weight", "1"], "features"),
        ("router", ["-o", "routed"], "-md"),
        ("router", ["-md", "DRAFT", "-o", "routed"], "no feature head"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    what: str, options: list[str], named: str, run_cli: RunCli, pair_folders: tuple[Path, Path], texts: Path
) -> None:
    given = [str(pair_folders[1]) if option == "DRAFT" else option for option in options]
    outcome = train(run_cli, ["-m", str(pair_folders[0]), *given], what)
    assert outcome.code in {1, 2, 4}, outcome.err
    assert named in outcome.err
    assert "Traceback" not in outcome.err


def test_weights_and_noise_can_be_given(run_cli: RunCli, target: list[str], texts: Path) -> None:
    given = ["--alignment-weight", "0.05", "--top-tokens-weight", "0.5", "--feature-noise", "0", "--json"]
    outcome = train(run_cli, [*target, "--data", "texts", "-o", "head", *SMALL, *given]).ended()
    report = json.loads(outcome.out)
    weights = {"regression": 0.5, "distribution": 0.1, "top_tokens": 0.5, "alignment": 0.05}
    assert report["settings"]["weights"] == {**weights, "step_decay": 1, "feeds_gradient": False}
    assert report["settings"]["feature_noise"] == 0
    assert "alignment_weight" not in report["held_out"], "the one that was given overrides the balance"


def test_defaults_reach_commands_below_train(
    run_cli: RunCli, target: list[str], texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag counts more than EDGESPEC_TRAIN_KEY, that more than EDGESPEC_KEY, and that more than the configuration."""
    (texts.parent / "own.toml").write_text("[defaults]\ntraining_steps = 3\nbatch = 2\nlearning_rate = 0.01\n")
    monkeypatch.setenv("EDGESPEC_BATCH", "3")
    monkeypatch.setenv("EDGESPEC_TRAIN_SEED", "7")
    given = [*target, "--data", "texts", "-o", "head", "--block-tokens", "32", "--config", "own.toml", "--json"]
    settings = json.loads(train(run_cli, [*given, "--learning-rate", "0.02"]).ended().out)["settings"]
    assert [settings[name] for name in ("training_steps", "batch_blocks", "learning_rate", "seed")] == [3, 3, 0.02, 7]


def test_a_target_without_hidden_states_is_refused_before_texts_are_read(
    run_cli: RunCli, tmp_path: Path, texts: Path
) -> None:
    folder = save_folder(tmp_path / "bloom", make_model(tiny_config("bloom"), is_image_text=False, seed=0))
    outcome = train(run_cli, ["-m", str(folder), "--data", "texts", "-o", "head", *SMALL])
    assert outcome.code != 0
    assert "gives no hidden states to learn from: it is decoded by chains" in outcome.err
    assert not (texts.parent / "head.features").exists()
