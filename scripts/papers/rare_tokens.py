"""Does a tree ever yield a token that the target could not have drawn? Whole texts of the built-in pair, read again.

    python -m scripts.papers.rare_tokens

Every policy of sampled children continues held-out modules of the standard library at several temperatures, in float32
and with no truncation. The target then reads each text alone, and says what it gave each token. A right policy yields
a token of p below 1e-12 once in 10^12 tokens. Prints a line a policy and temperature, with the smallest p, and one
JSON line; exits 1 where a token has less than --floor.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.decode.lossless import logits_of
from edgespec.pair.pair import open_pair
from edgespec.sampling.distribution import to_probs
from scripts.papers.compare_policies import contexts

CONTEXT_TOKENS = 192
PRESET = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]


def sampled_trees(folder: Path) -> dict[str, TreeSettings]:
    """Every policy of sampled children; the preset tree's file lies in the folder."""
    preset = folder / "preset.json"
    preset.write_text(json.dumps(PRESET), encoding="utf-8")
    return {
        "dyspec": TreeSettings(policy="dyspec", size=32),
        "sequoia": TreeSettings(policy="sequoia", draw="sampled", size=32),
        "specinfer": TreeSettings(policy="specinfer", branching=(4, 2, 2, 1)),
        "mcsd": TreeSettings(policy="mcsd", fork=(6, 4)),
        "chain": TreeSettings(policy="chain", draw="sampled", draft_tokens=4),
        "static": TreeSettings(policy="static", draw="sampled", tree_file=preset),
    }


@dataclass(frozen=True, slots=True)
class Rarest:
    """The smallest p of a token among all that were yielded."""

    p: float
    token: str
    num_tokens: int


def rarest(tree: TreeSettings, temperature: float, *, num_tokens: int, new_tokens: int, seed: int) -> Rarest:
    """Of so many tokens, in texts of `new_tokens`."""
    sampling = SamplingSettings(temperature=temperature)
    found, count = Rarest(1.0, "", 0), 0
    with Engine.from_pair(open_pair(None, None), tree=tree, dtype="float32", self_check=False) as engine:
        tokenizer = engine.pair.tokenizer
        texts = contexts(tokenizer, None, count=-(-num_tokens // new_tokens), tokens=CONTEXT_TOKENS, seed=seed)
        for index, ids in enumerate(texts):
            new = engine.generate(ids, max_new_tokens=new_tokens, sampling=sampling, seed=seed + index).token_ids
            p = chances(engine, ids, new, sampling)
            count += len(new)
            least = min(range(len(new)), key=p.__getitem__)
            if p[least] < found.p:
                found = Rarest(p[least], tokenizer.decode([new[least]]), 0)
    return Rarest(found.p, found.token, count)


def chances(engine: Engine, ids: list[int], new: tuple[int, ...], sampling: SamplingSettings) -> list[float]:
    """What the target gives each of the `new` tokens behind `ids`."""
    logits = logits_of(engine.target_model, ids, new).double()  # [new, vocab]
    p: list[float] = to_probs(logits, sampling).gather(1, torch.tensor(new)[:, None])[:, 0].tolist()
    return p


def _row(job: tuple[str, TreeSettings, float, int, int, int]) -> dict[str, Any]:
    name, tree, temperature, num_tokens, new_tokens, seed = job
    torch.set_num_threads(1)
    found = rarest(tree, temperature, num_tokens=num_tokens, new_tokens=new_tokens, seed=seed)
    return {"policy": name, "temperature": temperature, "tokens": found.num_tokens, "least_p": found.p,
            "token": found.token}  # fmt: skip


def main() -> int:
    """Every policy at every temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000, help="of a policy and temperature")
    parser.add_argument("-n", "--new-tokens", type=int, default=50, help="of a text")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.2, 0.6, 1.0])
    parser.add_argument("--only", default="", help="policies whose name contains this")
    parser.add_argument("--floor", type=float, default=1e-12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(arguments.processes) as pool,
    ):
        jobs = [
            (name, tree, temperature, arguments.tokens, arguments.new_tokens, arguments.seed)
            for name, tree in sampled_trees(Path(folder)).items()
            for temperature in arguments.temps
            if arguments.only in name
        ]
        for row in pool.imap(_row, jobs):
            rows.append(row)
            print(f"{row['policy']:18} temperature {row['temperature']:g}: {row['tokens']} tokens, least p "
                  f"{row['least_p']:.1e} {row['token']!r}{'' if row['least_p'] >= arguments.floor else '  FAILED'}",
                  flush=True)  # fmt: skip
    print(json.dumps({"floor": arguments.floor, "seed": arguments.seed, "rows": rows}))
    return 0 if all(row["least_p"] >= arguments.floor for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
