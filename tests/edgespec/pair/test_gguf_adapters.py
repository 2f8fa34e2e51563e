"""An adapter as llama.cpp writes it is the one that it was made of, with the rows of heads in their places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from edgespec import Engine, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.hub.adapter_names import on_its_base
from edgespec.pair.folder import open_model
from offload.adapters.gguf import read_gguf_adapter
from offload.errors import OffloadError
from tests.hub import Cache
from tests.offload.gguf.files import write_gguf
from tests.support.adapters import PREFIX, save_adapter, write_adapter
from tests.support.families import FAMILIES, make_model, save_folder

IDS = torch.arange(40, 75)
F32, F16 = 0, 1
TABLE = "model.embed_tokens"
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
ENDS = ("q_proj", "k_proj", "v_proj", "down_proj", "embed_tokens")
SETTINGS: dict[str, Any] = {
    "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0,
}  # fmt: skip


def permuted(rows: Tensor, num_heads: int) -> Tensor:
    """The rows as the converter of Llama's puts them: of each head those of both halves in turn."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def as_gguf(path: Path, folder: Path, heads: Mapping[str, int], **settings: Any) -> Path:
    """The file that llama.cpp's converter makes of a folder; `heads` are those of modules whose rows are in turn."""
    tensors = []
    for stored, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, part = stored.removeprefix(PREFIX).partition(".lora_")
        is_table, is_first = part.startswith("embedding"), "A" in part
        name = "token_embd" if is_table else f"blk.{module.split('.')[2]}.{NAMES[module.split('.', 3)[3]]}"
        numbers = tensor.t() if is_table and is_first else tensor
        num_heads = heads.get(module.rpartition(".")[2], 0)
        numbers = permuted(numbers, num_heads) if num_heads and not is_first else numbers
        content = numbers.contiguous().numpy().tobytes()
        tensors.append((f"{name}.weight.lora_{'a' if is_first else 'b'}", tuple(numbers.shape), F32, content))
    return write_gguf(path, {**SETTINGS, **settings}, tensors)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    model = make_model(FAMILIES["llama"]())
    return save_folder(tmp_path_factory.mktemp("llama"), model), model


def logits_of(folder: Path, adapter: Path, ids: Tensor = IDS) -> Tensor:
    with Engine.from_pretrained(
        folder, draft="none", device="cpu", dtype="float32", context_tokens=64, self_check=False,
        tree=TreeSettings(policy="none"), adapters=[adapter],
    ) as engine:  # fmt: skip
        return engine.target_model.read_text(engine.target_model.new_text(), ids)


