"""How far the features of different steps are apart (CORAL, table 6), and how well each is accepted (figure 6).

On held-out texts, at the positions that have features of all steps. The n-th token of a draft has the features of
step n; at temperature 0 it is accepted where head and target put the same token first, above that with probability
sum of min(p, q).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from edgespec.pair.folder import open_model, read_head_facts
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.head_losses import TEMPERATURE
from edgespec.train.head_model import lender, load_head
from edgespec.train.head_objective import head_logits
from edgespec.train.head_steps import head_steps, step_rows
from edgespec.train.training_loop import split_blocks
from edgespec.train.training_settings import TrainingSettings
from scripts.papers.heads.heads import CPU, heads_at
from scripts.papers.heads.tokens import PAIRS
from scripts.papers.tables.paper_table import in_words, markdown

DEPTH = 4  # steps, as in the paper
APART = [(later, earlier) for earlier in range(DEPTH) for later in range(earlier + 1, DEPTH)]
RATES = ("accepted, T 0", "accepted, T 1")
Measures = dict[str, list[float]]  # a measure -> of every block


@torch.no_grad()
def measures_of(model_path: Path, folder: Path, files: FeatureFiles, blocks: Sequence[int]) -> Measures:
    """InfoNCE in nats between the features of two steps, over the rows of one block at a time; and steps' rates."""
    found: Measures = {}
    with lender(open_model(model_path), device=CPU, dtype=torch.float32) as target:
        model = load_head(target, folder, read_head_facts(folder))
        logits_of = head_logits(model)
        for block in blocks:
            batch = files.batch([block], device=CPU)
            rows = step_rows(batch, DEPTH)[0]
            steps = [step[0][rows] for step in head_steps(model, batch, num_steps=DEPTH)]  # DEPTH times [n, h]
            unit = [torch.nn.functional.normalize(step, dim=-1) for step in steps]
            values = {f"{later} from {earlier}": _info_nce(unit[later], unit[earlier]) for later, earlier in APART}
            p = logits_of(batch.features[0][rows]).softmax(-1)  # [n, vocab]
            for number, step in enumerate(steps):
                log_q = logits_of(step).log_softmax(-1)
                values[f"cross-entropy {number}"] = -(p * log_q).sum(-1).mean()
                values[f"{RATES[0]} {number}"] = (p.argmax(-1) == log_q.argmax(-1)).double().mean()
                values[f"{RATES[1]} {number}"] = torch.minimum(p, log_q.exp()).sum(-1).mean()
            for name, value in values.items():
                found.setdefault(name, []).append(float(value))
    return found


def _info_nce(queries: Tensor, others: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(queries @ others.T / TEMPERATURE, torch.arange(queries.shape[0]))


def print_steps(arguments: argparse.Namespace) -> None:
    """Table 6 and figure 6 of CORAL: means over seeds, and 95 % intervals over blocks."""
    files = FeatureFiles(arguments.out / "features")
    blocks = split_blocks(files, TrainingSettings(held_out_blocks=arguments.blocks)).held_out
    kept = arguments.out / "steps.json"
    found: dict[str, Measures] = json.loads(kept.read_text()) if kept.exists() else {}
    groups: dict[str, list[int]] = {}
    for (name, seed), folder in heads_at(arguments).items():
        groups.setdefault(name, []).append(seed)
        if len(found.get(f"{name}-{seed}", {}).get("cross-entropy 0", [])) != len(blocks):
            found[f"{name}-{seed}"] = measures_of(arguments.model, folder, files, blocks)
            kept.write_text(json.dumps(found))
    spread = torch.cat([files.block(block)[1].float() for block in blocks]).std()
    print(f"the target's features have a standard deviation of {spread:.2f}\n")
    print("InfoNCE between the features of steps, and cross-entropy of each step with the target, in nats\n")
    print("\n".join(_apart(found, groups)))
    print("\nacceptance rate of the n-th token of a draft, n from 1; then paired differences over blocks\n")
    print("\n".join(_rates(found, groups)))


def _over_seeds(found: Mapping[str, Measures], method: str, seeds: Sequence[int]) -> dict[str, Tensor]:
    """A measure -> its mean over the seeds of a method, of every block."""
    heads = [found[f"{method}-{seed}"] for seed in seeds]
    return {name: torch.tensor([head[name] for head in heads]).double().mean(0) for name in heads[0]}


def _apart(found: Mapping[str, Measures], groups: Mapping[str, Sequence[int]]) -> list[str]:
    names = [f"{later} from {earlier}" for later, earlier in APART]
    table = [["", *names, f"cross-entropy of steps 0 to {DEPTH - 1}"]]
    for method, seeds in groups.items():
        means = _over_seeds(found, method, seeds)
        entropies = ", ".join(f"{means[f'cross-entropy {step}'].mean():.2f}" for step in range(DEPTH))
        table.append([f"{method}, {len(seeds)} seeds", *(f"{means[name].mean():.2f}" for name in names), entropies])
    return markdown(table)


def _rates(found: Mapping[str, Measures], groups: Mapping[str, Sequence[int]]) -> list[str]:
    table = [["", *(f"{step + 1}, {rate.split(', ')[1]}" for rate in RATES for step in range(DEPTH))]]
    names = [f"{rate} {step}" for rate in RATES for step in range(DEPTH)]
    for method, seeds in groups.items():
        means = _over_seeds(found, method, seeds)
        table.append([f"{method}, {len(seeds)} seeds", *(f"{means[name].mean():.3f}" for name in names)])
    for better, worse in PAIRS:
        both = sorted({*groups.get(better, ())} & {*groups.get(worse, ())})
        if both:
            sides = [_over_seeds(found, method, both) for method in (better, worse)]
            gains = [in_words((sides[0][name] - sides[1][name]).tolist(), digits=3) for name in names]
            table.append([f"{better} - {worse}, {len(both)} seeds", *gains])
    return markdown(table)
