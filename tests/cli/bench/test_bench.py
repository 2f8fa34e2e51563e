"""`edgespec bench`: plain decoding and trees in turn, and whether their texts are the same."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.config import SamplingSettings
from edgespec.decode.lossless import Difference, Verdict, judge
from edgespec.decode.sequence import TextSettings
from edgespec.doctor.benchmark import compare_modes, continue_one
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.sampling.cut_margins import cut_margins
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import DEFAULT_NAME, TextNoise, text_key
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextOptions
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.step import StepResult
from edgespec.verify import Acceptance, Verification
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import walk
from tests.cli.conftest import Outcome, RunCli

ROWS = '{"prompt": "def main("}\n{"prompt": "import os"}\n'
GREEDY = SamplingSettings()
PROMPT = list(b"def main(")
WARM = SamplingSettings(temperature=0.8)
SAMPLED = TreeSettings(policy="dyspec", size=6, depth=4)
ADAPTIVE = TreeSettings(policy="adaptive", size=6, depth=4)


@pytest.fixture
def bench(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> Any:
    """Runs `edgespec bench` on the small pair."""

    def call(*arguments: str) -> Outcome:
        pair = [str(pair_folders[0]), "-md", str(pair_folders[1]), "--prompts", "p.jsonl", "-n", "6"]
        return run_cli([*pair, "--tree-size", "5", *arguments], files={"p.jsonl": ROWS}, command="bench")

    return call


@pytest.fixture
def engine(pair_folders: tuple[Path, Path]) -> Iterator[Engine]:
    """The small pair with small trees."""
    with Engine.from_pretrained(pair_folders[0], draft=pair_folders[1], tree=ADAPTIVE, context_tokens=64) as found:
        yield found


def text_of(engine: Engine, tree: TreeSettings, sampling: SamplingSettings = GREEDY) -> list[int]:
    return list(
        continue_one(engine, PROMPT, tree, options={"sampling": sampling, "max_new_tokens": 8, "seed": 0}).token_ids
    )


def judged(
    engine: Engine,
    text: list[int],
    plain: list[int],
    sampling: SamplingSettings = GREEDY,
    dtype: torch.dtype = torch.float32,
) -> Verdict:
    noise = TextNoise(seed=0, key=text_key(DEFAULT_NAME), vocab=engine.target_model.vocab, device=torch.device("cpu"))
    settings = TextSettings(sampling=sampling, max_new_tokens=8)
    return judge(engine.target_model, PROMPT, text, plain, settings, noise, dtype=dtype)


def test_every_form_has_a_row_a_mode(bench: Any) -> None:
    _, _, headings, _, *rows = bench("-r", "2", "--temp", "0").ended().out.splitlines()
    assert headings.startswith("| mode")
    assert [row.split()[1] for row in rows] == ["plain", "tree"]
    whole = json.loads(bench("-r", "1", "--json").out)
    assert whole["results"][1]["policy"] == "adaptive"
    lines = [json.loads(line) for line in bench("-r", "1", "-o", "jsonl").out.splitlines()]
    cells = list(csv.DictReader(io.StringIO(bench("-r", "1", "-o", "csv").out)))
    for found in (whole["results"], lines, cells):
        assert [row["mode"] for row in found] == ["plain", "tree"]
        assert [int(row["nodes"]) for row in found] == [0, 5]
        assert all(float(row["tokens_per_s"]) > 0 for row in found)
        assert float(found[0]["tokens_per_pass"]) == 1
        assert float(found[1]["tokens_per_pass"]) >= 1
    assert whole["model"] == lines[0]["model"] == cells[0]["model"]


def test_other_policies_are_compared_in_the_same_steps(
    run_cli: RunCli, bench: Any, pair_folders: tuple[Path, Path]
) -> None:
    pair = [str(pair_folders[0]), "-md", str(pair_folders[1]), "--prompts", "p.jsonl", "-n", "6", "-r", "1"]
    found = run_cli([*pair, "--json", "--policies", "opt-tree, chain"], files={"p.jsonl": ROWS}, command="bench")
    assert found.code == 0, found.err
    rows = json.loads(found.out)["results"]
    assert [(row["mode"], row["policy"]) for row in rows] == [
        ("plain", "none"), ("tree", "adaptive"), ("opt-tree", "opt-tree"), ("chain", "chain")
    ]  # fmt: skip
    assert [row["nodes"] for row in rows[2:]] == [64, 4]
    assert all(row["tokens_per_s"] > 0 and row["lossless"] for row in rows)
    too_large = bench("--policies", "opt-tree")
    assert (too_large.code, too_large.out) == (2, ""), "memory is planned for the engine's own trees"
    assert "opt-tree trees of 5 nodes need more memory" in too_large.err
    unknown = bench("--policies", "oak")
    assert (unknown.code, unknown.out) == (2, "")
    assert "oak" in unknown.err
    assert "--policies does not go with --check" in bench("--check", "--policies", "chain").err


def test_modes_take_turns_in_beginning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def remember(engine: Engine, ids: list[int], tree: TreeSettings | None, **options: Any) -> Any:
        order.append("plain" if tree is not None and tree.policy == "none" else "tree")
        return continue_one(engine, ids, tree, **options)

    monkeypatch.setattr("edgespec.doctor.benchmark.continue_one", remember)
    options: TextOptions = {"sampling": GREEDY, "max_new_tokens": 3, "seed": 0}
    rounds = compare_modes(engine, [PROMPT, PROMPT], options=options, repeats=2)
    assert order[2:] == ["plain", "tree", "tree", "plain", "tree", "plain", "plain", "tree"]
    assert {mode: len(own) for mode, own in rounds.items()} == {"plain": 2, "tree": 2}
    assert all(found.num_tokens == 4 for own in rounds.values() for found in own)


@pytest.mark.parametrize("drawn", [[], ["--temp", "0"], ["--temp", "0.8", "--top-p", "0.95", "--seed", "7"]])
def test_check_passes_where_texts_are_the_targets_own(drawn: list[str], bench: Any) -> None:
    outcome = bench("--check", *drawn).ended()
    temperature = drawn[1] if drawn else "0"  # the pair's own
    assert outcome.out.startswith(f"lossless: 2 of 2 texts at temperature {temperature} equal plain decoding's")
    found = json.loads(bench("--check", "--json", *drawn).out)["check"]
    assert found["lossless"] is True
    assert [text["num_tokens"] for text in found["texts"]] == [6, 6]


@pytest.mark.parametrize(("draw", "policy"), [("sampled", "dyspec"), ("chosen", "opt-tree")])
def test_check_compares_greedy_texts_of_trees_whose_draws_are_their_own(draw: str, policy: str, bench: Any) -> None:
    outcome = bench("--check", "--temp", "0.8", "--policy", policy, *(["--draw", draw] if draw == "chosen" else []))
    assert outcome.code == 0, outcome.err
    assert f"texts of {draw} children cannot be compared at temperature 0.8" in outcome.err
    assert outcome.out.startswith("lossless: 2 of 2 texts at temperature 0 equal plain decoding's")


def test_check_fails_where_a_verifier_accepts_what_it_must_not(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first child of every node is taken, whatever the target says."""

    def accept_first(tree: Any, rows: Any, generator: torch.Generator) -> Verification:
        path: list[int] = []
        node = 0
        while (children := (tree.parents == node).nonzero().flatten().tolist()) and len(path) < 3:
            node = children[0]
            path.append(node)
        yield node
        return Acceptance(path=tuple(path), next_token=rows.best(node))

    monkeypatch.setattr("edgespec.decode.start.verifier", lambda _sampling, _draw, _noise: accept_first)
    outcome = bench("--check", "--temp", "0").ended(1)
    assert "NOT LOSSLESS" in outcome.out
    assert re.search(r"a DIFFERENCE \(logits [\d.e+-]+ apart", outcome.out)


