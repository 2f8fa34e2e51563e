"""A multi-token-prediction layer of the built-in target, in a checkpoint of a family that has such layers.

The target's weights are a GLM-4.5's as they are: its first layers may all be dense, and its attention without norms
and with full rotation is Llama's. The layer behind them has experts, as that family's has.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from edgespec.draft.mtp import MTP_PARTS, mtp_config
from edgespec.pair.folder import open_model
from edgespec.train.head_losses import LogitsOf
from edgespec.train.head_model import lender, new_draft, own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_logits
from edgespec.train.head_training import Method, train_head
from edgespec.train.training_loop import TrainingRun
from scripts.papers.published.data import TARGET

OWN_NAMES = {"fuse.": "", "model.norm.": "shared_head.norm."}


def write_target(folder: Path) -> Path:
    """The built-in target as a GLM-4.5 that lacks its layer; its texts are the built-in target's."""
    if (folder / "config.json").exists():
        return folder
    shutil.copytree(TARGET, folder)
    own = AutoConfig.from_pretrained(TARGET).to_dict()
    kept = {
        name: own[name]
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
                     "tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
    }  # fmt: skip
    config = Glm4MoeConfig(
        **kept, attention_bias=False, use_qk_norm=False, first_k_dense_replace=own["num_hidden_layers"],
        rope_parameters={**own["rope_parameters"], "partial_rotary_factor": 1.0}, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=192, n_group=1, topk_group=1,
        routed_scaling_factor=1.0, dtype="bfloat16", architectures=["Glm4MoeForCausalLM"],
    )  # fmt: skip
    config.num_nextn_predict_layers = 1
    config.save_pretrained(folder)
    return folder


def train_mtp(arguments: argparse.Namespace, run: TrainingRun) -> Path:
    """Train the layer on the target's features, and write it into the target's checkpoint."""
    folder: Path = arguments.out / "mtp"
    if (folder / "trained").exists():
        return folder
    target = open_model(write_target(folder))
    config = mtp_config(target.config.get_text_config(decoder=True))
    method = Method(
        name="mtp", num_steps=arguments.multi_steps, feature_noise=0.0,
        weights=LossWeights(regression=0.0, distribution=1.0, step_decay=0.8, feeds_gradient=True),
    )  # fmt: skip
    with lender(target, device=torch.device("cpu"), dtype=torch.float32) as lent:
        layer = new_draft(lent, config, MTP_PARTS, named="the layer", seed=arguments.seed)
        logits: LogitsOf = head_logits(lent)
        report = train_head(layer, method, run=run, precision=Precision(is_mixed=False), target_logits=logits)
        print("mtp", {name: round(value, 3) for name, value in report.held_out.items()})
        write_layer(folder, layer)
    (folder / "trained").touch()
    return folder


def write_layer(folder: Path, layer: PreTrainedModel) -> None:
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
    for name, tensor in own.items():
        for ours, theirs in OWN_NAMES.items():
            if name.startswith(ours):
                found[start + theirs + name.removeprefix(ours)] = tensor.detach().bfloat16()
    path = folder / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, **found}, path, metadata={"format": "pt"})
