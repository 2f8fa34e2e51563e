"""A draft that is some of the target's own layers, distilled: it has the target's distributions at every token.

Embedding and language model head stay the target's, and are not trained. What is learned from is what the target's
features say, so that the target itself is not run again. Legend: B texts, S rows of a text, h hidden size, V tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from edgespec.pair.folder import open_model
from edgespec.pair.pair import open_pair
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.training_loop import TrainingRun, train
from scripts.papers.heads.heads import CPU
from scripts.papers.published.timed import forget, train_timed
from tests.support.plain_weights import weights_of

NAME = "layers"
ROWS_AT_ONCE = 256  # whose distributions are in memory together
Weights = dict[str, Tensor]


def draft_config(target: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the target's settings with so many layers; its layers are all of one kind."""
    config = copy.deepcopy(target)
    config.num_hidden_layers = num_layers
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def new_layers(weights: Weights, config: PretrainedConfig, layers: Sequence[int]) -> PreTrainedModel:
    """Return a draft of these layers of the target's; embedding and head are not trained."""
    own = dict.fromkeys(range(len(layers)))
    found = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for number, layer in zip(own, layers, strict=True):
        start = f"model.layers.{layer}."
        found |= {
            f"model.layers.{number}.{name.removeprefix(start)}": tensor.clone()
            for name, tensor in weights.items()
            if name.startswith(start)
        }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unknown = model.load_state_dict(found, strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # which is the table, where they are one
    model.tie_weights()
    model.get_input_embeddings().weight.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


def of_rows(model: PreTrainedModel, batch: FeatureBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the draft's hidden states and the target's features [n, h] at the tokens of texts, some at a time."""
    decoder = model.get_decoder()
    hidden = decoder(input_ids=batch.ids, use_cache=False).last_hidden_state  # [B, S, h]
    real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    yield from zip(hidden[real].split(ROWS_AT_ONCE), batch.features[real].split(ROWS_AT_ONCE), strict=True)


def learn(model: PreTrainedModel, run: TrainingRun) -> None:
    """Distil the draft in place; held-out texts say the divergence, and how often first choices and tokens agree."""
    head = model.get_output_embeddings()

    def objective(batch: FeatureBatch, _: torch.Generator) -> dict[str, Tensor]:
        losses = []
        for hidden, features in of_rows(model, batch):
            with torch.no_grad():
                p = head(features).softmax(-1)  # [n, V]
            losses.append(-(p * head(hidden).log_softmax(-1)).sum(-1))
        return {"loss": torch.cat(losses).mean()}

    @torch.no_grad()
    def evaluate(blocks: Sequence[int]) -> dict[str, float]:
        found = []
        for block in blocks:
            for hidden, features in of_rows(model, run.files.batch([block], device=CPU)):
                log_p, log_q = head(features).log_softmax(-1), head(hidden).log_softmax(-1)
                p, q = log_p.exp(), log_q.exp()
                found.append(torch.stack([
                    (p * (log_p - log_q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).float(), torch.minimum(p, q).sum(-1),
                ], -1))  # fmt: skip
        divergence, agreement, overlap = torch.cat(found).mean(0).tolist()
        return {"divergence": divergence, "agreement": agreement, "overlap": overlap}

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    train(trained, objective, run=run, evaluate=evaluate)


def train_layers(arguments: argparse.Namespace) -> None:
    """Distil a draft of some of the target's layers for so many seconds of a core, and write its folder."""
    folder: Path = arguments.out / NAME
    if folder.exists():
        return
    target = open_model(arguments.model)
    weights, config = weights_of(target), draft_config(target.config, len(arguments.layers))
    model = train_timed(
        arguments, NAME, lambda: new_layers(weights, config, arguments.layers), learn, width=int(config.hidden_size)
    )
    partial = folder.with_name(f"{NAME}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    open_pair(arguments.model, None).tokenizer.save_pretrained(partial)
    partial.rename(folder)
    forget(arguments, NAME)
