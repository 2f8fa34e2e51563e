"""Do plans for a card hold where torch's allocator rounds? Ten pairs on cards of 8 to 80 GiB, without a card.

    python -m scripts.check.card_memory

Each pair is planned to the last byte (`--max-gpu-mem`, no margin). Then it is loaded and run on tensors without
content, in the order of a real run: weights, slots, a prompt, and steps whose trees fill the context. Whatever memory
they take comes from a model of torch's allocator (tests/support/allocator.py), which has the plan's bytes and no more.
Passes are those of the real modules; what a step makes outside of them (distributions, noise) is written down here.
Experts that come one by one take their slots alone. Prints a table and one JSON line; exits 1 when memory runs out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgespec.config import MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.row_chunks import row_chunks
from edgespec.pair.folder import ModelFolder, open_architecture
from edgespec.placement.memory import CUDA_CONTEXT_BYTES, layer_rows
from edgespec.placement.place import PlacedWeights, memory_within, pair_weights, place_weights
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings
from offload.host_table import input_table
from offload.placement import Placement, all_resident
from offload.skeleton import Skeleton
from tests.support.allocator import Block, RoundingAllocator
from tests.support.published_configs import MODELS, llama

GIB = 1 << 30
CUDA, META = torch.device("cuda", 0), torch.device("meta")  # planned for, and run on
HOST_BYTES = 64 * GIB
CONTEXT, PROMPT = 2048, 1500
PATH_ROWS = 64  # that become text in a step: many, so that the caches grow in few steps
LEVELS = 4  # of a draft's tree
ROW = "{:14}{:13}{:6}{:>6}{:>6}{:>7}{:>7}{:>8}{:>7}  {}"  # GiB, without the context
NOISE_POSITIONS, NOISE_BYTES = 24, 8  # of a text at a time; of a token


def qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """A Qwen3's config.json."""
    return llama(hidden, inner, layers, heads, kv_heads, 151936, model_type="qwen3", head_dim=128, dtype="bfloat16",
                 max_position_embeddings=40960, **more)  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    **MODELS,
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, 8),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": {
        **qwen3(2048, 6144, 48, 32, 4), "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral-8x7b": {
        **llama(4096, 14336, 32, 32, 8), "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gpt-oss-20b": {**MODELS["gpt-oss-120b"], "num_hidden_layers": 24, "num_local_experts": 32,
                    "layer_types": ["sliding_attention", "full_attention"] * 12},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pair on a card."""

    target: str
    card_gib: int
    draft: str | None = None
    quant: str | None = None
    size: int = 256
    texts: int = 1


CASES = (
    Case(target="llama3-8b", draft="llama3-1b", card_gib=8, size=64),
    Case(target="llama3-8b", draft="llama3-1b", card_gib=24),
    Case(target="qwen3-8b", draft="qwen3-0.6b", card_gib=16, texts=4, size=64),
    Case(target="qwen3-32b", draft="qwen3-0.6b", quant="nf4", card_gib=12),
    Case(target="qwen3-32b", draft="qwen3-0.6b", quant="nf4", card_gib=24),
    Case(target="llama3-70b", draft="llama3-1b", quant="nf4", card_gib=16),
    Case(target="llama3-70b", draft="llama3-1b", quant="nf4", card_gib=24),
    Case(target="llama3-70b", draft="llama3-1b", quant="nf4", card_gib=80, size=768),
    Case(target="llama3-70b", card_gib=24),
    Case(target="qwen3-30b-a3b", draft="qwen3-0.6b", card_gib=12),
    Case(target="qwen3-30b-a3b", draft="qwen3-0.6b", card_gib=24),
    Case(target="qwen3-30b-a3b", draft="qwen3-0.6b", quant="nf4", card_gib=16),
    Case(target="mixtral-8x7b", card_gib=24),
    Case(target="mixtral-8x7b", quant="nf4", card_gib=16),
    Case(target="gpt-oss-120b", draft="gpt-oss-20b", card_gib=24, size=64),
    Case(target="gpt-oss-120b", draft="gpt-oss-20b", card_gib=80, size=64),
)


class Card(TorchDispatchMode):
    """Takes a block for each new tensor on the card, and gives it back when the tensor's memory is let go."""

    def __init__(self, allocator: RoundingAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what it gives."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._take(tensor.untyped_storage())
        return found

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._give, key, self.allocator.take(storage.nbytes()))

    def _give(self, key: int, block: Block) -> None:
        self._known.remove(key)
        self.allocator.give(block)


def sizes_of_loading(skeleton: Skeleton, placement: Placement, run_config: RunConfig) -> Iterator[int]:
    """Yield the bytes of each allocation of `StreamedModel`, in its order."""
    on_demand = placement.experts is not None
    table = input_table(skeleton) if placement.has_table_on_host else None
    yield skeleton.outside.without(frozenset(table.tensors if table else ())).flat_bytes
    records = skeleton.dense_records if on_demand else skeleton.records
    yield from (records[layer].flat_bytes for layer in sorted(placement.resident_layers))
    yield skeleton.unpack_bytes(run_config.dtype, run_config.device, on_demand=on_demand)
    if placement.num_resident < placement.num_layers:
        yield placement.num_slots * max(record.flat_bytes for record in records)
    if placement.experts is not None:
        yield placement.experts.kept_bytes


def give_weights(skeleton: Skeleton, dtype: torch.dtype, undo: ExitStack) -> None:
    """Give all parameters memory that nobody counts, and let experts compute nothing."""
    apart = {group.module_name for group in skeleton.expert_groups}
    for path, module in skeleton.model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = torch.empty(1, dtype=parameter.dtype, device=META).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=META)
        if path in apart:
            module.forward = lambda rows, *_arguments, **_named: torch.empty_like(rows)  # type: ignore[method-assign]
            undo.callback(module.__dict__.pop, "forward", None)


