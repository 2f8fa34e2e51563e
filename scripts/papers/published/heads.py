"""Heads of a target as EAGLE, HASS, CORAL and EAGLE-3 train them, and a multi-token-prediction layer of the built-in
target, in published containers.

The layer stands in a checkpoint of a family that has such layers: the target's weights are a GLM-4.5's as they are,
for its first layers may all be dense, and its attention without norms and with full rotation is Llama's. The layer
behind them has experts, as that family's has.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from edgespec.draft.head_network import HeadFacts
from edgespec.draft.mtp import MTP_PARTS, OWN, mtp_config
from edgespec.pair.folder import open_model
from edgespec.train.eagle3_head import Eagle3Head, default_aux_layers, most_frequent, new_eagle3
from edgespec.train.feature_files import FeatureFiles, read_run
from edgespec.train.head_model import lender, new_draft, new_head, own_tensors, save_head
from edgespec.train.head_objective import LossWeights, Precision, head_logits
from edgespec.train.head_training import METHODS, Method, train_head
from edgespec.train.training_loop import TrainingReport, TrainingRun
from scripts.papers.heads.heads import CPU, TARGET, head_folder
from scripts.papers.published.timed import forget, train_timed

MULTI_STEPS = 3  # over a draft's own output: seven, as published heads have, learn less in minutes
KEPT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
        "eos_token_id", "pad_token_id", "bos_token_id")  # fmt: skip
METHOD = Method(
    name="mtp", num_steps=MULTI_STEPS, feature_noise=0.0,
    weights=LossWeights(regression=0.0, distribution=1.0, step_decay=0.8, feeds_gradient=True),
)  # fmt: skip


FEATURE_HEADS = {
    **{name: METHODS[name] for name in ("eagle", "hass", "coral")},
    # CORAL's paper means this where it says HASS (section 2.3).
    "hass-alignment": dataclasses.replace(
        METHODS["hass"], weights=dataclasses.replace(METHODS["hass"].weights, top_tokens=0.0)
    ),
}


def learn(model: PreTrainedModel, lent: PreTrainedModel, method: Method, run: TrainingRun) -> TrainingReport:
    """Train a draft in place on the target's features."""
    return train_head(model, method, run=run, precision=Precision(is_mixed=False), target_logits=head_logits(lent))


def train_feature_head(arguments: argparse.Namespace, method: str) -> None:
    """Train a head on the target's features for so many seconds of a core, and write its folder."""
    folder = head_folder(arguments.out, method, arguments.seed)
    if folder.exists():
        return
    run = read_run(arguments.out / "features")
    facts = HeadFacts(target=run.target, target_fingerprint=run.target_fingerprint, method=FEATURE_HEADS[method].name)
    with lender(open_model(arguments.model), device=CPU, dtype=torch.float32) as lent:
        head = train_timed(
            arguments,
            folder.name,
            lambda: new_head(lent, facts, seed=arguments.seed),
            lambda model, run: learn(model, lent, FEATURE_HEADS[method], run),
            width=run.hidden_size,
        )
        save_head(head, facts, folder)
    forget(arguments, folder.name)


def train_eagle3(arguments: argparse.Namespace) -> None:
    """Train a head on the target's states for so many seconds of a core, and write its folder."""
    folder: Path = arguments.out / "eagle3"
    if folder.exists():
        return
    method = dataclasses.replace(METHODS["eagle3"], num_steps=MULTI_STEPS)
    with lender(open_model(arguments.model), device=CPU, dtype=torch.float32) as lent:
        counts = FeatureFiles(arguments.out / "features").token_counts(lent.config.vocab_size)
        known = most_frequent(counts, arguments.known_tokens)

        def new() -> Eagle3Head:
            return new_eagle3(lent, default_aux_layers(lent.config), known, named="the head", seed=arguments.seed)

        width = int(lent.config.hidden_size)
        head = train_timed(
            arguments, "eagle3", new, lambda made, run: learn(made.model, lent, method, run), width=width
        )
        head.save(folder)
    forget(arguments, "eagle3")


def write_target(folder: Path) -> None:
    """The built-in target as a GLM-4.5 that lacks its layer; its texts are the built-in target's."""
    shutil.copytree(TARGET, folder)
    own = AutoConfig.from_pretrained(TARGET).to_dict()
    config = Glm4MoeConfig(
        **{name: own[name] for name in KEPT}, attention_bias=False, use_qk_norm=False,
        first_k_dense_replace=own["num_hidden_layers"], n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2,
        rope_parameters={**own["rope_parameters"], "partial_rotary_factor": 1.0}, moe_intermediate_size=192, n_group=1,
        topk_group=1, routed_scaling_factor=1.0, dtype="bfloat16", architectures=["Glm4MoeForCausalLM"],
    )  # fmt: skip
    config.num_nextn_predict_layers = 1
    config.save_pretrained(folder)


def train_layer(arguments: argparse.Namespace) -> None:
    """Train the layer on the target's features for so many seconds of a core, and write a target that has it."""
    folder: Path = arguments.out / "mtp"
    if folder.exists():
        return
    partial = folder.with_name("mtp.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_target(partial)
    target = open_model(partial)
    config: Any = mtp_config(target.config.get_text_config(decoder=True))
    with lender(target, device=CPU, dtype=torch.float32) as lent:
        layer = train_timed(
            arguments,
            "mtp",
            lambda: new_draft(lent, config, MTP_PARTS, named="the layer", seed=arguments.seed),
            lambda model, run: learn(model, lent, METHOD, run),
            width=int(lent.config.hidden_size),
        )
        add_layer(partial, layer)
    partial.rename(folder)
    forget(arguments, "mtp")


def add_layer(folder: Path, layer: PreTrainedModel) -> None:
    """Add the layer's tensors to the checkpoint, under the family's names."""
    own = own_tensors(layer, MTP_PARTS.modules)
    plain = AutoModelForCausalLM.from_config(layer.config, dtype=torch.float32)
    plain.load_state_dict({name: own.get(name, value) for name, value in plain.state_dict().items()})
    plain.save_pretrained(folder / "layer")  # which has one tensor an expert, as checkpoints have
    start = f"model.layers.{AutoConfig.from_pretrained(folder).num_hidden_layers}."
    found = {
        start + name.removeprefix("model.layers.0."): tensor.bfloat16()
        for name, tensor in load_file(folder / "layer" / "model.safetensors").items()
        if name.startswith("model.layers.0.")
    }
    shutil.rmtree(folder / "layer")
    theirs = {parameter: name for name, parameter in reversed(OWN.items())}  # as numbered layers have them
    for name, tensor in own.items():
        module, _, leaf = name.rpartition(".")
        if module in theirs:
            found[f"{start}{theirs[module]}.{leaf}"] = tensor.detach().bfloat16()
    path = folder / "model.safetensors"
    save_file({**load_file(path), **found}, path, metadata={"format": "pt"})
