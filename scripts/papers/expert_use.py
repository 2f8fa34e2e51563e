"""Are the experts that earlier texts asked for most those that later texts ask for?

    python -m scripts.make.inflate_experts moe
    python -m scripts.papers.expert_use moe

A mixture decodes half of the prompts plainly, and the use of its experts is counted as `edgespec profile` keeps it;
then the other half. Prints, for several shares of all experts that locked memory may hold, how many of the other half's
experts wait there: the first of all layers, those that were used most, and those that the other half itself uses most,
which is the best that a fixed choice can do.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.config import MAX_SEED
from offload.experts.expert_use import ExpertUse, most_used
from scripts.situations import read_texts, write_prompts

SHARES = (0.1, 0.25, 0.5, 0.75)


def use_of(model: Path, prompts: list[str], *, new_tokens: int, first_seed: int) -> ExpertUse:
    """The use of a mixture's experts over texts."""
    on_demand = MemoryLimits(max_resident_layers=0)
    with Engine.from_pretrained(model, tree=TreeSettings(policy="none"), limits=on_demand, self_check=False) as engine:
        for number, prompt in enumerate(prompts):
            engine.generate(prompt, max_new_tokens=new_tokens, seed=(first_seed + number) % MAX_SEED,
                            sampling=SamplingSettings(temperature=0.8))  # fmt: skip
        use = engine.expert_use
    if use is None:
        raise SystemExit(f"'{model}' has no experts that can move by themselves")
    return use


def covered(use: ExpertUse, chosen: list[list[int]]) -> float:
    """The share of what was asked for that is among those chosen."""
    asked = sum(map(sum, use))
    return sum(use[layer][expert] for layer, experts in enumerate(chosen) for expert in experts) / asked


def main() -> None:
    """Count the use in two halves, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a mixture of scripts.make.inflate_experts")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = read_texts(write_prompts(Path(folder), arguments.num_prompts))
    half = len(texts) // 2
    earlier, later = (
        use_of(arguments.model, some, new_tokens=arguments.new_tokens, first_seed=seed)
        for seed, some in ((0, texts[:half]), (1000, texts[half:]))
    )
    numbers = list(map(len, later))
    print("share locked   first ones   most used before   most used then")
    for share in SHARES:
        count = round(share * sum(numbers))
        found = [covered(later, most_used(numbers, use, count)) for use in (None, earlier, later)]
        print(f"{share:12.0%} {found[0]:12.0%} {found[1]:18.0%} {found[2]:16.0%}")


if __name__ == "__main__":
    main()
