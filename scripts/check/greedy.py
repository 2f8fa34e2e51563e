"""Compare greedy decoding through trees with transformers' generate, token by token.

    python -m scripts.check.greedy                       the built-in pair, its sample prompts
    python -m scripts.check.greedy -m TARGET -md DRAFT   any pair of folders

Both run in float32. Exits 1 when a token differs, after printing where, and how close the two
candidates' logits are in plain decoding: below about 1e-3 it is rounding.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.config import parse_size
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from scripts.situations import exit_with


def plain_tokens(model: torch.nn.Module, prompt: list[int], stop: list[int], new_tokens: int) -> list[int]:
    """What transformers' own greedy decoding gives."""
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=stop,
        pad_token_id=stop[0],
        temperature=None,
        top_k=None,
        top_p=None,
        repetition_penalty=1.0,
    )
    return found[0, len(prompt) :].tolist()


@torch.no_grad()
def describe_difference(model: torch.nn.Module, prompt: list[int], ours: list[int], plain: list[int]) -> str:
    """The first place where they differ, and the gap between the two tokens' logits there."""
    length = min(len(ours), len(plain))
    index = next((i for i in range(length) if ours[i] != plain[i]), length)
    if index == length:
        return f"lengths differ: {len(ours)} and {len(plain)}"
    ids = torch.tensor([prompt + plain[:index]], device=next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, -1]
    gap = float(logits[plain[index]] - logits[ours[index]])
    return f"token {index}: {ours[index]} instead of {plain[index]}, logit gap {gap:.2e}"


def count_differences(
    engine: Engine, model: torch.nn.Module, prompts: list[list[int]], expected: list[list[int]], new_tokens: int
) -> int:
    """Run one configuration over all prompts and print its line."""
    different, passes, tokens = 0, 0, 0
    for index, (prompt, plain) in enumerate(zip(prompts, expected, strict=True)):
        result = engine.generate(prompt, max_new_tokens=new_tokens, sampling=SamplingSettings(temperature=0), seed=0)
        passes += len(result.passes)
        tokens += len(result.token_ids) - 1
        if list(result.token_ids) != plain:
            different += 1
            print(f"    prompt {index}: {describe_difference(model, prompt, list(result.token_ids), plain)}")
    tree, placement = engine.tree, engine.placement
    name = "plain" if tree.policy == "none" else f"{tree.policy} {tree.size}"
    name += f", {placement.num_layers - placement.num_resident} layers streamed"
    equal = f"{len(prompts) - different}/{len(prompts)} prompts equal"
    print(f"{name:<32} {equal}   {tokens / max(passes, 1):.2f} tokens a pass")
    return different


def main() -> int:
    """Check every configuration; the number of differing texts decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--prompts", default=str(DEMO_FOLDER / "prompts.jsonl"))
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 768])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-cpu-mem", type=parse_size, help="also bounds what stays resident")
    parser.add_argument("-ngl", "--gpu-layers", type=int, help="layers that stay resident; the others stream")
    arguments = parser.parse_args()

    pair = open_pair(arguments.model, arguments.draft_model)
    prompts = [pair.tokenizer.encode(row.prompt) for row in read_prompts(arguments.prompts, lines=False)]
    model = AutoModelForCausalLM.from_pretrained(pair.target.folder, dtype=torch.float32).to(arguments.device).eval()
    stop = sorted(pair.stop_tokens)
    expected = [plain_tokens(model, prompt, stop, arguments.max_new_tokens) for prompt in prompts]
    print(f"{pair.target.folder}: {len(prompts)} prompts, {arguments.max_new_tokens} new tokens, float32")
    limits = MemoryLimits(max_cpu_bytes=arguments.max_cpu_mem, max_resident_layers=arguments.gpu_layers)
    trees = [TreeSettings(policy="none"), *(TreeSettings(size=size) for size in arguments.sizes)]
    different = 0
    for tree in trees if pair.draft is not None else trees[:1]:
        with Engine.from_pair(
            pair,
            tree=tree,
            limits=limits,
            device=arguments.device,
            dtype="float32",
            context_tokens=max(map(len, prompts)) + arguments.max_new_tokens,
        ) as engine:
            different += count_differences(engine, model, prompts, expected, arguments.max_new_tokens)
    if pair.draft is None:
        print("no draft: trees were not checked")
    print("equal" if different == 0 else f"{different} texts differ")
    return min(different, 1)


if __name__ == "__main__":
    exit_with(main)
