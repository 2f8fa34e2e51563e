"""What losses the check of a published draft sees, and how often it sees one where there is none.

    python -m scripts.check.draft_power DRAFT... --texts 40

Each DRAFT is a published draft of the built-in target, or the folder of a target whose own layer drafts. The check
reads texts of 256 tokens that are put together as its own are: of six files, here of random places of held-out ones;
where the first one seems better in another reading, three further ones. In each group of them a fault of
`scripts.check.draft_faults` is caught where the check finds another reading or names positions; without a fault that
is a false alarm. Prints a line a draft and fault: the tokens that it costs on average at both depths (the sums of
min(p, q)), and in how many of the groups it was caught; then the share of what was caught by cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec import Engine
from edgespec.draft.agreement import CHECK_TEXTS, CHECK_TOKENS, compare_readings
from edgespec.draft.paired_tokens import Shared
from edgespec.draft.readings import AS_STATED
from edgespec.errors import EdgespecError
from edgespec.hub.names import MTP
from edgespec.pair.drafts import read_form
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from scripts.check.draft_faults import IN_FILES, IN_READER, shared_of_readings, write_copy
from scripts.papers.compare_policies import contexts
from scripts.papers.tables.paper_table import markdown

FILES = 6  # of a text
COSTS = (0.0, 0.003, 0.01, 0.02, 0.05, 0.1, 1.0)  # tokens, between which faults are counted together


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the check made of one text."""

    shared: Shared  # as the folder states the draft, or as the faulty reader reads it
    is_alarm: bool


def texts_of(tokenizer: Any, *, count: int, seed: int) -> list[Tensor]:
    """Texts that are put together of six random places of held-out files."""
    share = -(-CHECK_TOKENS // FILES)
    parts = contexts(tokenizer, None, count=FILES * count, tokens=share, seed=seed)
    groups = [parts[start : start + FILES] for start in range(0, len(parts), FILES)]
    return [torch.tensor([token for part in group for token in part][:CHECK_TOKENS]) for group in groups]


def seen(target: Path, draft: Path, fault: Any, *, count: int, seed: int) -> list[Seen]:
    """What the check makes of each text, with a fault of the reader."""
    found = []
    pair = open_pair(target, draft)
    with Engine.from_pair(pair, self_check=False, draft_check=False) as engine:
        assert engine.draft_model is not None
        texts = texts_of(pair.tokenizer, count=CHECK_TEXTS * count, seed=seed)
        for start in range(0, len(texts), CHECK_TEXTS):
            with shared_of_readings() as of_readings, fault():
                compared = compare_readings(
                    engine.target_model, engine.draft_model, *texts[start : start + CHECK_TEXTS]
                )
            is_alarm = compared.reading != AS_STATED or compared.misplaced is not None
            found.append(Seen(shared=of_readings[0], is_alarm=is_alarm))
    return found


def measured(target: Path, draft: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    """Yield each fault, the tokens that it costs, and the number of texts in which it was caught."""
    is_own = draft == MTP
    kind = "mtp" if is_own else read_form(draft).kind
    source = target if is_own else draft
    with tempfile.TemporaryDirectory() as work:
        faults: list[tuple[str, Path, Any]] = []
        for number, (name, plant) in enumerate(IN_FILES[kind].items()):
            faults.append((name, write_copy(source, Path(work) / str(number), plant), nullcontext))
        faults += [(name, faults[0][1], fault) for name, fault in IN_READER[kind].items()]
        without: list[Seen] = []
        for name, copy, fault in faults:
            pair = (copy, draft) if is_own else (target, copy)
            try:
                found = seen(*pair, fault, count=arguments.texts, seed=arguments.seed)
            except EdgespecError as error:
                print(f"{name}: refused before the check ({error.code})", file=sys.stderr)
                continue
            without = without or found
            costs = [
                float((ours.shared.accepted - theirs.shared.accepted).mean())
                for ours, theirs in zip(without, found, strict=True)
            ]
            yield name, statistics.mean(costs), sum(one.is_alarm for one in found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", type=Path, nargs="+")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[str, str, float, int]] = []
    for draft in arguments.drafts:
        is_target = (draft / "tokenizer.json").exists()
        pair = (draft, MTP) if is_target else (DEMO_FOLDER / "target", draft)
        for name, cost, caught in measured(*pair, arguments):
            rows.append((str(draft), name, cost, caught))
            print(rows[-1], file=sys.stderr, flush=True)
    count: int = arguments.texts
    table = [["draft", "fault", "tokens that it costs, of two depths", "caught"]]
    table += [[draft, name, f"{cost:.4f}", f"{caught} of {count}"] for draft, name, cost, caught in rows]
    print("\n".join(markdown(table)))
    healthy = [caught for _, name, _, caught in rows if name == "none"]
    print(f"without a fault: {sum(healthy)} of {count * len(healthy)} texts raise a false alarm")
    for least, most in pairwise(COSTS):
        of = [caught for _, name, cost, caught in rows if name != "none" and least <= max(cost, 0.0) < most]
        if of:
            print(f"faults that cost {least:g} to {most:g} tokens: {sum(of)} of {count * len(of)} caught")
    print(json.dumps([dict(zip(("draft", "fault", "cost", "caught"), row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
