"""Would reading the next layer's experts ahead, from a guess, make a mixture faster?

    python -m scripts.make.inflate_experts moe
    python -m scripts.papers.expert_guess moe --disk-gib-per-s 0.5

A mixture decodes prompts from a disk of this rate, within a limit of memory, in three ways that take every prompt in
turn, each with an engine and a cache of experts of its own: as edgespec does; reading ahead, while a layer computes,
the experts that the next layer's router would choose for this layer's rows (Eliseev and Mazur, Fast Inference of
Mixture-of-Experts Language Models with Offloading, section 3.2); and reading ahead exactly those that are going to be
asked for, which the first way has noted. No guess can gain more than the last one does.

Prints tokens/s of each way, over the first, and the shares of the absent experts that were guessed and of the guesses
that were asked for.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.doctor.benchmark import Text, continue_one
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.text.request import TextOptions
from offload.experts.cpu_experts import CpuExperts
from offload.experts.expert_group import ExpertGroup
from offload.experts.expert_source import ExpertSource, HandedExpert, Wait
from offload.experts.mixture import mix
from offload.layer_store import LayerRecord
from scripts.bench.expert_passes import choices_in, routers_of, slow_reads
from scripts.check.tuned import per_s
from scripts.situations import GIB, MIB, SEED, read_texts, write_prompts

WAYS = ("no guess", "next router", "perfect")
Key = tuple[int, int | None]


class Guessing:
    """Reads the next layer's likely experts ahead of a model's source of experts; notes what is asked for."""

    def __init__(self, model: nn.Module, way: str, known: deque[list[int]]) -> None:
        self._way, self._known = way, known  # of each layer of each pass, in order: what was asked for
        self.guessed, self.useful, self.absent = 0, 0, 0
        self._ahead: dict[Key, Future[None]] = {}
        self._rows = torch.empty(0)  # of the layer that is computed at the moment
        takes = {module: take for module in model.modules() if (take := _take_of(module)) is not None}
        self._source: ExpertSource = next(iter(takes.values())).func.__self__
        self._routers = list(routers_of(model))
        assert len(self._routers) == len(takes), "layers have routers of another name"
        for module, take in takes.items():
            own = functools.partial(self._take_ahead, *take.args)
            module.forward = functools.partial(self._forward, functools.partial(mix, module, own))
        memory = self._source._memory
        assert isinstance(memory, CpuExperts)
        self._memory = memory
        self._take = self._source.take
        self._bring, memory.bring = memory.bring, self._bring_once  # type: ignore[method-assign]

    def _forward(self, forward: Any, hidden: Tensor, *given: Any) -> Any:
        self._rows = hidden
        return forward(hidden, *given)

    def _take_ahead(self, row: int, rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
        """Hand out a layer's experts; once its own are being read, let the next layer's follow."""
        if self._way == "no guess":
            self._known.append(list(rows_of))
        elif self._way == "perfect":
            self._known.popleft()
        self.absent += sum(not self._source._cache.is_kept(row, expert) for expert in rows_of)
        layer = self._source._groups[row].layer
        self.useful += sum((layer, expert) in self._ahead for expert in rows_of)
        with closing(self._take(row, rows_of)) as taken:
            for number, expert in enumerate(taken):
                if number == 0:
                    self._read_ahead(row + 1)
                yield expert
        for key in [key for key in self._ahead if key[0] == layer]:
            self._ahead.pop(key).cancel()  # guessed, and not asked for

    def _read_ahead(self, row: int) -> None:
        if row == len(self._routers) or self._way == "no guess":
            return
        group = self._source._groups[row]
        for expert in self._known[0] if self._way == "perfect" else self._chosen(row):
            record = group.experts[expert]
            if not self._source._cache.is_kept(row, expert):
                self.guessed += 1
                self._ahead[record.index, record.expert] = self._memory._readers.submit(self._memory._read, record)

    @torch.no_grad()
    def _chosen(self, row: int) -> list[int]:
        """What the layer's router would choose for the rows of the layer before it."""
        experts = choices_in(self._routers[row](self._rows))
        assert experts is not None
        chosen: list[int] = experts.unique().tolist()
        return chosen

    def _bring_once(self, group: ExpertGroup, record: LayerRecord) -> Wait:
        ahead = self._ahead.pop((record.index, record.expert), None)
        return ahead.result if ahead else self._bring(group, record)


def _take_of(module: nn.Module) -> Any:
    """What hands a layer's experts out to an experts' module; None for other modules."""
    given = getattr(module.__dict__.get("forward"), "args", ())
    takes = [part for part in given if isinstance(part, functools.partial)]
    return next((take for take in takes if isinstance(getattr(take.func, "__self__", None), ExpertSource)), None)


def compare(pair: ModelPair, texts: list[list[int]], arguments: argparse.Namespace) -> None:
    """All ways in turn on every text; prints a line a way."""
    limits = MemoryLimits(max_cpu_bytes=arguments.limit_mib * MIB)
    longest = max(map(len, texts))
    tree = TreeSettings(size=arguments.tree_size) if arguments.tree_size else TreeSettings(policy="none")
    known: deque[list[int]] = deque()
    with ExitStack() as stack:
        engines, guesses = {}, {}
        for way in WAYS:
            engines[way] = stack.enter_context(
                Engine.from_pair(pair, tree=tree, limits=limits, dtype=arguments.dtype, self_check=False,
                                 context_tokens=longest + arguments.new_tokens, prompt_tokens=longest)
            )  # fmt: skip
            guesses[way] = Guessing(engines[way].target_model.model, way, known)
        done: dict[str, list[Text]] = {way: [] for way in WAYS}
        for number, ids in enumerate(texts):
            known.clear()
            for way in WAYS:  # the first way notes what the last one knows
                options: TextOptions = {
                    "sampling": SamplingSettings(temperature=0.8),
                    "max_new_tokens": arguments.new_tokens,
                    "seed": SEED + number,
                }
                done[way].append(continue_one(engines[way], ids, tree, options=options))
            assert len({done[way][-1].token_ids for way in WAYS}) == 1, "a guess changed the text"
    for way in WAYS:
        guess = guesses[way]
        print(f"{way:>12} {per_s(done[way]):7.2f} tokens/s, {per_s(done[way]) / per_s(done[WAYS[0]]):.2f};", end=" ")
        print(f"{guess.useful / max(1, guess.absent):.0%} of absent experts guessed, "
              f"{guess.useful / max(1, guess.guessed):.0%} of guesses asked for", flush=True)  # fmt: skip


def main() -> None:
    """A line a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a mixture of scripts.make.inflate_experts")
    parser.add_argument("--disk-gib-per-s", type=float, default=0.5)
    parser.add_argument("--limit-mib", type=int, default=690, help="of memory")
    parser.add_argument("--tree-size", type=int, default=0, help="nodes of every tree; 0 is plain decoding")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    pair = open_pair(arguments.model, DEMO_FOLDER / "draft")
    with tempfile.TemporaryDirectory() as folder:
        texts = [pair.tokenizer.encode(text) for text in read_texts(write_prompts(Path(folder), arguments.num_prompts))]
    slow_reads(arguments.disk_gib_per_s * GIB)
    compare(pair, texts, arguments)


if __name__ == "__main__":
    main()
