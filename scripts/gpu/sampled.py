"""Sampled trees on the card draw tokens as often as the model says on the processor, in float32, at temperature 2.

Texts of one prompt have two tokens each. The second comes of a tree, whose draws are verified on the card; it falls
among the likeliest tokens after the first, or among the others, as often as the built-in model's own probabilities say
on the processor. A correct card is called wrong once in ten million runs.
"""

import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.pair.pair import ModelPair, open_pair
from scripts.gpu.card import PROMPTS
from scripts.gpu.finding import Finding, judged

TEXTS, AT_ONCE, PROMPT_TOKENS = 1000, 16, 16
LIKELIEST = 4  # tokens with a count of their own
MOST = 40.0  # of a chi-square with as many degrees of freedom
TEMPERATURE = 2.0  # where many tokens are likely


def check(*, is_full: bool, texts: int = TEXTS) -> Finding:
    """Count the ranks of second tokens."""
    pair = open_pair(None, None)
    prompt = pair.tokenizer.encode(next(iter(read_prompts(str(PROMPTS), lines=False))).prompt)
    prompt = prompt[:PROMPT_TOKENS]
    return compared(pair, prompt, drawn_on_card(pair, prompt, texts), num_texts=texts)


def drawn_on_card(pair: ModelPair, prompt: list[int], num_texts: int) -> list[tuple[int, ...]]:
    """Return the tokens of texts."""
    tree = TreeSettings(policy="dyspec", draw="sampled", size=4)
    with Engine.from_pair(pair, tree=tree, device="cuda", dtype="float32", parallel=AT_ONCE) as engine:
        requests = [
            engine.request(prompt, max_new_tokens=2, temperature=TEMPERATURE, seed=seed, name=str(seed),
                           ignore_eos=True)
            for seed in range(num_texts)
        ]  # fmt: skip
        return [text.token_ids for _, text in engine.generate_many(requests) if not isinstance(text, Exception)]


def compared(
    pair: ModelPair,
    prompt: list[int],
    drawn: list[tuple[int, ...]],
    *,
    num_texts: int,
    temperature: float = TEMPERATURE,
) -> Finding:
    """Return how far the counts of ranks are from those that the processor's probabilities make one expect."""
    model = AutoModelForCausalLM.from_pretrained(pair.target.folder, dtype=torch.float32)
    counts, expected = torch.zeros(LIKELIEST + 1), torch.zeros(LIKELIEST + 1)
    with torch.no_grad():
        for first in {tokens[0] for tokens in drawn}:
            seconds = torch.tensor([tokens[1] for tokens in drawn if tokens[0] == first])
            logits = model(torch.tensor([[*prompt, first]])).logits[0, -1] / temperature
            p, likeliest = logits.softmax(-1).topk(LIKELIEST)
            hits = (seconds[:, None] == likeliest).sum(0)
            counts += torch.cat([hits, (len(seconds) - hits.sum())[None]])
            expected += len(seconds) * torch.cat([p, 1 - p.sum(0, keepdim=True)])
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1.0)).sum().item()
    found = {"texts": len(drawn), "counts": counts.tolist(), "expected": expected.tolist(), "chi_square": chi_square}
    return judged(len(drawn) == num_texts and chi_square <= MOST, found, "tokens are drawn otherwise, or texts failed")
