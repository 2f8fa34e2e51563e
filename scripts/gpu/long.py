"""A model in 16 bits reads rows behind 3,000 tokens as it reads all at once: inside it, attention is in two parts."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import next_rows
from scripts.gpu.card import DEVICE, half_dtype, random_llama, relative_difference
from scripts.gpu.finding import Finding, judged

CONTEXT = 3000
MOST_DIFFERENCE = 0.03  # of 16-bit formats


def check(*, is_full: bool) -> Finding:
    """Compare the last hidden states of few and of many rows."""
    config = random_llama(hidden=1024, inner=4096, layers=4, head_dim=64)
    dtype = half_dtype()
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    causal = CausalModel(model, device=DEVICE)
    table = []
    for rows in (1, 64, 256):
        ids = torch.arange(CONTEXT + rows, device=DEVICE) % config.vocab_size
        whole, text = causal.new_text(), causal.new_text()
        (expected,) = causal.read([next_rows(whole, ids)])
        causal.read_text(text, ids[:CONTEXT])
        (found,) = causal.read([next_rows(text, ids[CONTEXT:])])
        table.append({"rows": rows, "difference": relative_difference(found, expected[-rows:])})
    causal.close()
    ok = all(row["difference"] <= MOST_DIFFERENCE for row in table)  # not so for NaN
    return judged(ok, {"dtype": str(dtype), "context": CONTEXT, "table": table}, "hidden states differ")
