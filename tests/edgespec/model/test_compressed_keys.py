"""Layers that read keys into which several rows were compressed: each row of a tree has the groups of its own path."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from edgespec.model import block_index, chosen_keys
from edgespec.model.causal_model import CausalModel
from tests.conftest import GROUPED, make_model
from tests.edgespec.model.reader import Reader

CPU = torch.device("cpu")
PROMPT = 45
SPARSE, HEAVY = 4, 6  # rows that one key is made of
CHOSEN = 3


def config_of(**changed: Any) -> PretrainedConfig:
    return transformers.DeepseekV4Config(**{
        **GROUPED, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 16,
        "o_lora_rank": 8, "o_groups": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "index_n_heads": 32, "index_head_dim": 8, "index_topk": CHOSEN, "sliding_window": 7, "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": SPARSE, "heavily_compressed_attention": HEAVY},
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                        "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "partial_rotary_factor": 0.5, **changed,
    })  # fmt: skip


def model_of(**changed: Any) -> Any:
    """A random model, also where the family begins with zeros."""
    model = make_model(config_of(**changed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.3)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.randint(4, table.shape))
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def reader_of(*, chunk_rows: int = 512, **changed: Any) -> Reader:
    model = model_of(**changed)
    return Reader(model, CausalModel(copy.deepcopy(model), device=CPU, chunk_rows=chunk_rows), 4)


@pytest.mark.parametrize("chunk_rows", [7, 512])
def test_trees_over_rounds_of_commits_read_as_paths_do(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of rows, and of scores and chosen keys for a few of them at once."""
    monkeypatch.setattr(block_index, "SCORE_BYTES", 3 * 32 * PROMPT * 4)
    monkeypatch.setattr(chosen_keys, "CHOSEN_BYTES", 5 * 2 * 11 * 16 * 4)
    reader = reader_of(chunk_rows=chunk_rows)
    reader.read_prompt(PROMPT)
    for node in (5, 0, None, None):
        reader.look(node, nodes=23)
