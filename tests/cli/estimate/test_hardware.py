"""`edgespec estimate --hardware`: the plan and the speed on a machine that is not here."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import run
from edgespec.config import MAX_TREE_SIZE
from edgespec.estimate.speed import expected_tokens, open_hardware
from edgespec.grow.acceptance import DEFAULT_FILE, default_acceptance
from edgespec.grow.sequoia import power_law, sequoia_table
from edgespec.placement.acceptance import CHAINS, PUBLISHED, Published, assumed_acceptance
from edgespec.tree.settings import TreeSettings
from edgespec.tree.shapes import chain, expansion

LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
PLANNED = ["--device", "cuda", "--max-gpu-mem", "12GiB"]  # a card that is not here, and has no known speeds
SMALL = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}


def write_config(folder: Path, layers: int, sizes: dict[str, int], **more: Any) -> str:
    """A Llama's config.json alone."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": 32000, "dtype": "float16", **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096, **more}))
    return str(folder)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """27 GiB in 16 layers, and a draft of 4 layers."""
    target, draft = write_config(tmp_path / "t", 16, LARGE), write_config(tmp_path / "d", 4, SMALL)
    return ["-m", target, "-md", draft, "-c", "256"]


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["estimate", *arguments, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_it_says_placement_seconds_the_best_tree_and_a_range(
    capsys: pytest.CaptureFixture[str], pair: list[str]
) -> None:
    assert run(["estimate", *pair, "--hardware", "rtx-4090", "--acceptance", "0.8"]) == 0
    out = capsys.readouterr().out
    assert "layers resident" in out
    assert "rtx-4090: NVIDIA GeForce RTX 4090; 24 GiB at 1008 GB/s, 165 TFLOP/s in float16, PCIe 4.0 x16" in out
    assert "64 GiB of RAM (--max-cpu-mem)" in out
    assert "acceptance: 0.8 for a first child" in out
    assert "best tree: " in out
    assert "tokens/s (" in out


def test_the_numbers_agree_with_each_other(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    facts = estimate(capsys, *pair, "--hardware", "rtx-4090", "--acceptance", "0.8")
    speed, tree = facts["speed"], facts["speed"]["tree"]
    assert facts["device"] == speed["hardware"] == "rtx-4090"
    assert facts["tree_size"] == tree["nodes"]
    assert facts["resident_layers"] == tree["resident_layers"]
    for case in ("slow", "likely", "fast"):
        assert tree["step_s"][case] == pytest.approx(tree["draft_s"][case] + tree["pass_s"][case], rel=1e-3)
        assert tree["pass_s"][case] >= max(tree["stream_s"][case], tree["compute_s"][case])
        assert tree["tokens_per_s"][case] == pytest.approx(tree["tokens_per_pass"] / tree["step_s"][case], rel=1e-3)
    rates = tree["tokens_per_s"]
    assert rates["slow"] < rates["likely"] < rates["fast"]
    assert rates["likely"] > speed["plain"]["tokens_per_s"]["likely"]
    link_bytes_per_s = 0.8 * open_hardware("rtx-4090")[0].link_bytes_per_s
    assert tree["stream_s"]["likely"] == pytest.approx(facts["pass_bytes"] / link_bytes_per_s, rel=1e-3)


def test_the_plan_is_that_of_a_card_described_by_its_size(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    """The limits decide, not what this machine has; a tree of a given size is planned for that size."""
    options = [*pair, "--max-gpu-mem", "12GiB", "--max-cpu-mem", "40GiB", "--tree-size", "64"]
    there = estimate(capsys, *options, "--hardware", "rtx-4090")
    described = estimate(capsys, *options, "--device", "cuda")
    assert there["device_bytes"] == described["device_bytes"]
    assert there["host_bytes"] == described["host_bytes"]
    assert there["speed"]["tree"]["nodes"] == 64
    assert there["speed"]["assumed"]["host_memory_bytes"] is None


def test_the_card_is_the_limit_and_a_short_ram_sends_layers_to_disk(
    capsys: pytest.CaptureFixture[str], pair: list[str]
) -> None:
    sized = [*pair, "--tree-size", "16"]
    facts = estimate(capsys, *sized, "--hardware", "rtx-4090")
    assert 22 << 30 < facts["device_budget_bytes"] < 23 << 30
    assert estimate(capsys, *sized, "--hardware", "rtx-3060")["resident_layers"] < facts["resident_layers"]
    more = estimate(capsys, *sized, "--hardware", "rtx-4090", "--max-gpu-mem", "80GiB")
    assert 23 << 30 < more["device_budget_bytes"] < 24 << 30
    short = estimate(capsys, *sized, "--hardware", "rtx-3060", "--max-cpu-mem", "10GiB")
    assert short["disk_layers"] > 0
    roomy = estimate(capsys, *sized, "--hardware", "rtx-3060")
    assert short["speed"]["tree"]["pass_s"]["likely"] > roomy["speed"]["tree"]["pass_s"]["likely"]


def test_the_best_tree_is_at_least_as_fast_as_any_size(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    card = [*pair, "--hardware", "rtx-4080-super", "--acceptance", "0.6"]
    chosen = estimate(capsys, *card)
    best = chosen["speed"]["tree"]["tokens_per_s"]["likely"]
    assert estimate(capsys, *card, "--tree-size", str(chosen["tree_size"]))["device_bytes"] == chosen["device_bytes"]
    for size in (1, 16, 128, MAX_TREE_SIZE):
        fixed = estimate(capsys, *card, "--tree-size", str(size))["speed"]["tree"]
        assert fixed["nodes"] == size
        assert fixed["tokens_per_s"]["likely"] <= best * 1.0001


def test_the_acceptance_of_other_families_is_the_built_in_pairs_unless_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [write_config(tmp_path / name, 4, SMALL, model_type="mistral") for name in ("one", "other")]
    card = ["-m", folders[0], "-md", folders[1], "-c", "256", "--hardware", "rtx-4090", "--tree-size", "16"]
    model = default_acceptance()
    for options, temperature in (([], 0.0), (["--temp", "0.6"], 0.6), (["--acceptance", str(DEFAULT_FILE)], 0.0)):
        speed = estimate(capsys, *card, *options)["speed"]
        assert ("built-in pair" in speed["acceptance"]) == ("--acceptance" not in options)
        expected = model.rank_acceptance(temperature, "coupled")
        assert speed["acceptance_by_rank"] == pytest.approx(expected, abs=1e-5)
        assert f"temperature {temperature:g}, coupled children" in speed["acceptance"]
    sampled = estimate(capsys, *card, "--policy", "sequoia")["speed"]
    assert "sampled children" in sampled["acceptance"]


def test_preset_trees_and_plain_decoding(capsys: pytest.CaptureFixture[str], pair: list[str]) -> None:
    card = ["--hardware", "rtx-4090"]
    tree = estimate(capsys, *pair, *card, "--policy", "chain", "--draft-tokens", "5")["speed"]["tree"]
    assert (tree["nodes"], tree["depth"]) == (5, 5)
    assert tree["tokens_per_pass"] == pytest.approx(expected_tokens(chain(5), power_law(PUBLISHED[0].rate)), abs=1e-3)
    for options in ([*pair, "--policy", "none"], pair[:2]):
        facts = estimate(capsys, *options, *card)
        assert facts["speed"]["tree"] is None
        assert facts["speed"]["plain"]["tokens_per_pass"] == 1
    # The built-in pair is so small that issuing kernels takes all the time, so a bad draft cannot pay.
    assert run(["estimate", *card, "--acceptance", "0.01"]) == 0
    assert "no tree pays here" in capsys.readouterr().out


def test_the_generic_cpu_reads_from_disk_what_its_ram_does_not_hold(
    capsys: pytest.CaptureFixture[str], pair: list[str]
) -> None:
    facts = estimate(capsys, *pair, "--hardware", "cpu", "--dtype", "bfloat16", "--tree-size", "4")
    assert facts["resident_layers"] == 16
    short = estimate(
        capsys, *pair, "--hardware", "cpu", "--dtype", "bfloat16", "--tree-size", "4", "--max-cpu-mem", "20GiB"
    )
    assert short["disk_layers"] > 0
    assert short["speed"]["tree"]["stream_s"]["likely"] > 0
    assert short["speed"]["assumed"]["host_memory_bytes"] is None


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--hardware", "rtx-4085"], 2, "rtx-4080-super"),
        (["--hardware", "banana"], 2, "no hardware 'banana'"),
        (["--hardware", "rtx-4090", "--device", "cpu"], 2, "--device cpu contradicts"),
        (["--hardware", "cpu", "--device", "cuda"], 2, "--device cuda contradicts"),
        (["--hardware", "rtx-4090", "--acceptance", "1.5"], 2, "--acceptance 1.5 is not in (0, 1)"),
        (["--hardware", "rtx-4090", "--acceptance", "nan"], 2, "--acceptance nan is not in (0, 1)"),
        (["--hardware", "rtx-4090", "--acceptance", "nowhere.json"], 4, "nowhere.json"),
        (["--hardware", "rtx-4090", "--acceptance", "0.5", "--temp", "0.6"], 2, "--temp 0.6 means nothing"),
        (["--hardware", "rtx-4090", "--temp", "-1"], 2, "--temp -1.0"),
        ([*PLANNED, "--temp", "0.6"], 2, "--temp 0.6 changes no memory plan"),
        ([*PLANNED, "--acceptance", "0.6"], 2, "--acceptance 0.6 changes no memory plan"),
        ([*PLANNED, "--measure"], 2, "--measure measures this machine, and cuda:0 is another"),
        (["--hardware", "4090", "--measure"], 2, "--measure measures this machine, and --hardware rtx-4090"),
        (["--hardware", "rtx-4090", "--max-gpu-mem", "1GiB"], 5, "more than the limit"),
        (["--hardware", "rtx-4090", "-ngl", "all"], 5, "layers fit the memory"),
    ],
)
def test_mistakes_are_one_clear_error(
    capsys: pytest.CaptureFixture[str], pair: list[str], options: list[str], code: int, message: str
) -> None:
    assert run(["estimate", *pair, *options]) == code
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert err.count("Error:") == 1


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.64, 0.95])
def test_a_rate_becomes_a_power_law_that_stays_a_distribution(rate: float) -> None:
    rates = power_law(rate)
    assert rates[0] == pytest.approx(rate)
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(rates) < 1