def test_a_file_is_the_folder_that_it_was_made_of(llama: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, model = llama
    config: Any = model.config
    adapter = write_adapter(tmp_path / "one", model, ENDS)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    wanted = logits_of(folder, adapter)
    assert torch.equal(logits_of(folder, as_gguf(tmp_path / "one.gguf", adapter, heads)), wanted)
    assert not torch.allclose(logits_of(folder, as_gguf(tmp_path / "two.gguf", adapter, {})), wanted, atol=1e-3)


def test_a_whole_table_beside_a_packed_one_counts(tmp_path: Path) -> None:
    """It cannot be the base's, whose numbers are rounded; PEFT loads it, whether or not it was trained."""
    base = Path(__file__).parents[2] / "offload" / "gguf" / "tiny" / "llama-q8_0.gguf"
    config: Any = open_model(base).config
    vocab, hidden = config.vocab_size, config.hidden_size
    draw = torch.Generator().manual_seed(0)
    table, down, up = (torch.randn(*shape, generator=draw) for shape in ((vocab, hidden), (4, vocab), (hidden, 4)))
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    added = {f"{TABLE}.lora_embedding_A": down, f"{TABLE}.lora_embedding_B": up}
    alone, beside, trained = (
        logits_of(base, save_adapter(tmp_path / str(number), fields, {**added, **more}), IDS % vocab)
        for number, more in enumerate(({}, {f"{TABLE}.base_layer.weight": table}, {f"{TABLE}.weight": table}))
    )
    assert torch.equal(beside, trained)
    assert not torch.allclose(beside, alone, atol=1e-3)


def test_rows_stay_where_a_converter_leaves_them(tmp_path: Path) -> None:
    model = make_model(FAMILIES["qwen3"]())
    folder, adapter = save_folder(tmp_path / "model", model), write_adapter(tmp_path / "one", model, ENDS)
    path = as_gguf(tmp_path / "one.gguf", adapter, {}, **{"general.architecture": "qwen3"})
    assert torch.equal(logits_of(folder, path), logits_of(folder, adapter))


def test_the_scale_is_alpha_over_the_rank_and_1_without_alpha(llama: tuple[Path, nn.Module], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "one", llama[1], ["v_proj"], r=4)
    for alpha, scale in ((6.0, 1.5), (0.0, 1.0)):
        path = as_gguf(tmp_path / "one.gguf", adapter, {}, **{"adapter.lora.alpha": alpha})
        found = read_gguf_adapter(path, llama[1].config)
        assert {delta.scale for delta in found.deltas.values()} == {scale}


MATRIX = ("blk.0.attn_v.weight.lora_a", (4, 32), F32, bytes(512))
OTHER = ("blk.0.attn_v.weight.lora_b", (16, 4), F32, bytes(256))
REFUSED: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "no adapter": ({}, [("token_embd.weight", (8, 4), F32, bytes(128))], "no LoRA adapter"),
    "another kind": ({"adapter.type": "control"}, [MATRIX, OTHER], "control"),
    "tokens that begin it": ({"adapter.alora.invocation_tokens": [1, 2]}, [MATRIX, OTHER], "alora"),
    "half of it": ({}, [MATRIX], "no lora_b"),
    "another tensor": ({}, [MATRIX, OTHER, ("blk.0.attn_v.bias", (16,), F32, bytes(64))], "attn_v.bias"),
    "experts": ({}, [("blk.0.ffn_up_exps.weight.lora_a", (4, 32), F32, bytes(512)),
                     ("blk.0.ffn_up_exps.weight.lora_b", (16, 4), F32, bytes(256))], "ffn_up_exps"),
    "a joined matrix": ({}, [("blk.0.attn_qkv.weight.lora_a", (4, 32), F32, bytes(512)),
                             ("blk.0.attn_qkv.weight.lora_b", (16, 4), F32, bytes(256))], "attn_qkv"),
    "other ranks": ({}, [MATRIX, ("blk.0.attn_v.weight.lora_b", (32, 2), F32, bytes(256))], "ranks 4 and 2"),
    "an alpha of no number": ({"adapter.lora.alpha": "six"}, [MATRIX, OTHER], "'six'"),
    "another architecture": ({"general.architecture": "abacus"}, [MATRIX, OTHER], "abacus"),
}  # fmt: skip


@pytest.mark.parametrize("of", REFUSED)
def test_what_is_not_read_is_refused_by_its_name(of: str, llama: tuple[Path, nn.Module], tmp_path: Path) -> None:
    settings, tensors, word = REFUSED[of]
    path = write_gguf(tmp_path / "one.gguf", {**SETTINGS, **settings}, tensors)
    with pytest.raises(OffloadError) as caught:
        read_gguf_adapter(path, llama[1].config)
    assert word in caught.value.what


def test_an_adapter_as_the_target_stands_for_its_base_with_it(llama: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """The config names the base; where that is not here, the error says how both are given."""
    folder, model = llama
    adapter = write_adapter(tmp_path / "one", model, ["v_proj"], base_model_name_or_path=str(folder))
    with Engine.from_pretrained(adapter, draft="none", dtype="float32", device="cpu", self_check=False) as engine:
        assert engine.pair.target.folder == folder
        assert [given.name for given in engine.pair.target.adapters] == ["one"]
        assert "has the adapter 'one'" in engine.pair.target.notes
    write_adapter(tmp_path / "one", model, ["v_proj"], base_model_name_or_path="acme/base")
    for path in (adapter, as_gguf(tmp_path / "one.gguf", adapter, {})):
        with pytest.raises(EdgespecError) as caught:
            Engine.from_pretrained(path, draft="none")
        assert caught.value.code == "E_ADAPTER"
        assert "`adapters`" in caught.value.fix


def test_a_base_is_found_in_the_cache(llama: tuple[Path, nn.Module], tmp_path: Path, cache: Cache) -> None:
    snapshot = cache.put("acme/base", llama[0])
    adapter = write_adapter(tmp_path / "one", llama[1], ["v_proj"], base_model_name_or_path="acme/base")
    base, adapters = on_its_base(adapter)
    assert base == snapshot
    assert [one.path for one in adapters] == [adapter]
    assert on_its_base(llama[0]) == (llama[0], ())
