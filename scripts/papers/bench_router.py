"""What a router over the language model head saves of a draft call, for vocabularies of several sizes.

    python -m scripts.papers.bench_router --hidden 3584 --vocabs 4096,32000,128256,152064

A feature head of a random Llama of the given width drafts one node, and a layer of ten, with its whole language
model head and with a router over 8, 16 and 32 groups of which each node asks for one or two. The calls take turns;
medians are in milliseconds. A random router spreads the nodes of a layer over the groups as widely as it can
be: `groups` is how many of them the layer asked for together. Prints a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, PreTrainedModel

from edgespec.config import DraftSampling
from edgespec.draft.feature_head import FeatureHeadDrafter
from edgespec.draft.head_network import HeadFacts
from edgespec.draft.head_router import HeadRouter
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.model.text_cache import TextCache
from edgespec.train.head_model import new_head
from offload.skeleton import build_on_meta

GROUPS = (8, 16, 32)
TOP_GROUPS = (1, 2)
WIDTHS = (1, 10)
PROMPT_TOKENS = 64
SAMPLING = DraftSampling(temperature=0.6)
Setting = tuple[int | None, int]  # groups, and how many of them each node asks for; None for the whole head


def random_target(vocab: int, arguments: argparse.Namespace) -> PreTrainedModel:
    """One layer, so that the language model head is what there is to measure."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )
    model = build_on_meta(config, "a random Llama", dtype=torch.float32).to_empty(device=arguments.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        for name, buffer in model.named_buffers():  # rotary frequencies: emptied with the rest
            if name.endswith("inv_freq"):
                buffer.copy_(10000.0 ** -torch.linspace(0, 1, buffer.shape[0]))
    return model


def drafters_of(target: CausalModel, text: TextCache, settings: list[Setting]) -> dict[Setting, FeatureHeadDrafter]:
    """Drafters on one head, each with a router of its own or none; the head is at a text."""
    facts = HeadFacts(target="random", target_fingerprint="", method="eagle")
    model = new_head(target.model, facts, seed=0).eval().requires_grad_(False)
    head = CausalModel(model, device=target.device)
    drafters = {}
    for groups, top in settings:
        model.router = None
        if groups is not None:
            router = HeadRouter(target.config.hidden_size, groups, top_groups=top).to(target.device)
            model.router = router.requires_grad_(False)
        drafters[groups, top] = FeatureHeadDrafter(head, text, vocab=target.vocab, sampling=SAMPLING)
        drafters[groups, top].begin(range(PROMPT_TOKENS))
    return drafters


def call_s(drafter: FeatureHeadDrafter, width: int, device: torch.device) -> tuple[float, int]:
    """Seconds of one draft call of so many nodes, and how many tokens of the vocabulary it gave q to."""
    drafter.rewind()
    drafter.expand(torch.tensor([5], device=device), torch.tensor([-1], device=device))
    tokens = torch.arange(width, device=device)
    _wait(device)
    started = time.perf_counter()
    q = drafter.expand(tokens, torch.zeros_like(tokens))
    _wait(device)
    return time.perf_counter() - started, int((q.amax(0) > 0).sum())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(calls: dict[str, Callable[[], tuple[float, int]]], rounds: int) -> dict[str, tuple[float, int]]:
    """Median seconds of each call, in turn with the others, and tokens."""
    for call in calls.values():
        call()
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return {name: (statistics.median(s for s, _ in runs), runs[-1][1]) for name, runs in found.items()}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=3584, help="of the target, a multiple of 64")
    parser.add_argument("--vocabs", default="4096,32000,128256,152064")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = []
    print(f"{'vocab':>7} {'nodes':>5} {'whole ms':>9}  groups top: ms (share of the whole, groups computed)")
    for vocab in map(int, arguments.vocabs.split(",")):
        target = CausalModel(random_target(vocab, arguments), device=arguments.device, keeps_hidden=True)
        looked = Target(target)
        looked.prefill(torch.arange(PROMPT_TOKENS, device=arguments.device))
        settings: list[Setting] = [(None, 1), *((groups, top) for groups in GROUPS for top in TOP_GROUPS)]
        drafters = drafters_of(target, looked.cache, settings)
        for width in WIDTHS:
            found = medians(
                {
                    str(setting): lambda drafter=drafter, width=width: call_s(drafter, width, arguments.device)
                    for setting, drafter in drafters.items()
                },
                arguments.rounds,
            )
            whole_s = found[str((None, 1))][0]
            cells = []
            for groups, top in settings[1:]:
                assert groups is not None
                seconds, tokens = found[str((groups, top))]
                asked = round(tokens / vocab * groups)
                cells.append(f"{groups} {top}: {seconds * 1e3:.1f} ({seconds / whole_s:.2f}, {asked})")
                results.append(
                    {"vocab": vocab, "nodes": width, "groups": groups, "top_groups": top, "asked": asked,
                     "routed_s": seconds, "whole_s": whole_s}
                )  # fmt: skip
            print(f"{vocab:>7} {width:>5} {whole_s * 1e3:>9.1f}  " + "   ".join(cells), flush=True)
        del drafters, looked, target  # gigabytes, before the next ones are made
    print(json.dumps({"hidden": arguments.hidden, "device": str(arguments.device), "cells": results}))


if __name__ == "__main__":
    main()
