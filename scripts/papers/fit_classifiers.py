"""Variants of C2T's classifier, fitted on one folder of records: to see what it is that matters.

    python -m scripts.make.demo_fits --out OUT --only many-trees
    python -m scripts.papers.fit_classifiers demo-records/many-trees --out variants
    python -m scripts.papers.compare_c2t --classifiers variants/*.json

Variants: three seeds; each of the features left out (C2T, table 1); hidden widths (appendix B.3); fewer trees; the
paper's ten epochs; more negatives. With --from FILE: fine-tuned from that classifier on fewer and fewer trees, gently
and hard, beside classifiers that were fitted anew on as many (appendix B.4). Prints the measures of appendix B.2 on
held-out prompts.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edgespec.grow.classifier import INPUTS, Classifier
from edgespec.train.fit import CLASSIFIER, ClassifierReport, fit_classifier
from edgespec.train.record_files import load_records
from edgespec.train.records import Records
from scripts.papers.tables.paper_table import markdown

SEEDS = (0, 1, 2)
WIDTHS = (2, 6, 12, 24)  # beside the 48 of all other variants
SHARES = (0.3, 0.1, 0.03)  # of the prompts
EPOCHS = 10
BATCH = 1024
AS_ANEW = {"settings": CLASSIFIER}  # far more than fine-tuning takes
NEGATIVES = (16.0,)  # of each accepted record, beside the 1 of all other variants


def without(records: Records, feature: str) -> Records:
    """The records with a feature that says nothing."""
    return {**records, feature: torch.zeros_like(records[feature])}


def blind_to(classifier: Classifier, feature: str) -> Classifier:
    """The classifier that does not read a feature, whatever it is."""
    network = classifier.network
    reads = torch.tensor([name != feature for name in INPUTS], dtype=torch.float64)
    return Classifier(network=replace(network, weights=(network.weights[0] * reads, *network.weights[1:])))


def of_prompts(records: Records, share: float) -> Records:
    """The records of the first prompts."""
    prompts = records["prompt"]
    last = prompts.unique()[: max(2, round(share * int(prompts.unique().numel())))].max()
    return {name: column[prompts <= last] for name, column in records.items()}


def epochs_in_steps(records: Records) -> int:
    """The steps of so many epochs, where a negative is kept for each accepted record."""
    num_accepted = float((records["parent_value"] * records["acceptance"]).sum())
    return max(1, round(EPOCHS * 2 * num_accepted / BATCH))


def variants(records: Records, initial: Classifier | None) -> Iterator[tuple[str, Classifier, ClassifierReport]]:
    """Every variant and its name."""
    fits: dict[str, tuple[Records, dict[str, Any]]] = {}
    if initial is None:
        fits |= {f"seed-{seed}": (records, {"settings": replace(CLASSIFIER, seed=seed)}) for seed in SEEDS}
        fits |= {f"without-{feature}": (without(records, feature), {}) for feature in INPUTS}
        fits |= {f"width-{width}": (records, {"settings": replace(CLASSIFIER, hidden=(width,))}) for width in WIDTHS}
        fits |= {f"negatives-{count:g}": (records, {"negatives": count}) for count in NEGATIVES}
        fits |= {f"share-{share:g}": (of_prompts(records, share), {}) for share in SHARES}
        fits[f"epochs-{EPOCHS}"] = records, {"settings": replace(CLASSIFIER, steps=epochs_in_steps(records))}
    else:
        for share in (1.0, *SHARES):
            fits[f"share-{share:g}"] = of_prompts(records, share), {}
            fits[f"tuned-{share:g}"] = of_prompts(records, share), {"initial": initial}
            fits[f"hard-{share:g}"] = of_prompts(records, share), {"initial": initial, **AS_ANEW}
    for name, (data, options) in fits.items():
        classifier, report = fit_classifier(data, **options)
        left_out = name.removeprefix("without-")
        yield name, blind_to(classifier, left_out) if left_out in INPUTS else classifier, report


def main() -> None:
    """Fit, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of records")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", dest="initial", type=Path, help="a classifier to fine-tune")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    everything, headers = load_records(arguments.records)
    records = {name: everything[name] for name in (*INPUTS, "acceptance", "parent_value", "prompt")}
    print(f"{sum(header.num_trees for header in headers)} trees of {len(headers)} prompts\n")
    table = [["classifier", "fitted on", "log loss", "recall", "positive rate"]]
    initial = None if arguments.initial is None else Classifier.load(arguments.initial)
    for name, classifier, report in variants(records, initial):
        classifier.save(arguments.out / f"{name}.json")
        fit = report.fit
        table.append(
            [name, str(fit.num_train), f"{fit.log_loss:.4f}", f"{report.recall:.3f}", f"{report.positive_rate:.4f}"]
        )
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