def attended(query: Tensor, _keys: Tensor, values: Tensor, **_named: Any) -> Tensor:
    """Return what a fused kernel gives, without the scores that torch would make here."""
    return query.new_empty(*query.shape[:-1], values.shape[-1])


class Text:
    """A text in one model."""

    def __init__(self, model: CausalModel, skeleton: Skeleton) -> None:
        self.model, self.cache = model, model.new_text()
        self.vocab = int(skeleton.model.config.get_text_config(decoder=True).vocab_size)

    def read(self, count: int, *, tree_rows: int = 0) -> Tensor:
        """Read rows of the text, or the last of `tree_rows` rows of a tree."""
        ids = torch.zeros(count, dtype=torch.long, device=META)
        if not tree_rows:
            rows = next_rows(self.cache, ids)
        else:
            positions = torch.zeros(tree_rows, dtype=torch.long, device=META)
            visible = torch.zeros(count, tree_rows, dtype=torch.bool, device=META)
            rows = PassRows(cache=self.cache, ids=ids, positions=positions, visible=visible)
        (hidden,) = self.model.read([rows])
        return hidden

    def look(self, hidden: Tensor) -> None:
        """Make the distributions of rows, in chunks, and choose from them."""
        for rows in row_chunks(hidden.shape[0], self.vocab):
            logits = self.model.logits(hidden[rows]).float()
            torch.log_softmax(logits, -1).topk(64)

    def commit(self, count: int) -> None:
        """Keep some rows after the text."""
        rows = torch.zeros(count, dtype=torch.long, device=META)
        self.cache.commit(rows, [0] * count)


