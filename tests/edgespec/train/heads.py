"""A random target, its features and heads for tests of training."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.draft.head_network import HeadFacts
from edgespec.train.feature_files import Block, FeatureBatch, FeatureFiles, FeatureRun, begin_run, save_shard
from edgespec.train.head_model import new_head, own_tensors
from tests.support.families import FAMILIES, VOCAB, make_model

CPU = torch.device("cpu")
EAGER = {"gemma2"}


def make_target(family: str = "llama") -> PreTrainedModel:
    config = FAMILIES[family]()
    config._attn_implementation = "eager" if family in EAGER else "sdpa"
    return make_model(config)


def make_head(target: PreTrainedModel, *, spread: bool = False, **changes: Any) -> PreTrainedModel:
    """A fresh head; a `spread` one has features so far apart that every mistake shows."""
    facts = HeadFacts(**{"target": "t", "target_fingerprint": "f", "method": "coral", **changes})
    head = new_head(target, facts, seed=3)
    if spread:
        with torch.no_grad():
            for tensor in own_tensors(head).values():
                if tensor.ndim > 1:
                    tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(len(tensor)))
    return head


def features_of(target: PreTrainedModel, ids: list[int]) -> Tensor:
    """Of one text by a plain forward: [n, h]."""
    output = target(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    features: Tensor = output.hidden_states[-1][0]
    return features


def random_texts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB - 1, (length,), generator=generator).tolist() for length in lengths]


def make_batch(target: PreTrainedModel, texts: list[list[int]]) -> FeatureBatch:
    pad = torch.nn.utils.rnn.pad_sequence
    return FeatureBatch(
        ids=pad([torch.tensor(ids) for ids in texts], batch_first=True),
        lengths=torch.tensor([len(ids) for ids in texts]),
        features=pad([features_of(target, ids) for ids in texts], batch_first=True),
    )


def run_of(blocks: list[Block], *, hidden_size: int, target: str = "t", aux_layers: tuple[int, ...] = ()) -> FeatureRun:
    return FeatureRun(
        target=target,
        target_fingerprint="f",
        quant=None,
        dtype="float32",
        hidden_size=hidden_size,
        block_tokens=max(len(block.ids) for block in blocks),
        num_blocks=len(blocks),
        num_tokens=sum(len(block.ids) for block in blocks),
        blocks_sha256=str([block.ids for block in blocks]),
        aux_layers=aux_layers,
    )


def feature_files(folder: Path, target: PreTrainedModel, texts: list[list[int]]) -> FeatureFiles:
    """Two shards of a block a text."""
    blocks = [Block(text=number, ids=ids) for number, ids in enumerate(texts)]
    begin_run(folder, run_of(blocks, hidden_size=int(target.config.hidden_size)))
    middle = (len(blocks) + 1) // 2
    for part in [part for part in (blocks[:middle], blocks[middle:]) if part]:
        save_shard(folder, part, torch.cat([features_of(target, block.ids) for block in part]))
    return FeatureFiles(folder)
