"""`edgespec bench`: plain decoding and trees in turn, and whether their greedy texts are the same."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.config import SamplingSettings
from edgespec.decode.lossless import Difference, Verdict, judge
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.tree.settings import TreeSettings
from edgespec.tune.benchmark import compare_modes, continue_one
from tests.cli.conftest import Outcome, RunCli

ROWS = '{"prompt": "def main("}\n{"prompt": "import os"}\n'
GREEDY = SamplingSettings()
PROMPT = list(b"def main(")
TREE = TreeSettings(policy="dyspec", size=6, depth=4)


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
    with Engine.from_pretrained(pair_folders[0], draft=pair_folders[1], tree=TREE, context_tokens=64) as found:
        yield found


def greedy_text(engine: Engine, tree: TreeSettings) -> list[int]:
    return list(continue_one(engine, PROMPT, tree, sampling=GREEDY, max_new_tokens=8, seed=0).token_ids)


def test_every_form_has_a_row_a_mode(bench: Any) -> None:
    table = bench("-r", "2", "--temp", "0")
    assert table.code == 0, table.err
    _, _, headings, _, *rows = table.out.splitlines()
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


def test_modes_take_turns_in_beginning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def remember(engine: Engine, ids: list[int], tree: TreeSettings | None, **options: Any) -> Any:
        order.append("plain" if tree is not None and tree.policy == "none" else "tree")
        return continue_one(engine, ids, tree, **options)

    monkeypatch.setattr("edgespec.tune.benchmark.continue_one", remember)
    rounds = compare_modes(engine, [PROMPT, PROMPT], sampling=GREEDY, max_new_tokens=3, repeats=2, seed=0)
    assert order[2:] == ["plain", "tree", "tree", "plain", "tree", "plain", "plain", "tree"]
    assert {mode: len(own) for mode, own in rounds.items()} == {"plain": 2, "tree": 2}
    assert all(found.num_tokens == 4 for own in rounds.values() for found in own)


def test_check_passes_where_texts_are_the_targets_own(bench: Any) -> None:
    outcome = bench("--check")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("lossless: 2 of 2 greedy texts equal plain decoding's")
    found = json.loads(bench("--check", "--json").out)["check"]
    assert found["lossless"] is True
    assert [text["num_tokens"] for text in found["texts"]] == [6, 6]


def test_check_fails_where_a_verifier_accepts_what_it_must_not(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first child of every node is taken, whatever the target says."""
    from edgespec.verify import Acceptance

    def accept_first(tree: Any, rows: Any, generator: torch.Generator) -> Acceptance:
        path: list[int] = []
        node = 0
        while (children := (tree.parents == node).nonzero().flatten().tolist()) and len(path) < 3:
            node = children[0]
            path.append(node)
        return Acceptance(path=tuple(path), next_token=rows.best(node))

    monkeypatch.setattr("edgespec.decode.choose.verifier", lambda _sampling, _draw: accept_first)
    outcome = bench("--check")
    assert outcome.code == 1
    assert "NOT LOSSLESS" in outcome.out
    assert re.search(r"a DIFFERENCE \(logits [\d.e+-]+ apart", outcome.out)


def test_an_engine_verifies_itself_and_keeps_its_trees(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = engine.tree
    verdicts = engine.verify_lossless(["def main(", PROMPT], max_new_tokens=6)
    assert [(verdict.is_lossless, verdict.from_plain) for verdict in verdicts] == [(True, None)] * 2
    assert engine.tree == tree
    generate = Engine.generate

    def spoil(self: Engine, ids: list[int], **options: Any) -> Any:
        result = generate(self, ids, **options)
        if self.tree.policy == "none":
            return result
        return replace(result, token_ids=(*result.token_ids[:3], result.token_ids[3] ^ 1, *result.token_ids[4:]))

    monkeypatch.setattr(Engine, "generate", spoil)
    (verdict,) = engine.verify_lossless([PROMPT], max_new_tokens=6)
    assert verdict.from_plain is not None
    assert (verdict.from_plain.index, verdict.is_lossless) == (3, False)
    with pytest.raises(EdgespecError):
        engine.verify_lossless(["x" * 10_000])
    assert engine.tree == tree


def test_a_text_is_judged_by_its_tokens_and_near_ties_are_told_apart(engine: Engine) -> None:
    ours, plain = greedy_text(engine, TREE), greedy_text(engine, TREE.plain())
    model = engine.target_model
    same = judge(model, PROMPT, ours, plain, dtype=torch.float32)
    assert (same.from_plain, same.from_argmax, same.is_lossless) == (None, (), True)
    wrong = [*plain[:5], (plain[5] + 1) % 257, *plain[6:]]
    found = judge(model, PROMPT, wrong, plain, dtype=torch.float32)
    assert found.from_plain is not None
    assert (found.from_plain.index, found.from_plain.expected) == (5, plain[5])
    assert found.from_argmax[0] == found.from_plain
    assert not found.is_lossless
    rounded = judge(model, PROMPT, wrong, plain, dtype=torch.bfloat16).from_plain
    assert rounded is not None
    assert rounded.allowed == pytest.approx(300 * found.from_plain.allowed)


def test_near_ties_lose_nothing() -> None:
    def verdict(gap: float) -> Verdict:
        difference = Difference(index=3, token=1, expected=2, gap=gap, allowed=0.01)
        return Verdict(num_tokens=9, from_plain=difference, from_argmax=(difference,))

    assert verdict(0.009).is_lossless
    assert not verdict(0.011).is_lossless


def test_long_texts_are_read_again_in_pieces(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = greedy_text(engine, TREE)
    monkeypatch.setattr("edgespec.decode.lossless.READ_ROWS", 3)
    assert judge(engine.target_model, PROMPT, text, text, dtype=torch.float32).from_argmax == ()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policy", "none"], "nothing to compare"),
        (["--check", "--temp", "0.5"], "--temperature does not go with --check"),
        (["--check", "-r", "2"], "--repeats does not go with --check"),
        (["--check", "-o", "csv"], "-o csv"),
        (["-n", "500"], "lower -n"),
        (["-r", "0"], "0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], named: str, bench: Any) -> None:
    arguments = arguments if "--policy" not in arguments else [*arguments, "--tree-size", "auto"]
    outcome = bench(*arguments)
    assert outcome.code == 2
    assert named in outcome.err or "not used by --policy none" in outcome.err


def test_a_target_without_a_draft_is_refused(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    outcome = run_cli([str(pair_folders[0])], command="bench")
    assert (outcome.code, "no draft" in outcome.err) == (2, True)


def test_prompts_are_limited_and_the_built_in_ones_are_the_default(run_cli: RunCli) -> None:
    options = ["--limit", "1", "-r", "1", "-n", "4", "--tree-size", "4", "--json"]
    outcome = run_cli(options, command="bench")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["results"][0]["prompts"] == 1