@pytest.mark.parametrize(("temperature", "draw"), [(0.0, "coupled"), (0.6, "coupled"), (0.6, "sampled")])
def test_the_power_law_is_near_what_was_measured(temperature: float, draw: Any) -> None:
    """From the built-in pair's first rate, within a fifth of the tokens that its measured vector yields."""
    measured = default_acceptance().rank_acceptance(temperature, draw)
    shape = expansion((8, 4, 2, 1, 1, 1))
    ratio = expected_tokens(shape, power_law(measured[0])) / expected_tokens(shape, measured)
    assert 0.95 < ratio < 1.2


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda found: f"temperature {found.temperature}")
def test_published_rates_yield_the_published_tokens_through_sequoias_trees(published: Published) -> None:
    for nodes, tokens in published.tokens.items():
        table = sequoia_table(power_law(published.rate), size=nodes, depth=24, max_children=16)
        found = max(table.expected_tokens(nodes, depth) for depth in range(1, 25))
        assert found == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize("draft_kind", CHAINS)
def test_rates_of_published_drafts_yield_the_published_tokens_of_a_chain(draft_kind: str) -> None:
    found = CHAINS[draft_kind]
    assert expected_tokens(chain(found.length), power_law(found.rate)) == pytest.approx(found.tokens, rel=0.01)
    assert assumed_acceptance(TreeSettings(), None, draft_kind=draft_kind).rates[0] == found.rate