def test_check_fails_where_a_tree_is_verified_with_the_noise_of_another_position(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the root the noise is that of one position further on; plain decoding has roots alone, and stays right."""

    def one_too_far(tree: TokenTree, rows: TargetRows, noise: TextNoise) -> Verification:
        return walk(tree, lambda node, depth: noise.draw(rows.probs(node), depth + 1 + (depth > 0)))

    monkeypatch.setattr("edgespec.verify.rules.verify_coupled", one_too_far)
    outcome = bench("--check", "--temp", "0.8", "--tree-depth", "4").ended(1)
    assert re.search(r"leaves plain decoding's at .* a DIFFERENCE \(logits [\d.e+-]+ apart", outcome.out)


def test_a_text_that_equals_a_wrong_plain_text_is_found_by_reading_it_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of decoding draw with the noise of the position before."""
    right = TextNoise.draw
    monkeypatch.setattr(TextNoise, "draw", lambda self, p, depth: right(self, p, depth - 1))
    wrong = text_of(engine, ADAPTIVE, WARM)
    monkeypatch.setattr(TextNoise, "draw", right)
    found = judged(engine, wrong, wrong, WARM)
    assert found.from_plain is None
    assert not found.is_lossless


def test_an_engine_verifies_itself_and_keeps_its_trees(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = engine.tree
    verdicts = engine.verify_lossless(["def main(", PROMPT], max_new_tokens=6)
    assert [(verdict.is_lossless, verdict.from_plain) for verdict in verdicts] == [(True, None)] * 2
    assert engine.tree == tree
    take = TextHandle.take

    def spoil(self: TextHandle, step: StepResult) -> None:
        tokens, place = step.tokens, 3 - len(self.added)
        if engine.tree.policy != "none" and 0 <= place < len(tokens):
            step = replace(step, tokens=(*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]))
        take(self, step)

    monkeypatch.setattr(TextHandle, "take", spoil)
    (verdict,) = engine.verify_lossless([PROMPT], max_new_tokens=6)
    assert (verdict.from_plain.index, verdict.is_lossless) == (3, False)
    with pytest.raises(EdgespecError):
        engine.verify_lossless(["x" * 10_000])
    assert engine.tree == tree


def test_coupled_trees_are_verified_as_they_draw_and_sampled_ones_greedily(engine: Engine) -> None:
    (coupled,) = engine.verify_lossless([PROMPT], max_new_tokens=6, temperature=0.8, name="row 3")
    engine.use_tree(SAMPLED)
    (sampled,) = engine.verify_lossless([PROMPT], max_new_tokens=6, temperature=0.8)
    assert (coupled.temperature, coupled.is_lossless, coupled.from_plain) == (0.8, True, None)
    assert (sampled.temperature, sampled.is_lossless) == (0, True)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, SamplingSettings(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)])
