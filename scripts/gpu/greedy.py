"""The built-in pair's greedy texts through trees, in float32, are those of transformers on the same device."""

import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.pair.pair import open_pair
from scripts.gpu.card import DEVICE, NEW_TOKENS, PROMPTS
from scripts.gpu.finding import Finding, judged


def check(*, is_full: bool, new_tokens: int = NEW_TOKENS) -> Finding:
    """Compare the texts of the built-in prompts."""
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = open_pair(None, None)
    prompts = [pair.tokenizer.encode(row.prompt) for row in read_prompts(str(PROMPTS), lines=False)]
    model = AutoModelForCausalLM.from_pretrained(pair.target.folder, dtype=torch.float32).to(DEVICE)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
        expected.append(found[0, len(prompt) :].tolist())
    equal, tokens, passes = 0, 0, 0
    limits = MemoryLimits(max_resident_layers=2)
    with Engine.from_pair(pair, tree=TreeSettings(size=64), device="cuda", dtype="float32", limits=limits) as engine:
        for prompt, plain in zip(prompts, expected, strict=True):
            result = engine.generate(prompt, max_new_tokens=new_tokens, sampling=SamplingSettings())
            equal += list(result.token_ids) == plain
            tokens, passes = tokens + len(result.token_ids) - 1, passes + len(result.passes)
    found = {"equal_prompts": equal, "prompts": len(prompts), "tokens_per_pass": tokens / max(1, passes)}
    return judged(equal == len(prompts), found, f"{equal} of {len(prompts)} texts are equal")