def run(
    case: Case, placed: PlacedWeights, run_config: RunConfig, tree: TreeSettings, allocator: RoundingAllocator
) -> int:
    """Load and run the pair; return the bytes that were reserved once it was loaded."""
    models = [(placed.target.skeleton, placed.placement)]
    if placed.draft is not None:
        models.append((placed.draft.skeleton, all_resident(len(placed.draft.skeleton.records))))
    blocks = [allocator.take(size) for one in models for size in sizes_of_loading(*one, run_config) if size]
    loaded_bytes = allocator.reserved_bytes
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda host: host))
        causal = []
        for skeleton, _ in models:
            give_weights(skeleton, run_config.dtype, stack)
            causal.append((CausalModel(skeleton.model, device=META), skeleton))
            stack.callback(causal[-1][0].close)
        budget_bytes = placed.placement.device_budget_bytes
        causal[0][0].layer_rows = layer_rows(placed.target.skeleton, run_config.dtype, budget_bytes)
        stack.enter_context(patch("edgespec.model.attention.scaled_dot_product_attention", attended))
        stack.enter_context(Card(allocator))
        texts = [[Text(*one) for one in causal] for _ in range(case.texts)]
        noise = []
        for text in texts:
            for one in text:
                one.look(one.read(PROMPT)[-1:])
                one.cache.commit_next([0] * PROMPT)
            noise.append([torch.empty(text[0].vocab * NOISE_BYTES, dtype=torch.uint8, device=META)
                          for _ in range(NOISE_POSITIONS)])  # fmt: skip
        path_rows = min(PATH_ROWS, tree.num_nodes) if len(causal) > 1 else PATH_ROWS
        for _ in range((CONTEXT - PROMPT) // path_rows):
            for target, *drafts in texts:
                for draft in drafts:
                    num_drafted = 1
                    while num_drafted < tree.num_drafted:
                        level = min(-(-tree.num_drafted // LEVELS), tree.num_drafted - num_drafted)
                        draft.look(draft.read(level, tree_rows=num_drafted + level - 1))
                        num_drafted += level
                    draft.commit(path_rows)
                num_rows = tree.num_nodes + 1 if drafts else path_rows
                target.look(target.read(num_rows, tree_rows=num_rows if drafts else 0)[:16])
                target.commit(path_rows)
    del blocks
    return loaded_bytes


def check(case: Case, folder: Path) -> dict[str, Any]:
    """Plan a case and run it."""
    models: list[ModelFolder] = []
    for name in filter(None, (case.target, case.draft)):
        place = folder / name
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        models.append(open_architecture(place))
    tree = TreeSettings(size=case.size) if case.draft else TreeSettings(policy="none")
    limits = MemoryLimits(max_gpu_bytes=case.card_gib * GIB)
    run_config = RunConfig(
        limits=limits, device=CUDA, dtype=torch.bfloat16, quant=case.quant, draft_quant=None, context_tokens=CONTEXT,
        prompt_tokens=CONTEXT, num_texts=case.texts,
    )  # fmt: skip
    weights = pair_weights(models[0], models[1] if case.draft else None, run_config)
    memory = memory_within(limits, host_bytes=HOST_BYTES, free_device_bytes=case.card_gib * GIB)
    report: dict[str, Any] = {"target": case.target, "draft": case.draft, "quant": case.quant, "gib": case.card_gib,
                              "texts": case.texts, "nodes": tree.num_nodes}  # fmt: skip
    try:
        placed = place_weights(weights, tree, run_config, memory)
    except EdgespecError as error:
        return report | {"fits": False, "why": error.what.splitlines()[0]}
    placement = placed.placement
    limit_bytes = case.card_gib * GIB - CUDA_CONTEXT_BYTES
    allocator = RoundingAllocator(limit_bytes)
    report |= {"fits": True, "where": placement.in_words, "table_on_host": placement.has_table_on_host,
               "planned_gib": (placement.planned_bytes - CUDA_CONTEXT_BYTES) / GIB}  # fmt: skip
    try:
        loaded_bytes = run(case, placed, run_config, tree, allocator)
    except torch.OutOfMemoryError as error:
        return report | {"ran_out": str(error)}
    return report | {"loaded_gib": loaded_bytes / GIB, "peak_gib": allocator.peak_bytes / GIB}


def main() -> int:
    """Exit code 1 when a plan is overrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose target's name has this in it")
    arguments = parser.parse_args()
    reports = []
    print(ROW.format("target", "draft", "quant", "texts", "nodes", "card", "plan", "loaded", "peak", "on the card"))
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in CASES if arguments.only in case.target):
            report = check(case, Path(folder))
            reports.append(report)
            found = [
                f"{report[name]:.2f}" if name in report else "-" for name in ("planned_gib", "loaded_gib", "peak_gib")
            ]
            limit_gib = case.card_gib - CUDA_CONTEXT_BYTES / GIB
            where = report.get("ran_out") or report.get("why") or report["where"]
            facts = (case.target, case.draft or "-", case.quant or "-", case.texts, report["nodes"])
            print(ROW.format(*facts, f"{limit_gib:.2f}", *found, where), flush=True)
    print(json.dumps(reports))
    return 1 if any("ran_out" in report for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