def test_a_text_is_judged_by_its_tokens_and_near_ties_are_told_apart(
    sampling: SamplingSettings, engine: Engine
) -> None:
    ours, plain = text_of(engine, ADAPTIVE, sampling), text_of(engine, ADAPTIVE.plain(), sampling)
    same = judged(engine, ours, plain, sampling)
    assert (same.from_plain, same.from_target, same.is_lossless) == (None, (), True)
    wrong = [*plain[:5], (plain[5] + 1) % 257, *plain[6:]]
    found = judged(engine, wrong, plain, sampling)
    assert (found.from_plain.index, found.from_plain.expected) == (5, plain[5])
    assert found.from_target[0] == found.from_plain
    assert not found.is_lossless
    rounded = judged(engine, wrong, plain, sampling, torch.bfloat16).from_plain
    assert rounded.allowed == pytest.approx(300 * found.from_plain.allowed)


@pytest.mark.parametrize(
    ("sampling", "margin"),
    [
        (SamplingSettings(temperature=0.5, top_k=2), 0.01),
        (SamplingSettings(temperature=0.5, min_p=math.exp(-1.01 / 0.5)), 0.01),
        (SamplingSettings(temperature=0.5), math.inf),
    ],
)
def test_a_token_at_the_edge_of_what_is_cut_off_is_a_near_tie(sampling: SamplingSettings, margin: float) -> None:
    """Logits 1, 0.01, 0 and -1: the second is kept by 0.01, and the third is as far from being kept, or is kept."""
    logits = torch.tensor([1.0, 0.01, 0.0, -1.0], dtype=torch.float64)
    margins = cut_margins(logits, sampling)
    kept = to_probs(logits[None], sampling)[0] > 0
    assert torch.equal(margins > 0, kept)
    assert float(margins.abs()[2]) == pytest.approx(margin)


def test_a_token_at_the_edge_of_the_nucleus_is_as_near_as_the_mass_before_it() -> None:
    logits = torch.tensor([0.6, 0.35, 0.05], dtype=torch.float64).log()
    for top_p, is_kept in ((0.9501, True), (0.9499, False)):
        margin = float(cut_margins(logits, SamplingSettings(temperature=1.0, top_p=top_p))[2])
        assert (margin > 0) == is_kept
        assert abs(margin) == pytest.approx(0.0001 / (0.95 * 0.05), rel=0.01)


def test_near_ties_lose_nothing() -> None:
    def verdict(gap: float) -> Verdict:
        difference = Difference(index=3, token=1, expected=2, gap=gap, allowed=0.01)
        return Verdict(temperature=0, num_tokens=9, from_plain=difference, from_target=(difference,))

    assert verdict(0.009).is_lossless
    assert not verdict(0.011).is_lossless


def test_long_texts_are_read_again_in_pieces(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(engine, ADAPTIVE)
    monkeypatch.setattr("edgespec.decode.lossless.READ_ROWS", 3)
    assert judged(engine, text, text).from_target == ()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policy", "none"], "nothing to compare"),
        (["--check", "-r", "2"], "--repeats does not go with --check"),
        (["--check", "-o", "csv"], "-o csv"),
        (["-n", "500"], "lower -n"),
        (["-r", "0"], "0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], named: str, bench: Any) -> None:
    arguments = arguments if "--policy" not in arguments else [*arguments, "--tree-size", "auto"]
    outcome = bench(*arguments).ended(2)
    assert named in outcome.err or "not used by --policy none" in outcome.err


def test_a_target_without_a_draft_is_refused(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    outcome = run_cli([str(pair_folders[0])], command="bench")
    assert (outcome.code, "no draft" in outcome.err) == (2, True)


def test_prompts_are_limited_and_the_built_in_ones_are_the_default(run_cli: RunCli) -> None:
    options = ["--limit", "1", "-r", "1", "-n", "4", "--tree-size", "4", "--json"]
    assert json.loads(run_cli(options, command="bench").ended().out)["results"][0]["prompts"] == 1
