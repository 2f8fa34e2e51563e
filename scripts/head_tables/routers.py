"""Routers of several sizes on the first CORAL head: tokens a pass lost, and groups that a layer asks for (table 4)."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from edgespec.draft.head_network import HEAD_KEY
from edgespec.draft.head_router import HeadRouter
from edgespec.pair.folder import open_model, read_head_facts
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.head_model import lender, load_head
from edgespec.train.head_steps import head_steps
from edgespec.train.training_loop import split_blocks
from edgespec.train.training_settings import TrainingSettings
from scripts.head_tables.heads import CPU, TARGET, edgespec, head_folder
from scripts.head_tables.tokens import accept
from scripts.paper_tables.paper_table import markdown

GROUPS = (4, 8, 16, 32, 64)
TOP_GROUPS = (1, 2, 3)
ROUTER_STEPS = 300
LAYER_NODES = 10  # of EAGLE-2's layers


def train_routers(arguments: argparse.Namespace) -> dict[tuple[int, int], Path]:
    """The first CORAL head with routers of several sizes, and copies that ask for more groups: (groups, top) -> it."""
    out: Path = arguments.out
    folders = {}
    for groups in GROUPS:
        folder = out / f"router-{groups}-1"
        if not folder.exists():
            edgespec(
                "train", "router", "-md", head_folder(out, "coral", arguments.seeds[0]), "--features",
                out / "features", "--groups", groups, "--top-groups", 1, "--training-steps", ROUTER_STEPS,
                "--batch", arguments.batch, "--learning-rate", 1e-3, "-o", folder,
            )  # fmt: skip
        for top in TOP_GROUPS:
            wider = out / f"router-{groups}-{top}"
            if not wider.exists():
                shutil.copytree(folder, wider)
                config = json.loads((wider / "config.json").read_text())
                config[HEAD_KEY]["top_groups"] = top
                (wider / "config.json").write_text(json.dumps(config))
            folders[groups, top] = wider
    return folders


@torch.no_grad()
def asked_groups(folder: Path, files: FeatureFiles, blocks: Sequence[int]) -> float:
    """Groups that the nodes of a layer ask for together, on average: rows at random places of held-out texts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with lender(open_model(TARGET), device=CPU, dtype=torch.float32) as target:
        model = load_head(target, folder, read_head_facts(folder))
        router = model.router
        assert isinstance(router, HeadRouter)
        for block in blocks:
            features = head_steps(model, files.batch([block], device=CPU), num_steps=1)[0][0]
            places = torch.randperm(features.shape[0], generator=generator).split(LAYER_NODES)[:4]
            found += [len(router.wanted(router(features[rows]))) for rows in places]
    return statistics.mean(found)


def print_routers(arguments: argparse.Namespace) -> None:
    """Tokens a pass with each router, the share of the whole head's, and the groups that ten nodes ask for."""
    folders = train_routers(arguments)
    whole = f"coral-{arguments.seeds[0]}"
    drafts = {whole: head_folder(arguments.out, "coral", arguments.seeds[0])}
    drafts |= {f"{groups} groups, top {top}": folder for (groups, top), folder in folders.items()}
    found = accept(drafts, arguments.router_contexts, arguments)
    files = FeatureFiles(arguments.out / "features")
    blocks = split_blocks(files, TrainingSettings(held_out_blocks=arguments.blocks)).held_out
    means = {name: {cell: statistics.mean(tokens) for cell, tokens in of.items()} for name, of in found.items()}
    cells = list(means[whole])
    table = [["router", *cells, f"groups that {LAYER_NODES} rows ask for"]]
    table.append(["none", *(f"{means[whole][cell]:.2f}" for cell in cells), ""])
    for (groups, top), folder in folders.items():
        name = f"{groups} groups, top {top}"
        shown = [f"{means[name][cell]:.2f} ({means[name][cell] / means[whole][cell]:.2f})" for cell in cells]
        table.append([name, *shown, f"{asked_groups(folder, files, blocks):.1f}"])
    print("\n".join(markdown(table)))
