"""An EAGLE-3 head of the built-in target, and a multi-token-prediction layer of its own, in published containers.

The layer stands in a checkpoint of a family that has such layers: the target's weights are a GLM-4.5's as they are,
for its first layers may all be dense, and its attention without norms and with full rotation is Llama's. The layer
behind them has experts, as that family's has.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from edgespec.draft.mtp import MTP_PARTS, OWN, mtp_config
from edgespec.pair.folder import open_model
from edgespec.train.eagle3_head import Eagle3Head, default_aux_layers, most_frequent, new_eagle3
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.head_model import lender, new_draft, own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_logits
from edgespec.train.head_training import METHODS, Method, train_head
from edgespec.train.training_loop import TrainingRun
from edgespec.train.training_settings import TrainingSettings
from scripts.papers.heads.heads import CPU, TARGET

MULTI_STEPS = 3  # over a draft's own output: seven, as published heads have, learn less in minutes
KNOWN_TOKENS = 1536  # of 2,048, that the head knows
HELD_OUT_BLOCKS = 8
TIMED_STEPS = 8  # whose seconds say how many steps there are in all
KEPT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
        "eos_token_id", "pad_token_id", "bos_token_id")  # fmt: skip
METHOD = Method(
    name="mtp", num_steps=MULTI_STEPS, feature_noise=0.0,
    weights=LossWeights(regression=0.0, distribution=1.0, step_decay=0.8, feeds_gradient=True),
)  # fmt: skip


def learn(
    model: PreTrainedModel, lent: PreTrainedModel, method: Method, steps: int, given: argparse.Namespace
) -> float:
    """Train a draft for so many steps; return the seconds of a core that these took."""
    settings = TrainingSettings(
        training_steps=steps, learning_rate=given.learning_rate, seed=given.seed, evaluate_every=steps,
        held_out_blocks=HELD_OUT_BLOCKS, checkpoint_every=steps,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        files = FeatureFiles(given.out / "features")
        run = TrainingRun(files=files, settings=settings, folder=Path(work), identity=method.name)
        started = time.process_time()
        train_head(model, method, run=run, precision=Precision(is_mixed=False), target_logits=head_logits(lent))
        return time.process_time() - started


def steps_of(name: str, timed_s: float, given: argparse.Namespace) -> int:
    """The steps that take as long as is asked for."""
    steps = max(1, round(TIMED_STEPS * given.seconds / timed_s))
    print(f"{name}: {steps} steps", flush=True)
    return steps


def train_eagle3(arguments: argparse.Namespace) -> None:
    """Train a head on the target's states for so many seconds of a core, and write its folder."""
    folder: Path = arguments.out / "eagle3"
    if folder.exists():
        return
    method = dataclasses.replace(METHODS["eagle3"], num_steps=MULTI_STEPS)
    with lender(open_model(TARGET), device=CPU, dtype=torch.float32) as lent:

        def new() -> Eagle3Head:
            counts = FeatureFiles(arguments.out / "features").token_counts(lent.config.vocab_size)
            known = most_frequent(counts, KNOWN_TOKENS)
            aux_layers = default_aux_layers(lent.config)
            return new_eagle3(lent, aux_layers, known, named="the head", seed=arguments.seed)

        steps = steps_of("eagle3", learn(new().model, lent, method, TIMED_STEPS, arguments), arguments)
        head = new()
        learn(head.model, lent, method, steps, arguments)
        head.save(folder)


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
        layers = [new_draft(lent, config, MTP_PARTS, named="the layer", seed=arguments.seed) for _ in range(2)]
        steps = steps_of("mtp", learn(layers[0], lent, METHOD, TIMED_STEPS, arguments), arguments)
        learn(layers[1], lent, METHOD, steps, arguments)
        add_layer(partial, layers[1])
    partial.rename(folder)


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
