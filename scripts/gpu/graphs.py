"""A draft's passes that are recorded and replayed are those that are not; milliseconds of both.

The numbers of rows are none that passes are recorded for, so that all are padded. Each card records its own.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import next_rows
from edgespec.model.text_cache import TextCache
from scripts.gpu.card import half_dtype, random_llama, relative_difference, seconds
from scripts.gpu.finding import Finding, judged

SHAPE = (2048, 8192, 16)  # hidden, inner, layers: a draft of 1B
ROWS = (5, 17, 200)
CONTEXT = 1000
MOST_DIFFERENCE = 0.02


def check(*, is_full: bool) -> Finding:
    """Compare on the first card, and on the second where there is one."""
    hidden, inner, layers = SHAPE
    config = random_llama(hidden=hidden, inner=inner, layers=layers, head_dim=64, vocab=4096)
    table = []
    for index in range(min(2, torch.cuda.device_count())):
        with torch.cuda.device(index):
            table += compare(config, torch.device("cuda", index))
    ok = all(row["difference"] <= MOST_DIFFERENCE for row in table)  # not so for NaN
    return judged(ok, table, "recorded passes differ")


def compare(config: LlamaConfig, device: torch.device) -> list[dict[str, Any]]:
    """Return the times and differences of padded passes, after other passes were replayed."""
    dtype = half_dtype(device)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    hidden: dict[tuple[str, int], Tensor] = {}
    times: dict[tuple[str, int], float] = {}
    for way in ("plain", "graph"):
        causal = CausalModel(model, device=device, cuda_graphs=way == "graph")
        text = causal.new_text()
        ids = torch.arange(CONTEXT + max(ROWS), device=device) % config.vocab_size
        causal.read_text(text, ids[:CONTEXT])

        def call(count: int, causal: CausalModel = causal, text: TextCache = text, ids: Tensor = ids) -> Tensor:
            text.truncate()
            return causal.read([next_rows(text, ids[CONTEXT : CONTEXT + count])])[0]

        for count in ROWS:
            times[way, count] = 1000 * seconds(lambda count=count, call=call: call(count), repeats=20)
        for count in ROWS:  # once all are recorded: they share memory
            hidden[way, count] = call(count).float()
        causal.close()
    return [
        {
            "device": str(device),
            "rows": count,
            "plain_ms": times["plain", count],
            "graph_ms": times["graph", count],
            "difference": relative_difference(hidden["graph", count], hidden["plain", count]),
        }
        for count in ROWS
    ]
