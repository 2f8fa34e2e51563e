"""A language model of one layer, distilled on the same features: it costs what a head costs, and reads no features."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgespec.draft.head_network import head_config
from edgespec.pair.folder import open_model
from edgespec.train.feature_files import FeatureBatch, FeatureFiles
from edgespec.train.head_model import lender
from edgespec.train.head_objective import head_logits
from edgespec.train.head_steps import step_rows
from edgespec.train.training_loop import TrainingRun, train
from edgespec.train.training_settings import TrainingSettings
from scripts.papers.heads.heads import CPU, TARGET


def sibling_folder(out: Path, seed: int) -> Path:
    """Where a sibling is."""
    return out / f"sibling-{seed}"


def train_sibling(arguments: argparse.Namespace, seed: int) -> None:
    """One layer between the target's own tables, all of it trained to give the target's distributions."""
    folder = sibling_folder(arguments.out, seed)
    if folder.exists():
        return
    files = FeatureFiles(arguments.out / "features")
    settings = TrainingSettings(
        training_steps=arguments.training_steps, batch_blocks=arguments.batch,
        learning_rate=arguments.learning_rate, seed=seed, evaluate_every=10**9, checkpoint_every=10**9,
    )  # fmt: skip
    with lender(open_model(TARGET), device=CPU, dtype=torch.float32) as target:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(head_config(target.config), dtype=torch.float32)
        model.get_input_embeddings().weight.data.copy_(target.get_input_embeddings().weight)
        model.model.norm.weight.data.copy_(target.model.norm.weight)
        frozen = head_logits(target)

        def objective(batch: FeatureBatch, _: torch.Generator) -> dict[str, Tensor]:
            logits = model(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)
            counted = step_rows(batch, 1).flatten()
            with torch.no_grad():
                p = frozen(batch.features.flatten(0, 1)[counted]).softmax(-1)
            return {"loss": -(p * logits[counted].log_softmax(-1)).sum(-1).mean()}

        train(
            dict(model.named_parameters()), objective,
            run=TrainingRun(
                files=files, settings=settings, folder=folder.with_name(f"{folder.name}.training"), identity="sibling"
            ),
        )  # fmt: skip
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
