"""What each form of draft takes to grow a tree: milliseconds, calls, operations, and bytes of weights that are read.

    python -m scripts.bench.growth_forms                     trees of 8, 64 and 256 nodes, seven layers deep
    python -m scripts.bench.growth_forms --width 1024 --layers 16 --vocab 32000 --threads 2

All models are random and as wide as each other: a target of so many layers (a Llama, or a Gemma 4 for its assistant),
and drafts of two layers, or of one (EAGLE-3, the layer that guesses a token further). Trees have Sequoia's shape. Each
step grows one, reads it with the target, and takes three tokens into the text. Times are the processor's, medians.
Operations are those that a card would launch: counted on the CPU, without passes in one native call, views left out;
a step has the target's, too.
Weights are read once a call, but for the rows of tables that are looked up. What is of the draft's own is beside them:
the target lends the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig

from edgespec import SamplingSettings, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.own_parts import aux_states_of
from edgespec.grow.batched import grown
from edgespec.grow.policies import make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.causal_model import CausalModel
from edgespec.model.native.trial import is_read_natively
from edgespec.model.target import Target
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree
from offload.text_part import model_from_config
from scripts.papers.tables.paper_table import markdown
from tests.support.feature_drafts import PUBLISHED, new_drafts, new_target
from tests.support.launches import FREE, Launches

CPU = torch.device("cpu")
FORMS = {
    "a language model": "", "an EAGLE-3 head": "eagle3", "a layer of the target's (MTP)": "mtp",
    "DFlash": "dflash", "DSpark": "dspark", "DFlash2": "dflash2", "a Gemma 4's assistant": "assistant",
}  # fmt: skip
TIMES = ("grow_ms", "pass_ms", "grew_ms", "passed_ms")  # natively, and without native passes
COLUMNS = ("grow_ms", "grew_ms", "pass_ms", "passed_ms")
DEPTH = 7  # of trees, as of blocks of eight
TEXT_TOKENS = 256
TAKEN = 2  # nodes of a path that become text, with the root
LOOKED_UP = ("aten::embedding", "aten::index", "aten::index_select")
assert {*FORMS.values()} == {"", *PUBLISHED}


class Reads(Launches):
    """Counts operations, and the bytes of some weights that these read."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_bytes = 0
        self._places = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().split(".")[0]
        if func.is_view or name.startswith(FREE):
            return output
        for given in args:
            if isinstance(given, Tensor) and given.untyped_storage().data_ptr() in self._places:
                read = output if name in LOOKED_UP else given
                self.num_bytes += read.numel() * given.itemsize
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A random target and a draft of it, at one text."""

    target: Target
    drafter: LanguageModelDrafter
    draft: CausalModel
    own_bytes: int  # of the draft's own weights

    def step(self, size: int, seed: int) -> tuple[float, float]:
        """The processor's seconds of growth and of the target's pass in a step."""
        started = time.process_time()
        tree = self.grow(size, seed + 1)
        at_pass = time.process_time()
        self.target.logits(self.target.look(tree))
        ended = time.process_time()
        self.take(tree)
        return at_pass - started, ended - at_pass

    def grow(self, size: int, seed: int) -> TokenTree:
        """A tree below the text."""
        sampling = SamplingSettings(temperature=0.8)
        noise = TextNoise(seed=seed, key=0, vocab=self.target.vocab, device=CPU)
        noise.start(len(self.target.cache.ids))
        draws = TextDraws(sampling=sampling, device=CPU, generator=torch.Generator().manual_seed(seed), noise=noise)
        policy = open_policy(TreeSettings(policy="sequoia", draw="coupled", size=size, depth=DEPTH))
        return grown(make_grow(policy, self.drafter, draws)(seed, DEPTH), self.drafter)

    def take(self, tree: TokenTree) -> None:
        """Take the root and the first nodes below it into the text."""
        parents, path = tree.parents.tolist(), list[int]()
        while len(path) < TAKEN:
            path.append(parents.index(path[-1] if path else 0))
        self.target.commit(tuple(path))
        tokens = tree.tokens.tolist()
        self.drafter.commit(tokens[0], tree.draft_rows[torch.tensor(path)].tolist(), [tokens[node] for node in path])


def open_form(form: str, sizes: Mapping[str, Any], dtype: torch.dtype, *, is_native: bool) -> Pair:
    """A pair of this form, whose weights are all in memory."""
    torch.manual_seed(0)
    model = new_target(form, sizes).eval()
    if form:
        draft = new_drafts(model, form, seed=1).eval()
        own_bytes = sum(weight.numel() for weight in draft.parameters() if weight.requires_grad) * dtype.itemsize
    else:
        draft = model_from_config(LlamaConfig(**{**sizes, "num_hidden_layers": 2}), dtype=torch.float32).eval()
        own_bytes = sum(weight.numel() for weight in draft.parameters()) * dtype.itemsize
    for part in (model, draft):
        part.requires_grad_(False)
        for name, parameter in part.named_parameters():
            if name.endswith("base_kernel"):
                parameter.normal_()
        part.to(dtype)
    keeps = (aux_states_of(draft) or True) if form else False
    target = CausalModel(model, device=CPU, keeps_hidden=keeps)
    drafts = CausalModel(draft, device=CPU)
    for one in (target, drafts) if is_native else ():
        if is_read_natively(one.config) and form != "assistant":
            one.use_native_passes()
    looked = Target(target)
    drafter = open_drafter(drafts, looked, sampling=DraftSampling(temperature=0.8))
    ids = torch.randint(int(sizes["vocab_size"]), (TEXT_TOKENS,), generator=torch.Generator().manual_seed(2))
    looked.prefill(ids)
    drafter.begin(ids.tolist())
    return Pair(target=looked, drafter=drafter, draft=drafts, own_bytes=own_bytes)


def counted(pair: Pair, size: int) -> dict[str, float]:
    """The calls of the draft, the operations and the bytes of weights of the growth of one tree behind another."""
    pair.step(size, 1)
    reads = Reads(list(pair.draft.model.parameters()))
    with mock.patch.object(pair.draft, "read", wraps=pair.draft.read) as calls, torch.no_grad(), reads:
        tree = pair.grow(size, 2)
    with torch.no_grad(), Launches() as others:
        pair.target.logits(pair.target.look(tree))
    pair.take(tree)
    return {
        "nodes": tree.num_nodes - 1, "calls": calls.call_count, "launches": reads.count, "bytes": reads.num_bytes,
        "launched": reads.count / (reads.count + others.count),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16, help="of the target")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", nargs="+", metavar="FORM", help="eagle3, mtp, ...")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = {
        "vocab_size": arguments.vocab, "hidden_size": arguments.width, "intermediate_size": 3 * arguments.width,
        "num_hidden_layers": arguments.layers, "num_attention_heads": arguments.width // 64,
        "num_key_value_heads": max(1, arguments.width // 128), "max_position_embeddings": 4096, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    dtype, rows = getattr(torch, arguments.dtype), list[dict[str, Any]]()
    for name, form in FORMS.items():
        if arguments.only and form not in arguments.only:
            continue
        row: dict[str, Any] = {"form": name}
        usual, pair = (open_form(form, sizes, dtype, is_native=is_native) for is_native in (False, True))
        row["own_bytes"] = pair.own_bytes
        found = {size: counted(usual, size) for size in arguments.sizes}
        for size in arguments.sizes:
            both = [(*pair.step(size, seed), *usual.step(size, seed)) for seed in range(arguments.steps + 1)][1:]
            times = [1e3 * statistics.median(column) for column in zip(*both, strict=True)]
            row[size] = {**found[size], **dict(zip(TIMES, times, strict=True))}
        rows.append(row)
        print(name, row, file=sys.stderr, flush=True)
    print("\n".join(markdown(_table(rows, arguments.sizes))))
    print(json.dumps({**vars(arguments), "torch": torch.__version__, "rows": rows}))


def _table(rows: Sequence[Mapping[Any, Any]], sizes: Sequence[int]) -> list[list[str]]:
    nodes = ", ".join(map(str, sizes))
    heading = [
        "own MiB",
        f"ms to grow {nodes} nodes",
        "without native passes",
        "ms of the target's pass",
        "without them",
        "of a step",
        "calls",
        "operations (of a step)",
        "MiB of weights read",
    ]
    table = [["", *heading]]
    for row in rows:
        cells = [row[size] for size in sizes]
        shares = (cell["grow_ms"] / (cell["grow_ms"] + cell["pass_ms"]) for cell in cells)
        table.append([
            row["form"], f"{row['own_bytes'] / 2**20:.1f}",
            *(", ".join(f"{cell[name]:.1f}" for cell in cells) for name in COLUMNS),
            ", ".join(f"{share:.2f}" for share in shares), ", ".join(str(cell["calls"]) for cell in cells),
            ", ".join(f"{cell['launches']} ({cell['launched']:.2f})" for cell in cells),
            ", ".join(f"{cell['bytes'] / 2**20:.0f}" for cell in cells),
        ])  # fmt: skip
    return table


if __name__ == "__main__":
    main()
