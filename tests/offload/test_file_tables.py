"""Tables stay in their files, and give the rows that are looked up."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload.checkpoint import read_checkpoint
from offload.errors import StreamError
from offload.file_tables import FileTable
from offload.layer_store import LayerStore, StoredTensor
from offload.skeleton import NoInitialValues
from offload.streamed_model import StreamedModel
from tests.offload.streaming import CPU, logits, skeleton_of, unlimited_placement
from tests.support.families import GROUPED, make_model, save_folder
from tests.support.tiny_configs import tiny_config

TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding.weight"
HASHES = "model.encoder_hash_tok_embedding.weight"
NGRAMS: dict[str, Any] = {
    **GROUPED, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "hc_lowrank": 8, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ngram_vocab_size_base": 50, "ple_embed_dim": 32,
    "split_ngram_parts": 16,  # so that their numbers are not in the order of their names
}  # fmt: skip


def has_qwen4() -> bool:
    """Whether this transformers has the family in our form: the oldest that we take refuses its kinds of layers."""
    try:
        return transformers.Qwen4ExpTextConfig(**NGRAMS) is not None
    except Exception:
        return False


needs_qwen4 = pytest.mark.skipif(not has_qwen4(), reason="no such family here")


def model_with_ngrams() -> PreTrainedModel:
    return make_model(transformers.Qwen4ExpTextConfig(**NGRAMS), dtype=torch.bfloat16)


def test_rows_come_from_all_pieces_in_the_order_of_their_ids(tmp_path: Path) -> None:
    parts = {name: torch.randn(rows, 6).bfloat16() for name, rows in (("a", 3), ("b", 5), ("c", 1))}
    save_file(parts, tmp_path / "model.safetensors")
    entries = read_checkpoint(tmp_path).tensors
    stored = StoredTensor(pieces=tuple(entries[name] for name in "abc"), shape=(9, 6), dtype=torch.float32)
    table = FileTable(LayerStore([tmp_path / "model.safetensors"]), stored)
    ids = torch.tensor([8, 0, 2, 3, 3, 7, 0])
    assert torch.equal(table.rows(ids), torch.cat(list(parts.values())).float()[ids])


@needs_qwen4
@pytest.mark.parametrize("resident", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as-stored", "converted"])
def test_logits_are_those_of_a_table_in_memory(dtype: torch.dtype, resident: int, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, model_with_ngrams(), shard="10KB")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    skeleton = skeleton_of(folder, dtype)
    assert list(skeleton.tables.tensors) == [TABLE]
    assert len(skeleton.tables.tensors[TABLE].pieces) == 16
    assert all(TABLE not in record.tensors for record in skeleton.records)
    placement = unlimited_placement(skeleton, resident=resident)
    with closing(StreamedModel(skeleton, placement, device=CPU)) as model:
        for rows in (20, 1, 40):
            assert torch.equal(logits(model.model, rows=rows), logits(reference, rows=rows))
        assert model.model.get_parameter(TABLE).is_meta


def test_a_table_outside_of_the_layers_stays_in_its_file_too(tmp_path: Path) -> None:
    """BLT's, of groups of bytes: it has more weights than the model's layers."""
    model = make_model(tiny_config("blt"))
    skeleton = skeleton_of(save_folder(tmp_path, model))
    assert list(skeleton.tables.tensors) == [HASHES]
    assert HASHES not in skeleton.outside.tensors
    with closing(StreamedModel(skeleton, unlimited_placement(skeleton, resident=0), device=CPU)) as streamed:
        assert torch.equal(logits(streamed.model, rows=40), logits(model, rows=40))
        assert streamed.model.get_parameter(HASHES).is_meta


@needs_qwen4
def test_a_table_that_is_another_gives_other_logits(tmp_path: Path) -> None:
    """So the rows that are compared above do count."""
    folder = save_folder(tmp_path, model_with_ngrams())
    before = _streamed_logits(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "ngram_embedding.shard_7." in name or name.endswith("shard_7.weight"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, path, metadata={"format": "pt"})
    assert not torch.equal(_streamed_logits(folder), before)


@needs_qwen4
def test_a_table_that_is_written_over_while_in_use_is_named(tmp_path: Path) -> None:
    skeleton = skeleton_of(save_folder(tmp_path, model_with_ngrams(), shard="10KB"), torch.float32)
    with closing(StreamedModel(skeleton, unlimited_placement(skeleton, resident=3), device=CPU)) as model:
        logits(model.model, rows=3)
        table = skeleton.tables.tensors[TABLE].pieces[0]
        with table.file.open("r+b") as file:
            file.seek(table.offset)
            file.write(bytes(table.num_bytes))
        with pytest.raises(StreamError, match=table.file.name) as caught:
            logits(model.model, rows=3)
        assert caught.value.code == "E_FILE_CHANGED"


def test_weights_larger_than_memory_need_none_while_a_model_is_built() -> None:
    with NoInitialValues():
        assert nn.Embedding(1 << 32, 1 << 10).weight.is_meta
        assert not nn.Embedding(4, 4).weight.is_meta
        assert not torch.empty(3, 3).is_meta


def _streamed_logits(folder: Path) -> Tensor:
    skeleton = skeleton_of(folder, torch.float32)
    with closing(StreamedModel(skeleton, unlimited_placement(skeleton, resident=0), device=CPU)) as model:
        return logits(model.model, rows=40)
