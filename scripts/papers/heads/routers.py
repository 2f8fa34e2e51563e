"""Routers of several sizes on the first CORAL head: tokens a pass lost, and groups that a layer asks for (table 4)."""

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from edgespec.draft.head_network import HEAD_KEY
from edgespec.draft.head_router import HeadRouter, group_size
from edgespec.pair.folder import open_model, read_head_facts
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.head_model import lender, load_head
from edgespec.train.head_objective import head_logits
from edgespec.train.head_steps import head_steps, step_rows
from edgespec.train.training_loop import split_blocks
from edgespec.train.training_settings import TrainingSettings
from scripts.papers.heads.heads import CPU, edgespec, head_folder
from scripts.papers.heads.tokens import accept
from scripts.papers.tables.paper_table import markdown, ratio_in_words

GROUPS = (4, 8, 16, 32, 64)
TOP_GROUPS = (1, 2, 3)
ROUTER_STEPS = 300
ROUTER_DEPTH = 3  # steps that routers learn from
LAYER_NODES = 10  # of EAGLE-2's layers


def train_routers(arguments: argparse.Namespace) -> dict[tuple[int, int], Path]:
    """The first CORAL head with routers of several sizes, and copies that ask for more groups: (groups, top) -> it."""
    out: Path = arguments.out
    folders = {}
    for groups in GROUPS:
        folder = out / f"router-{groups}-1"
        if not folder.exists():
            edgespec(
                "train", "router", "-m", arguments.model, "-md", head_folder(out, "coral", arguments.seeds[0]),
                "--features", out / "features", "--groups", groups, "--top-groups", 1, "--training-steps", ROUTER_STEPS,
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
def rates_of(target_path: Path, folder: Path, files: FeatureFiles, blocks: Sequence[int]) -> dict[int, Tensor]:
    """How often what is drafted is accepted [blocks, 2] at temperature 0 and 1, by the groups of a node; 0 is all.

    At held-out positions that have features of all steps that the router learned from, each node on its own.
    """
    found: dict[int, list[Tensor]] = {top: [] for top in (0, *TOP_GROUPS)}
    with lender(open_model(target_path), device=CPU, dtype=torch.float32) as target:
        model = load_head(target, folder, read_head_facts(folder))
        router, logits_of = model.router, head_logits(model)
        assert isinstance(router, HeadRouter)
        for block in blocks:
            batch = files.batch([block], device=CPU)
            rows = step_rows(batch, ROUTER_DEPTH)[0]
            p = logits_of(batch.features[0][rows]).softmax(-1)  # [n, vocab]
            hidden = torch.stack([step[0][rows] for step in head_steps(model, batch, num_steps=ROUTER_DEPTH)])
            logits, log_router = logits_of(hidden), router(hidden)  # [steps, n, vocab], [steps, n, groups]
            size = group_size(logits.shape[-1], router.num_groups)
            for top, rates in found.items():
                q = (_routed(logits, log_router, size, top) if top else logits).softmax(-1)
                same = (q.argmax(-1) == p.argmax(-1)).double()
                rates.append(torch.stack([same.mean(), torch.minimum(p, q).sum(-1).double().mean()]))
    return {top: torch.stack(rates) for top, rates in found.items()}


def _routed(logits: Tensor, log_router: Tensor, size: int, top: int) -> Tensor:
    """Return log p [..., vocab] of CORAL's equation 8 in each row's `top` groups; -inf elsewhere."""
    parts = [part.log_softmax(-1) for part in logits.split(size, -1)]
    log_probs = torch.cat([part + log_router[..., group, None] for group, part in enumerate(parts)], -1)
    wanted = torch.zeros_like(log_router, dtype=torch.bool).scatter_(-1, log_router.topk(top, -1).indices, value=True)
    return log_probs.masked_fill(~wanted.repeat_interleave(size, -1)[..., : logits.shape[-1]], -torch.inf)


@torch.no_grad()
def asked_groups(target_path: Path, folder: Path, files: FeatureFiles, blocks: Sequence[int]) -> float:
    """Groups that the nodes of a layer ask for together, on average: rows at random places of held-out texts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with lender(open_model(target_path), device=CPU, dtype=torch.float32) as target:
        model = load_head(target, folder, read_head_facts(folder))
        router = model.router
        assert isinstance(router, HeadRouter)
        for block in blocks:
            features = head_steps(model, files.batch([block], device=CPU), num_steps=1)[0][0]
            places = torch.randperm(features.shape[0], generator=generator).split(LAYER_NODES)[:4]
            found += [len(router.best_groups(router(features[rows]))) for rows in places]
    return statistics.mean(found)


def print_rates(arguments: argparse.Namespace) -> None:
    """Acceptance with each router, its share of the whole head's over blocks, and the groups that ten nodes ask for."""
    files = FeatureFiles(arguments.out / "features")
    blocks = split_blocks(files, TrainingSettings(held_out_blocks=arguments.blocks)).held_out
    table = [["router", "accepted, T 0", "accepted, T 1", f"groups that {LAYER_NODES} nodes ask for"]]
    folders = train_routers(arguments)
    for groups in GROUPS:
        rates = rates_of(arguments.model, folders[groups, 1], files, blocks)
        if len(table) == 1:
            table.append(["none", *(f"{rate:.3f}" for rate in rates[0].mean(0).tolist()), ""])
        for top in TOP_GROUPS:
            shown = [
                f"{routed.mean():.3f}, x {ratio_in_words(routed, whole)}"
                for routed, whole in zip(rates[top].T, rates[0].T, strict=True)
            ]
            asked = asked_groups(arguments.model, folders[groups, top], files, blocks)
            table.append([f"{groups} groups, top {top}", *shown, f"{asked:.1f}"])
    print("\n".join(markdown(table)))


def print_routers(arguments: argparse.Namespace) -> None:
    """Tokens a pass with each router, and the share of the whole head's."""
    folders = train_routers(arguments)
    whole = f"coral-{arguments.seeds[0]}"
    drafts = {whole: head_folder(arguments.out, "coral", arguments.seeds[0])}
    drafts |= {f"{groups} groups, top {top}": folder for (groups, top), folder in folders.items()}
    found = {
        name: {cell: torch.tensor(tokens) for cell, tokens in cells.items()}
        for name, cells in accept(drafts, arguments.router_contexts, arguments).items()
    }
    cells = list(found[whole])
    table = [["tokens a pass", *cells], ["none", *(f"{found[whole][cell].mean():.2f}" for cell in cells)]]
    for name in list(drafts)[1:]:
        shown = [
            f"{found[name][cell].mean():.2f}, x {ratio_in_words(found[name][cell], found[whole][cell])}"
            for cell in cells
        ]
        table.append([name, *shown])
    print("\n".join(markdown(table)))
