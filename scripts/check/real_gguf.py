"""Published GGUF files as they are: their texts against transformers', and their ids against llama.cpp's.

Called by `scripts.check.real_files`. transformers gets the weights that the gguf library unpacks, in float32 and in
bf16; the engine gets the file, as target and as its own draft. Weights are unpacked in each pass here: a CPU that
multiplies Q4_1 as it is packed rounds scales to bf16, which is another number format. In bf16 oneDNN and torch round
sums in another order: where texts part there, transformers' own logits of both tokens are to be as good as equal.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.pair.pair import ModelPair, open_pair
from scripts.check.gguf_folders import PublishedModel, read_weights

CONTEXT = 512
NODES = 16
ROUNDING = 2**-6  # of a logit in bf16, which has eight bits: a few of its steps
Generate = Callable[[PreTrainedModel, ModelPair, list[int], int], list[int]]


class Add(Protocol):
    """Prints a line of the table."""

    def __call__(self, name: str, result: str, *, is_good: bool) -> None:
        """Print it, and count what is not good."""


def check_file(
    model: PublishedModel, file: Path, texts: Sequence[str], new_tokens: int, *, greedy: Generate, add: Add
) -> None:
    """Run all checks of one file; `greedy` makes transformers' own texts."""
    pair = open_pair(file, file)
    print(f"{file.name}: vocabulary {pair.vocab:,}, {len(texts)} prompts, {new_tokens} new tokens, as target and draft")
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    check_ids(file, texts, ids, pair.stop_tokens, add)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = _transformers(model, file, dtype)
        expected = [greedy(theirs, pair, one, new_tokens) for one in ids]
        for resident in (None, 0):
            for tree in (TreeSettings(policy="none"), TreeSettings(size=NODES)):
                found, rate = _texts(pair, ids, new_tokens, dtype=dtype, resident=resident, tree=tree)
                texts_of_each = list(zip(ids, expected, found, strict=True))
                equal = sum(other == ours for _, other, ours in texts_of_each)
                near = sum(_is_near(theirs, *each) for each in texts_of_each if each[1] != each[2])
                how = f"{'streamed' if resident == 0 else 'resident'}, {'plain' if tree.policy == 'none' else 'trees'}"
                rounding = f", {near} within rounding" if near else ""
                add(
                    f"the file, {dtype}, {how}".replace("torch.", ""),
                    f"{equal}/{len(ids)} equal{rounding}, {rate:.1f} tokens a pass",
                    is_good=equal + (near if dtype is torch.bfloat16 else 0) == len(ids),
                )


def _transformers(model: PublishedModel, file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model with the file's weights, rounded once."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    missing, unexpected = found.load_state_dict(read_weights(model, file, config, dtype), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    found.tie_weights()
    return found


def _texts(
    pair: ModelPair, prompts: list[list[int]], new_tokens: int, *,
    dtype: torch.dtype, resident: int | None, tree: TreeSettings,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Return the engine's texts, and the tokens that a pass brought."""
    with Engine.from_pair(
        pair, tree=tree, limits=MemoryLimits(max_resident_layers=resident), device="cpu",
        dtype=str(dtype).removeprefix("torch."), quant="none", draft_quant="none", context_tokens=CONTEXT,
    ) as one:  # fmt: skip
        results = [
            one.generate(ids, max_new_tokens=new_tokens, sampling=SamplingSettings(temperature=0), seed=0)
            for ids in prompts
        ]
    passes = [step for result in results for step in result.passes]
    rate = sum(len(step.tokens) for step in passes) / max(len(passes), 1)
    return [list(result.token_ids) for result in results], rate


@torch.no_grad()
def _is_near(model: PreTrainedModel, prompt: list[int], theirs: list[int], ours: list[int]) -> bool:
    """Return whether transformers' logits of the first tokens that differ are equal but for bf16's rounding."""
    same = next(place for place, pair in enumerate(itertools.zip_longest(theirs, ours)) if pair[0] != pair[1])
    if same >= min(len(theirs), len(ours)):
        return False
    logits = model(input_ids=torch.tensor([prompt + theirs[:same]])).logits[0, -1].float()
    return bool(logits.max() - logits[ours[same]] <= ROUNDING * logits.max().abs())


def check_ids(file: Path, texts: Sequence[str], ids: list[list[int]], ends: frozenset[int], add: Add) -> None:
    """Compare the ids of texts, and the tokens that end one, with llama.cpp's, where xllamacpp is installed."""
    try:
        llama = importlib.import_module(f"{__package__}.gguf_tokenizers").Llama()
    except ImportError as error:
        print(f"  ids are not compared with llama.cpp's: {error}")
        return
    theirs, their_ends = llama.ids(file, texts)
    equal = sum(ours == other for ours, other in zip(ids, theirs, strict=True))
    add("ids, against llama.cpp's", f"{equal}/{len(texts)} equal", is_good=equal == len(texts))
    # It also ends texts at '</s>' where that is a word of its own, as in Gemma's.
    add("ends of texts, against llama.cpp's", f"{sorted(ends)} of {their_ends}", is_good=ends <= set(their_ends))
