"""Forms of drafting over a slow link, and the one that the engine would take of them: it should be near the best.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.draft_choice -m large -md edgespec/demo/draft self none --links 2 0.5

All layers stream, each of which takes its bytes' time. The machine is measured, with a disk as fast as the link, as
`edgespec estimate` finds it while other programs are quiet. In a turn the forms decode the same prompt from the state
of a fresh process, and their steps alternate: other programs slow all alike. "plain" grows no trees, "none" looks up
alone. Rates are the tokens after the prompt over their seconds: medians of the turns. `first` is what is chosen before
any run, `then` what is with what these runs have learned; their shares are those of the fastest form's rate. The last
line is JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
from edgespec.doctor.machine_speed import measure_speed
from edgespec.estimate.choice import DraftTrees, with_best_draft
from edgespec.pair.find import find_pair
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.kept_speed import MachineSpeed, disk_of, keep_speed
from profiles.measure import machine_facts
from scripts.bench.never_slower import PLAIN, PROMPT_TOKENS, race, situated, start_anew
from scripts.situations import GIB, SEED, cut_texts, held_out_halves

CONTEXT_TOKENS = 512


def choose(pair: ModelPair, arguments: argparse.Namespace) -> ModelPair:
    """Return the pair with the draft that the engine would take now."""
    temperature = pair.default_sampling().temperature
    return with_best_draft(pair, DraftTrees.held_to(None), temperature=temperature, **options_of(arguments))


def fastest(measured: list[MachineSpeed]) -> MachineSpeed:
    """Return the fastest of each rate: other programs only make them slower."""
    rates = {
        name: max(getattr(one, name) for one in measured)
        for name in ("memory_bytes_per_s", "half_memory_bytes_per_s", "half_flops_per_s", "float32_flops_per_s")
    }
    kernels = {
        name: (max(one.kernels[name][0] for one in measured), max(one.kernels[name][1] for one in measured))
        for name in measured[0].kernels
    }
    return replace(measured[0], **rates, kernels=kernels)


def options_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options of all engines."""
    return {
        "limits": MemoryLimits(max_resident_layers=0), "context_tokens": CONTEXT_TOKENS, "dtype": arguments.dtype,
        "threads": arguments.threads,
    }  # fmt: skip


def measure(
    target: Path, forms: dict[str, Path], passages: list[str], link: float, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return each form's rates, turn by turn, over a link of so many GiB/s; forms that cannot run are said."""
    rates: dict[str, list[float]] = {}
    options = {**options_of(arguments), "self_check": False, "draft_check": False}
    with situated("link", open_pair(target, None), link * GIB), ExitStack() as stack:
        engines = {
            PLAIN: Engine.from_pair(open_pair(target, Path("none")), tree=TreeSettings(policy="none"), **options)
        }
        stack.enter_context(engines[PLAIN])
        for name, form in forms.items():
            try:
                engines[name] = stack.enter_context(Engine.from_pair(open_pair(target, form), **options))
            except EdgespecError as error:
                print(f"{name} is missing: {error.what.partition(chr(10))[0]}", flush=True)
        for turn in range(arguments.turns):
            prompt = passages[turn % len(passages)]
            for name, found in race(engines, [prompt], arguments.tokens, turn=turn).items():
                rates.setdefault(name, []).append(found)
            for engine in engines.values():  # as the end of a process does
                engine._keep_learned()
                start_anew(engine)
    return rates


def main() -> None:
    """Measure situation by situation, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--drafts", nargs="+", required=True, help="names or folders, and self and none")
    parser.add_argument("--links", type=float, nargs="+", default=[2.0, 0.5], help="GiB/s")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--measures", type=int, default=3, help="of the machine: the fastest of each rate counts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    passages = cut_texts(held_out_halves()[1], count=arguments.turns, tokens=PROMPT_TOKENS, seed=SEED)
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGESPEC_HOME"] = home
        target, drafts = find_pair(arguments.model, arguments.drafts)
        assert target is not None
        assert isinstance(drafts, tuple)
        forms = {path.name: path for path in drafts}
        speed = fastest([measure_speed(torch.device("cpu")) for _ in range(arguments.measures)])
        several = open_pair(target, drafts)
        for link in arguments.links:
            keep_speed(replace(speed, disks={disk_of(several.target.checkpoint.files): link * GIB}))
            first = choose(several, arguments)
            print(f"{link:g} GiB/s: {first.choice}", flush=True)
            rates = {
                name: statistics.median(own) for name, own in measure(target, forms, passages, link, arguments).items()
            }
            then = choose(several, arguments)
            best = max(rates, key=rates.__getitem__)
            row: dict[str, object] = {
                "link": link,
                **{name: round(own, 3) for name, own in rates.items()},
                "best": best,
            }
            for name, pair in (("first", first), ("then", then)):
                taken = "none" if pair.draft is None else pair.draft.named.name
                row |= {name: taken, f"{name}_share": round(rates[taken] / rates[best], 3)}
            print(f"  then {then.choice}\n  {row}", flush=True)
            found.append(row)
    facts = asdict(machine_facts(torch.device("cpu")))
    print(json.dumps({"machine": facts, "speed": asdict(speed), "arguments": vars(arguments), "rows": found}))


if __name__ == "__main__":
    main()
