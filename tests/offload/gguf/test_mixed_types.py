"""Published mixtures give a layer's gates, their products and what comes back blocks of several types."""

from pathlib import Path

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.pair.folder import open_model
from edgespec.pair.pair import open_pair
from offload.formats.gguf_blocks import TYPES
from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.header import TextList, read_gguf
from offload.gguf.settings import config_fields
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_tiny_models import TINY, weights

MIXTURES = ("qwen3moe-q8_0", "llama4-q8_0", "granitemoe-q8_0", "qwen3next-q8_0", "gpt-oss-mxfp4")
SCALE = torch.tensor([0.01], dtype=torch.half).view(torch.uint8)


def rewritten(name: str, folder: Path, part: str, *, layer: str = "") -> tuple[Path, Path]:
    """A mixture with other blocks, Q4_0, in the experts' matrices named `part`; and the same numbers in float32."""
    header = read_gguf(TINY / f"{name}.gguf")
    stored, mixed, plain = header.path.read_bytes(), [], []
    for number, tensor in enumerate(header.tensors.values()):
        block, content = tensor.block, stored[tensor.offset : tensor.offset + tensor.num_bytes]
        if tensor.name.startswith(layer) and tensor.name.endswith(f"{part}.weight"):
            block, random = TYPES["Q4_0"], torch.Generator().manual_seed(number)
            halves = torch.randint(0, 256, (tensor.num_bytes // tensor.block.num_bytes, 16), generator=random)
            content = torch.cat((SCALE.expand(len(halves), 2), halves.to(torch.uint8)), 1).numpy().tobytes()
        mixed.append((tensor.name, tensor.shape, block.number, content))
        numbers = torch.empty(len(content) // block.num_bytes, block.weights)
        block.unpack(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, block.num_bytes), numbers)
        plain.append((tensor.name, tensor.shape, TYPES["F32"].number, numbers.numpy().tobytes()))
    settings = {key: one.read() if isinstance(one, TextList) else one for key, one in header.settings.items()}
    return write_gguf(folder / "mixed.gguf", settings, mixed), write_gguf(folder / "plain.gguf", settings, plain)


@pytest.mark.parametrize("part", ["ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_with_blocks_of_several_types_has_the_files_numbers(tmp_path: Path, name: str, part: str) -> None:
    mixed, plain = (weights(path) for path in rewritten(name, tmp_path, part))
    assert mixed.keys() == plain.keys()
    assert all(torch.equal(mixed[key], plain[key]) for key in plain)


def test_experts_of_gpt_oss_stay_in_blocks_of_both_types(tmp_path: Path) -> None:
    mixed, _ = rewritten("gpt-oss-mxfp4", tmp_path, "ffn_gate_exps")
    assert {entry.computed for name, entry in open_model(mixed).checkpoint.tensors.items() if "gate_up" in name} == {
        None
    }


def test_only_matrices_that_share_a_parameter_are_unpacked_for_another_type(tmp_path: Path) -> None:
    def in_blocks(part: str) -> set[str]:
        header = read_gguf(rewritten("qwen3moe-q8_0", tmp_path, part)[0])
        names = gguf_checkpoint(header, config_fields(header)).tensors
        return {name.split(".")[-2] for name in names if ".experts." in name and "gguf_" in name}

    assert in_blocks("ffn_down_exps") == {"gate_proj", "up_proj", "down_proj"}
    assert in_blocks("ffn_up_exps") == {"down_proj"}


@pytest.mark.parametrize("experts", ["stream", "auto"])
@pytest.mark.parametrize(("name", "layer"), [("qwen3moe-q8_0", "blk.1."), ("gpt-oss-mxfp4", "blk.0.")])
def test_texts_of_a_mixture_with_a_layer_of_several_types_are_those_of_its_numbers(
    tmp_path: Path, name: str, layer: str, experts: str
) -> None:
    texts = set()
    mixed, plain = rewritten(name, tmp_path, "ffn_up_exps", layer=layer)
    without = TreeSettings(policy="none")
    for path, trees in ((mixed, (without, TreeSettings(size=4))), (plain, (without,))):
        pair = open_pair(path, path)
        for tree in trees:
            with Engine.from_pair(
                pair, tree=tree, device="cpu", dtype="float32", experts=experts, context_tokens=64
            ) as engine:
                result = engine.generate([3, 4, 5, 6], max_new_tokens=10, temperature=0, seed=0, ignore_eos=True)
            texts.add(tuple(result.token_ids))
    assert len(texts) == 1
