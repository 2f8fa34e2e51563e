"""SpecInfer's second draft: a copy of the draft, tuned on further where the first one is not the target's choice.

Source: SpecInfer, section 3 (merge-based speculation). A draft is tuned on the target's own choices, those that it
guesses are left out, and the next one is tuned on the rest. The paper leaves out whole samples; here it is tokens.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from edgespec.engine import Engine
from edgespec.model.causal_model import CausalModel
from edgespec.pair.pair import open_pair
from edgespec.tree.settings import TreeSettings
from scripts.make.demo_pair import encode, is_held_out, sample_windows, save_pair_member, standard_library_sources

WINDOWS, WINDOW_TOKENS = 128, 192  # of modules that no context is cut from
ROUNDS, BATCH, LEARNING_RATE = 4, 8, 1e-3


@functools.cache
def boosted_draft(engine: Engine) -> CausalModel:
    """The draft of the engine's pair, tuned on tokens of the target's that it does not guess."""
    pair = engine.pair
    assert pair.draft is not None
    target, draft = (_opened(model.folder) for model in (pair.target, pair.draft))
    texts = [text for name, text in standard_library_sources() if not is_held_out(name)]
    generator = torch.Generator().manual_seed(0)
    windows = sample_windows(encode(pair.tokenizer, texts), windows=WINDOWS, length=WINDOW_TOKENS, generator=generator)
    wanted = _choices(target, windows)
    wanted[wanted == _choices(draft, windows)] = -100  # those are left out
    tune(draft, windows, wanted, generator=generator)
    folder = Path(tempfile.mkdtemp(prefix="edgespec-boosted-"))
    save_pair_member(draft, pair.tokenizer, folder)
    second = Engine.from_pair(open_pair(pair.target.folder, folder), tree=TreeSettings(size=64), self_check=False)
    assert second.draft_model is not None
    return second.draft_model


def tune(model: PreTrainedModel, windows: Tensor, wanted: Tensor, *, generator: torch.Generator) -> None:
    """Fit the model in place to the tokens wanted behind each of windows [windows, tokens]; -100 is of no matter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    num_steps = ROUNDS * -(-len(windows) // BATCH)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    for _ in range(ROUNDS):
        for rows in torch.randperm(len(windows), generator=generator).split(BATCH):
            logits = model(input_ids=windows[rows], use_cache=False).logits.float()
            functional.cross_entropy(logits.flatten(0, 1), wanted[rows].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            rate.step()


def _opened(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.no_grad()
def _choices(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The most probable token behind each of windows [windows, tokens]."""
    parts = [model(input_ids=rows, use_cache=False).logits.argmax(-1) for rows in windows.split(BATCH)]
    return torch.cat(parts)
