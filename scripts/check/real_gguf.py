"""Published GGUF files as they are: their texts against transformers', and their ids against llama.cpp's.

Called by `scripts.check.real_files`. transformers gets the weights that the gguf library unpacks, in float32 and in
bf16; the engine gets the file, as target and as its own draft. All texts are to be equal, token by token.

In bf16, transformers' texts are others as they come, because two sums are rounded in another order, both from the first
layer on: torch multiplies one row by a kernel of its own, where the engine has oneDNN multiply two or more; and
attention of one row has the query heads of a group as rows of one product here. So transformers computes both in bf16
as the engine does, and nothing else. That is `quant=none`. Without it, matrices of four bits in even steps (Q4_K) are
put in int4's form where they are resident, whose scales are bf16: those texts are compared with plain decoding's.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.pair.pair import ModelPair, open_pair
from offload.layouts.onednn import hook_linear_layers
from scripts.check.gguf_folders import PublishedModel, read_weights

CONTEXT = 512
NODES = 16
FOLDED = "heads of one row folded"  # an attention of transformers
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
        with ExitStack() as undo:
            if dtype is torch.bfloat16:
                hook_linear_layers(theirs, dtype, undo)
                theirs.set_attn_implementation(FOLDED)
            expected = [greedy(theirs, pair, one, new_tokens) for one in ids]
        del theirs
        quants = ("none", None) if _has_int4_form(pair, dtype) else ("none",)
        for quant, resident in [*((quant, None) for quant in quants), ("none", 0)]:
            reference, whose = expected, "transformers'"
            for tree in (TreeSettings(policy="none"), TreeSettings(size=NODES)):
                found, rate = _texts(pair, ids, new_tokens, dtype=dtype, resident=resident, tree=tree, quant=quant)
                place = "streamed" if resident == 0 else "resident" if quant else "resident in int4's form"
                how = f"{place}, {'plain' if tree.policy == 'none' else 'trees'}"
                name = f"the file, {dtype}, {how}".replace("torch.", "")
                if quant is None and tree.policy == "none":
                    reference, whose = found, "plain decoding's"
                    continue
                equal = sum(ours == other for ours, other in zip(found, reference, strict=True))
                result = f"{equal}/{len(ids)} equal {whose}, {rate:.1f} tokens a pass"
                add(name, result, is_good=equal == len(ids))


def _has_int4_form(pair: ModelPair, dtype: torch.dtype) -> bool:
    """Return whether matrices are multiplied in int4's form once they are loaded."""
    packed = pair.target.skeleton(pair.target.checkpoint, dtype=dtype).packed
    layouts = [module.layout_at_load(dtype, torch.device("cpu")) for module in packed]
    return any(layout is not None and not layout.layout.is_slow for layout in layouts)


def _folded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return transformers' attention, that of one row as the engine computes it: [1, rows, heads, head_dim]."""
    if query.shape[2] != 1:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if window := kwargs.get("sliding_window"):
        key, value = key[:, :, -window:], value[:, :, -window:]
    rows = query.reshape(1, key.shape[1], -1, query.shape[-1])
    found = scaled_dot_product_attention(rows, key, value, scale=kwargs["scaling"])
    return found.reshape(query.shape).transpose(1, 2).contiguous(), None


AttentionInterface.register(FOLDED, _folded)


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
    dtype: torch.dtype, resident: int | None, tree: TreeSettings, quant: str | None,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Return the engine's texts, and the tokens that a pass brought."""
    with Engine.from_pair(
        pair, tree=tree, limits=MemoryLimits(max_resident_layers=resident), device="cpu",
        dtype=str(dtype).removeprefix("torch."), quant=quant, draft_quant=quant, context_tokens=CONTEXT,
    ) as one:  # fmt: skip
        results = [
            one.generate(ids, max_new_tokens=new_tokens, sampling=SamplingSettings(temperature=0), seed=0)
            for ids in prompts
        ]
    passes = [step for result in results for step in result.passes]
    rate = sum(len(step.tokens) for step in passes) / max(len(passes), 1)
    return [list(result.token_ids) for result in results], rate


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