def test_llamas_have_the_published_acceptance_and_are_told_whose_it_is(
    capsys: pytest.CaptureFixture[str], pair: list[str], tmp_path: Path
) -> None:
    """The built-in pair's would be far too low for a pair of real models."""
    card = ["--hardware", "rtx-4090", "--tree-size", "16"]
    for options, rate in (([], 0.79), (["--temp", "0.6"], 0.775), (["--temp", "1"], 0.775)):
        speed = estimate(capsys, *pair, *card, *options)["speed"]
        assert speed["acceptance_by_rank"][0] == rate
        assert "Llama-2 7B drafting for 70B" in speed["acceptance"]
    assert run(["estimate", *pair, *card]) == 0
    assert "a guess for yours, which edgespec profile measures; --acceptance 0.7" in capsys.readouterr().out
    assert "times smaller than its target" in speed["acceptance"], "this draft is far smaller than theirs"
    large = write_config(tmp_path / "large", 2, LARGE)
    speed = estimate(capsys, *pair[:2], "-md", large, "-c", "256", "--hardware", "h200", "--tree-size", "16")["speed"]
    assert "times smaller" not in speed["acceptance"]
    assert "built-in pair" in estimate(capsys, *card)["speed"]["acceptance"], "which is itself a Llama"


def test_what_is_known_of_a_card_and_seconds_a_token_are_said_in_words(
    capsys: pytest.CaptureFixture[str], pair: list[str]
) -> None:
    assert run(["estimate", *pair, "--hardware", "7900 XTX"]) == 0
    out = capsys.readouterr().out
    assert "note: torch's ROCm build, which such a card needs, is untried" in out
    assert "seconds a token" not in out
    assert run(["estimate", *pair, "--hardware", "cpu", "--max-cpu-mem", "12GiB", "--policy", "none"]) == 0
    plain = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("plain decoding"))
    assert plain.endswith("seconds a token")
    assert float(plain.split()[2]) == pytest.approx(float(plain.split()[-4]), rel=0.05), "one token a pass"
