"""Milliseconds of a pass over a tree's rows: in one native call, and by the family's own forward.

    python -m scripts.bench.native_passes                              the built-in target and draft
    python -m scripts.bench.native_passes MODEL [MODEL ...] [--rows 1 4 16 64] [--threads 1]
    python -m scripts.bench.native_passes --types phi3 qwen2_moe       random models of these types, 8 layers, bf16

All weights stay in memory. Both ways take turns, and the least times count, which other programs disturb least.
"""

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from transformers import CONFIG_MAPPING

from edgespec import Engine, TreeSettings
from edgespec.model.causal_model import CausalModel
from edgespec.model.native.trial import is_read_natively
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.text_cache import TextCache
from edgespec.pair.pair import DEMO_FOLDER
from offload.text_part import model_from_config

CONTEXT = 160  # tokens
SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "num_experts": 16,
    "num_local_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "first_k_dense_replace": 1, "shared_expert_intermediate_size": 512, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip


def opened(stack: ExitStack, model: str, given: argparse.Namespace, *, is_native: bool) -> CausalModel:
    """Return a model that reads its rows in one of the ways."""
    with mock.patch("edgespec.placement.load.reads_natively", return_value=is_native):
        tree = TreeSettings(policy="none")
        options = {"tree": tree, "threads": given.threads, "quant": given.quant}
        engine = stack.enter_context(Engine.from_pretrained(model, draft="none", **options))
    return engine.target_model


def random_model(model_type: str, *, is_native: bool) -> CausalModel:
    """Return a random model of a type, 512 wide, with 16 experts where it has some."""
    config = CONFIG_MAPPING[model_type](**SIZES)
    torch.manual_seed(0)
    model = CausalModel(model_from_config(config, dtype=torch.bfloat16).eval(), device=torch.device("cpu"))
    if is_native:
        assert is_read_natively(config)
        model.use_native_passes()
    return model


def text_of(model: CausalModel) -> TextCache:
    """Return a text of random tokens."""
    ids = torch.randint(model.vocab, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    cache = model.new_text()
    model.read([next_rows(cache, ids)])
    cache.commit_next(ids.tolist())
    return cache


def pass_s(model: CausalModel, cache: TextCache, count: int) -> float:
    """Return the seconds of a pass over a chain of so many nodes."""
    cache.truncate()
    ids = torch.arange(1, count + 1)
    rows = next_rows(cache, ids)
    if count > 1:
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        rows = PassRows(cache=cache, ids=ids, positions=rows.positions, visible=visible)
    began = time.perf_counter()
    model.read([rows])
    return time.perf_counter() - began


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[str(DEMO_FOLDER / part) for part in ("target", "draft")])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quant", help="by default as everywhere: none leaves blocks as they lie")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--types", nargs="+", default=[])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.types or given.models:
        with ExitStack() as stack:
            if given.types:
                models = [random_model(name, is_native=is_native) for is_native in (True, False)]
            else:
                models = [opened(stack, name, given, is_native=is_native) for is_native in (True, False)]
            texts = [text_of(model) for model in models]
            found = []
            for count in given.rows:
                ways = list(zip(models, texts, strict=True))
                times = [[pass_s(model, text, count) for model, text in ways] for _ in range(given.turns)]
                native_s, usual_s = (min(column) for column in zip(*times, strict=True))
                found.append(f"{count}: {1e3 * native_s:.2f} and {1e3 * usual_s:.2f}")
            print(
                f"{Path(name).name}, {given.threads} threads, ms natively and by torch, rows {'; '.join(found)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
