"""A model in 16 bits reads rows behind 3,000 tokens as it reads all at once: inside it, attention is in two parts.

And a pair's texts behind so many are those of plain decoding, near ties aside.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from edgespec import Engine, TreeSettings
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import next_rows
from scripts.gpu.card import DEVICE, half_dtype, random_llama, relative_difference, written
from scripts.gpu.finding import Finding, judged

CONTEXT = 3000
MOST_DIFFERENCE = 0.03  # of 16-bit formats


def check(*, is_full: bool) -> Finding:
    """Compare the last hidden states of few and of many rows, then texts."""
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
    del causal, model
    lossless = lossless_texts(config)
    ok = all(row["difference"] <= MOST_DIFFERENCE for row in table)  # not so for NaN
    return judged(
        ok and all(lossless.values()),
        {"dtype": str(dtype), "context": CONTEXT, "table": table, "lossless": lossless},
        "hidden states or texts differ",
    )


def lossless_texts(config: LlamaConfig) -> dict[float, bool]:
    """Return whether texts of a pair in 16 bits are plain decoding's: temperature -> verdict."""
    prompt = [1 + place % 2000 for place in range(CONTEXT)]
    found = {}
    with (
        written(config, config) as pair,
        Engine.from_pair(
            pair, tree=TreeSettings(size=64), device="cuda", dtype=half_dtype(), context_tokens=CONTEXT + 100
        ) as engine,
    ):
        for temperature in (0.0, 0.7):
            (verdict,) = engine.verify_lossless([prompt], max_new_tokens=24, temperature=temperature, ignore_eos=True)
            found[temperature] = verdict.is_lossless
    return found
