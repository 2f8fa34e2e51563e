"""Heads and the built-in draft at equal cost: exact tokens a pass, and the seconds that growing a tree takes."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from edgespec import Engine, SamplingSettings
from edgespec.pair.pair import open_pair
from scripts.make.demo_fits import FITS
from scripts.papers.compare_policies import contexts
from scripts.papers.heads.heads import DRAFT, DRAFT_FOLDER, TARGET, acceptance_file, edgespec
from scripts.papers.heads.tokens import CONTEXT_TOKENS, TEMPERATURES, Tokens, trees_of
from scripts.papers.tables.paper_table import markdown, ratio_in_words
from scripts.situations import cut_texts, held_out_halves, write_texts

PASSES_S = (0.01, 0.03, 0.1, 0.3, 1.0)  # of a target
TIMED_CONTEXTS = 12
NEW_TOKENS = 24
Seconds = dict[str, float]  # 'tree, T temperature' -> of a step without its pass


def fit_acceptance(heads: Mapping[str, Path]) -> None:
    """Measured acceptance of each head, from as many prompts of the same modules as that of the built-in draft."""
    fit = FITS["acceptance"]
    texts = cut_texts(held_out_halves()[0], count=fit.prompts, tokens=CONTEXT_TOKENS, seed=7)
    with tempfile.TemporaryDirectory() as work:
        prompts = Path(work) / "prompts.jsonl"
        write_texts(prompts, texts)
        for folder in heads.values():
            if not acceptance_file(folder).exists():
                edgespec(
                    "train", "acceptance", "-m", TARGET, "-md", folder, "--prompts", prompts, "-n", fit.new_tokens,
                    "-o", acceptance_file(folder), "--records", Path(work) / folder.name,
                )  # fmt: skip


def steps_s(drafts: Mapping[str, Path], seed: int) -> dict[str, Seconds]:
    """Median seconds of a step's growth and verification, drafts in turn, one thread."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in drafts}
    for tree_name in trees_of(DRAFT_FOLDER):
        engines = {
            name: Engine.from_pair(open_pair(TARGET, folder), tree=trees_of(folder)[tree_name], self_check=False)
            for name, folder in drafts.items()
        }
        tokenizer = next(iter(engines.values())).pair.tokenizer
        for ids in contexts(tokenizer, None, count=TIMED_CONTEXTS, tokens=CONTEXT_TOKENS, seed=seed):
            for temperature in TEMPERATURES:
                sampling = SamplingSettings(temperature=temperature)
                for name, engine in engines.items():
                    chunks = engine.stream(ids, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=1)
                    steps = [chunk.step for chunk in chunks if chunk.step and not chunk.step.is_prefill]
                    cell = found[name].setdefault(f"{tree_name}, T {temperature:g}", [])
                    cell += [step.grow_s + step.rest_s for step in steps if step.num_drafted]
        for engine in engines.values():
            engine.close()
    return {name: {cell: statistics.median(of) for cell, of in cells.items()} for name, cells in found.items()}


def print_equal_cost(found: Mapping[str, Tokens], drafts: Mapping[str, Path], arguments: argparse.Namespace) -> None:
    """Tokens a second over plain decoding's, where a target's pass takes so long; then over the built-in draft's."""
    seconds = steps_s(drafts, arguments.context_seed)
    heading = ["speed over plain decoding's", "tokens a pass", "a step without its pass"]
    print("\n".join(markdown([[*heading, *(f"passes of {s:g} s" for s in PASSES_S)], *speed_rows(found, seconds)])))


def speed_rows(found: Mapping[str, Tokens], seconds: Mapping[str, Seconds]) -> list[list[str]]:
    """A row a tree, temperature and draft; behind a head's speed is the ratio to the draft's, over contexts."""
    rows = []
    for cell in found[DRAFT]:
        of_draft = torch.tensor(found[DRAFT][cell]).double()  # [contexts]
        for name in found:
            tokens = torch.tensor(found[name][cell]).double()
            words = []
            for pass_s in PASSES_S:
                step_s, draft_step_s = (pass_s + seconds[each][cell] for each in (name, DRAFT))
                speed = f"{tokens.mean() * pass_s / step_s:.2f}"
                if name != DRAFT:
                    speed += f", the draft's x {ratio_in_words(tokens / step_s, of_draft / draft_step_s)}"
                words.append(speed)
            rows.append([f"{name}: {cell}", f"{tokens.mean():.2f}", f"{seconds[name][cell] * 1e3:.1f} ms", *words])
    return rows
