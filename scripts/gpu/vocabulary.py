"""With a vocabulary of 128,256 tokens, texts through trees are those of plain decoding, above temperature 0 as well.

The model is random, in float32, and its own draft.
"""

import torch

from edgespec import Engine, TreeSettings
from scripts.gpu.card import random_llama, written
from scripts.gpu.finding import Finding, judged

VOCAB = 128_256
PROMPT = list(range(100, 140))


def check(*, is_full: bool, new_tokens: int = 48) -> Finding:
    """Compare texts at three temperatures; of sampled trees, greedy ones."""
    torch.backends.cuda.matmul.allow_tf32 = False
    report = {}
    config = random_llama(hidden=1024, inner=2048, layers=4, vocab=VOCAB)
    with written(config, config) as pair:
        for policy, draw in (("adaptive", "coupled"), ("dyspec", "sampled")):
            tree = TreeSettings(policy=policy, size=64, draw=draw)
            with Engine.from_pair(pair, tree=tree, device="cuda", dtype="float32", context_tokens=256) as engine:
                for temperature in (0.0, 0.7, 1.0):
                    (verdict,) = engine.verify_lossless([PROMPT], max_new_tokens=new_tokens, temperature=temperature)
                    report[f"{draw}, temperature {temperature}"] = {
                        "is_lossless": verdict.is_lossless,
                        "tokens": verdict.num_tokens,
                    }
    return judged(all(row["is_lossless"] for row in report.values()), report, "texts differ from plain decoding's")
