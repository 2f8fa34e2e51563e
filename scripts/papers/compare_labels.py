"""Decision models fitted on exact chances, and on draws from them: which predicts better on held-out texts.

    python -m scripts.make.demo_fits --out OUT --only stop-hidden
    python -m scripts.make.demo_fits --out OUT --only stop-probabilities
    python -m scripts.papers.compare_labels demo-records/stop-hidden demo-records/stop-probabilities

Verification accepts a child or it does not, and the papers fit on that 0 or 1 (Improving-MCSD, section 3.3). Records
know the chance of it too. Each folder's records are fitted on with both, alike in all else, for several seeds, which
split the prompts and begin the network, and on fewer and fewer prompts. The loss is always that of the exact chances
of held-out prompts, less their own entropy; intervals are Student's, over seeds.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from scipy import stats

from edgespec.grow.stop_model import StopKind
from edgespec.train.fit import HELD_OUT_SHARE, STOP, fit_stop
from edgespec.train.networks import held_out_mask, log_loss
from edgespec.train.record_files import load_records
from edgespec.train.records import Records
from scripts.papers.tables.paper_table import markdown

SHARES = (1.0, 0.3, 0.1)  # of the prompts


def drawn(records: Records, seed: int) -> Records:
    """The records with what verification might have said of each node: 0 or 1."""
    chance = records["acceptance"]
    uniforms = torch.rand(chance.shape, generator=torch.Generator().manual_seed(seed), dtype=chance.dtype)
    return {**records, "acceptance": (uniforms < chance).to(chance.dtype)}


def loss_above_least(kind: StopKind, records: Records, *, seed: int, share: float, is_drawn: bool) -> float:
    """How far a fit's loss on held-out prompts is from that of perfect predictions, in nats."""
    held_out = held_out_mask(records["prompt"], HELD_OUT_SHARE, seed=seed)
    prompts = records["prompt"][~held_out].unique()
    is_used = torch.isin(records["prompt"], prompts[: max(3, round(share * len(prompts)))])
    used = {name: column[is_used] for name, column in (drawn(records, seed) if is_drawn else records).items()}
    inputs = used.pop("inputs")
    # Fitting holds out one prompt at least: the others are held out here
    model, _ = fit_stop(kind, inputs, used, settings=replace(STOP, seed=seed), held_out_share=0.0)
    exact, weight = records["acceptance"][held_out], records["weight"][held_out]
    predicted = model.predict(records["inputs"][held_out].float())
    return log_loss(predicted, exact, weight) - log_loss(exact, exact, weight)


def in_seeds(values: numpy.ndarray) -> str:
    """The mean over seeds [seeds], and its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.4f} ({values.mean() - half:+.4f} to {values.mean() + half:+.4f})"


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="folders of records, by the kind that their names end in")
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = [["model reads", "prompts", "exact chances", "drawn 0 or 1", "drawn less exact"]]
    for folder in arguments.records:
        records, _ = load_records(folder)
        kind: StopKind = "hidden" if folder.name.endswith("hidden") else "probabilities"
        num_prompts = round((1 - HELD_OUT_SHARE) * records["prompt"].unique().numel())
        for share in SHARES:
            exact, of_draws = (
                numpy.array(
                    [
                        loss_above_least(kind, records, seed=seed, share=share, is_drawn=is_drawn)
                        for seed in range(arguments.seeds)
                    ]
                )
                for is_drawn in (False, True)
            )
            losses = [in_seeds(values) for values in (exact, of_draws, of_draws - exact)]
            table.append([kind, str(round(share * num_prompts)), *losses])
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
