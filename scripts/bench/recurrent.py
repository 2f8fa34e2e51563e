"""What a token tree costs in one recurrent layer, beside a causal pass of as many rows, and what a text keeps there.

    python -m scripts.bench.recurrent                  one layer of each kind at width 2048, 64 nodes
    python -m scripts.bench.recurrent --width 512 --nodes 256

Trees and causal passes alternate; medians in milliseconds. "off" is the largest difference between a node's last
hidden state and that of a plain forward over its path, of the largest one. States are float32, rows beside them too.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModel, AutoModelForCausalLM, Lfm2Config, Mamba2Config, PretrainedConfig, Qwen3_5TextConfig

from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.placement.cache_memory import state_sizes
from edgespec.tree.token_tree import ancestors_mask, depths

VOCAB = 64
TEXT_TOKENS = 100
CHILDREN = 3  # of a node
MIB = 1 << 20


def configs(width: int) -> dict[str, PretrainedConfig]:
    """A model of one layer of each kind, with next to nothing beside its mixer."""
    small = {"vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    linear = {"layer_types": ["linear_attention"], "num_attention_heads": 8, "num_key_value_heads": 2}
    heads = width // 128
    return {
        "gated delta rule": Qwen3_5TextConfig(
            **small, **ends, **linear, linear_num_key_heads=heads, linear_num_value_heads=2 * heads
        ),
        "Mamba 2": Mamba2Config(**small, **ends, num_heads=width // 32, head_dim=64, state_size=128, n_groups=1),
        "short convolution": Lfm2Config(
            **small, **ends, layer_types=["conv"], num_attention_heads=8, block_auto_adjust_ff_dim=False
        ),
    }


def measure(name: str, config: PretrainedConfig, *, nodes: int, repeats: int) -> None:
    """Print a line about one kind of layer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = AutoModel.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(model.base_model.state_dict())
    causal = CausalModel(model, device=torch.device("cpu"))
    text = causal.new_text()
    ids = torch.randint(VOCAB, (TEXT_TOKENS,))
    causal.read_text(text, ids)
    tokens = torch.randint(VOCAB, (nodes,))
    parents = torch.tensor([-1, *((node - 1) // CHILDREN for node in range(1, nodes))])
    visible = ancestors_mask(parents)
    rows = {
        "tree": PassRows(cache=text, ids=tokens, positions=TEXT_TOKENS + depths(parents), visible=visible),
        "causal": next_rows(text, tokens),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in rows}
    for _ in range(repeats):
        for kind, part in rows.items():
            text.truncate()
            started = time.perf_counter()
            (hidden,) = causal.read([part])
            seconds[kind].append(time.perf_counter() - started)
            if kind == "tree":
                found = hidden
    off = 0.0
    for node in {1, nodes // 2, nodes - 1}:
        path = torch.cat([ids, tokens[visible[node]]])
        with torch.no_grad():
            expected = plain(input_ids=path[None], use_cache=False).last_hidden_state[0, -1]
        off = max(off, float((found[node] - expected).abs().max() / expected.abs().max()))
    sizes = state_sizes(model, torch.float32)
    tree_ms, causal_ms = (1000 * statistics.median(seconds[kind]) for kind in ("tree", "causal"))
    print(f"{name:18} off {off:.0e}   tree {tree_ms:6.1f} ms   causal {causal_ms:6.1f} ms", end="   ")
    print(f"state {sizes.state_bytes / MIB:5.2f} MiB   row {sizes.row_bytes / 1024:5.1f} KiB", end="   ")
    print(f"a text {sizes.texts_bytes(num_texts=1, rows=nodes) / MIB:5.1f} MiB")


def main() -> None:
    """Measure each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, help="of the model; a multiple of 128")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for name, config in configs(options.width).items():
        measure(name, config, nodes=options.nodes, repeats=options.repeats)


if __name__ == "__main__":
    main()
