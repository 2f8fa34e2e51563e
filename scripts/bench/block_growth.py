"""Growth with a drafter that guesses a block in one pass, against a draft of equal size that is called layer by layer.

    python -m scripts.bench.block_growth                  trees of 8, 64 and 256 nodes
    python -m scripts.bench.block_growth --width 2048 --layers 5 --block 16

Both drafts are random, of as many layers of one shape, and the trees have one shape (Sequoia's). Each engine decodes a
text in turn; medians of the milliseconds that a step's tree takes to grow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from edgespec import Engine, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from offload.text_part import model_from_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SEED = 5
TARGET_LAYERS = 8
TAPS = (1, 4, 6)  # of the target's layers


def shape_of(arguments: argparse.Namespace, vocab: int, *, layers: int, inner: int) -> dict[str, Any]:
    """The config of a model of this shape."""
    heads = arguments.width // 64
    return Qwen3Config(
        vocab_size=vocab, hidden_size=arguments.width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=64, max_position_embeddings=1024,
        tie_word_embeddings=False, eos_token_id=None,
    ).to_dict()  # fmt: skip


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a random model with the built-in pair's tokenizer, and return its folder."""
    torch.manual_seed(SEED)
    model_from_config(Qwen3Config(**config), dtype=torch.float32).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((DEMO_FOLDER / "target" / name).read_bytes())
    return folder


def write_block_drafter(folder: Path, config: dict[str, Any], block: int) -> Path:
    """Write a random DFlash drafter of these layers, in the container of z-lab."""
    model, width = model_from_config(Qwen3Config(**config), dtype=torch.float32), int(config["hidden_size"])
    tensors = {
        name.removeprefix("model."): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name.startswith("model.layers.") or name == "model.norm.weight"
    }
    tensors["fc.weight"] = torch.randn(width, len(TAPS) * width) / width**0.5
    tensors["hidden_norm.weight"] = torch.ones(width)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    inner = {"mask_token_id": 0, "target_layer_ids": list(TAPS)}
    own = {"architectures": ["DFlashDraftModel"], "block_size": block, "dflash_config": inner}
    (folder / "config.json").write_text(json.dumps({**config, "num_target_layers": TARGET_LAYERS, **own}))
    return folder


def open_engine(target: Path, draft: Path, *, size: int, depth: int) -> Engine:
    """The pair with trees of one shape."""
    return Engine.from_pair(
        open_pair(target, draft),
        tree=TreeSettings(policy="sequoia", size=size, depth=depth, lookup=False), context_tokens=256, dtype="float32",
        self_check=False, draft_check=False,
    )  # fmt: skip


def grow_ms(engine: Engine, prompt: list[int], steps: int) -> tuple[list[float], int, int]:
    """The milliseconds of each tree, and its nodes and layers."""
    found = engine.generate(prompt, max_new_tokens=steps + 24, temperature=0.0, ignore_eos=True, seed=SEED)
    grown = [step for step in found.steps if step.num_drafted][1:steps]  # the first one reads the prompt
    full = max(grown, key=lambda step: step.num_drafted)
    return [1000 * step.grow_s for step in grown], full.num_drafted, len(full.num_by_depth)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5, help="of both drafts")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as work:
        vocab = json.loads((DEMO_FOLDER / "target" / "config.json").read_text())["vocab_size"]
        drafts = shape_of(arguments, vocab, layers=arguments.layers, inner=3 * arguments.width)
        small = shape_of(arguments, vocab, layers=TARGET_LAYERS, inner=arguments.width)
        target = write_model(Path(work) / "target", small)
        folders = {
            "a block": write_block_drafter(Path(work) / "block", drafts, arguments.block),
            "by layer": write_model(Path(work) / "layers", drafts),
        }
        print(f"{'nodes':>6}{'layers':>8}{'a block':>12}{'by layer':>12}{'ratio':>8}   milliseconds a tree", flush=True)
        for size in arguments.sizes:
            engines = {
                name: open_engine(target, draft, size=size, depth=arguments.block - 1)
                for name, draft in folders.items()
            }
            times: dict[str, list[float]] = {name: [] for name in engines}
            shapes = set()
            for repeat in range(arguments.repeats):
                for name, engine in engines.items():
                    found, nodes, layers = grow_ms(engine, list(range(20 + repeat, 84 + repeat)), arguments.steps)
                    times[name] += found
                    shapes.add((nodes, layers))
            for engine in engines.values():
                engine.close()
            ((nodes, layers),) = shapes
            block, by_layer = (statistics.median(times[name]) for name in folders)
            print(f"{nodes:>6}{layers:>8}{block:>12.1f}{by_layer:>12.1f}{by_layer / block:>8.1f}", flush=True)
            rows.append({"nodes": nodes, "layers": layers, "block_ms": block, "by_layer_ms": by_layer})
    print(json.dumps({**vars(arguments), "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
