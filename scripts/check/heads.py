"""Is text that feature heads drafted the target's own? Token by token at temperature 0, and in distribution.

    python -m scripts.check.heads HEAD [HEAD ...]

For every head of the built-in target: chain, eagle2, dyspec and adaptive trees give plain decoding's greedy tokens on
the sample prompts; and many draws of three tokens behind one prompt, through dyspec's trees (sampled children,
rejection) and opt-tree's (chosen children, membership), are compared with the target's probabilities by chi-square.
Prints a line a head and tree; exit status 1 where a text differs or a p-value is below 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from scipy import stats

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import TextSettings
from edgespec.decode.start import start_sequence
from edgespec.draft.feature_head import open_drafter
from edgespec.grow.policies import open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.target import Target
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import TextNoise

TARGET = DEMO_FOLDER / "target"
GREEDY_TREES = {
    "chain 4": TreeSettings(policy="chain", draft_tokens=4, lookup=False),
    "eagle2 60": TreeSettings(policy="eagle2", size=60, depth=6, lookup=False),
    "dyspec 64": TreeSettings(policy="dyspec", size=64, lookup=False),
    "adaptive 64": TreeSettings(policy="adaptive", size=64, lookup=False),
}
SAMPLED_TREES = {
    "dyspec 8": TreeSettings(policy="dyspec", size=8, depth=2),
    "opt-tree 8": TreeSettings(policy="opt-tree", size=8, depth=2),
}
SAMPLING = SamplingSettings(temperature=1.0, top_k=40)
BOUND = 1e-4
NUM_TOKENS = 3
MIN_EXPECTED = 5.0  # draws of a text; rarer ones are counted together


def greedy_is_equal(head: Path, prompts: list[str], new_tokens: int) -> bool:
    """Every tree against plain decoding; prints a line each."""
    with Engine.from_pair(open_pair(TARGET, None), self_check=False) as engine:
        expected = [engine.generate(text, temperature=0.0, max_new_tokens=new_tokens).token_ids for text in prompts]
    is_equal = True
    for name, tree in GREEDY_TREES.items():
        with Engine.from_pair(open_pair(TARGET, head), tree=tree, self_check=False) as engine:
            found = [engine.generate(text, temperature=0.0, max_new_tokens=new_tokens) for text in prompts]
        same = sum(result.token_ids == ids for result, ids in zip(found, expected, strict=True))
        passes = sum(len(result.steps) - 1 for result in found)
        tokens = sum(len(result.token_ids) - 1 for result in found)
        print(f"{head.name} {name}: {same} of {len(prompts)} texts equal, {tokens / passes:.2f} tokens a pass")
        is_equal &= same == len(prompts)
    return is_equal


def p_value(head: Path, tree: TreeSettings, prompt: str, num_draws: int) -> float:
    """Chi-square of the next tokens behind a prompt: the first from the prompt's pass, the others through trees."""
    with Engine.from_pair(open_pair(TARGET, head), tree=tree, self_check=False) as engine:
        assert engine.draft_model is not None
        ids = [*engine.encode(prompt)]
        target = Target(engine.target_model)
        drafter = open_drafter(engine.draft_model, target, sampling=tree.draft_sampling(SAMPLING))
        policy = open_policy(tree)
        generator = torch.Generator().manual_seed(3)
        settings = TextSettings(sampling=SAMPLING, max_new_tokens=NUM_TOKENS + 1)

        def p_after(text: list[int]) -> torch.Tensor:
            return to_probs(target.prefill(torch.tensor(text))[None], SAMPLING)[0]

        counts: Counter[tuple[int, ...]] = Counter()
        for key in range(num_draws):
            noise = TextNoise(seed=3, key=key, vocab=target.vocab, device=engine.device)
            draws = TextDraws(sampling=SAMPLING, device=engine.device, generator=generator, noise=noise)
            session = start_sequence(target, drafter, policy, settings, draws)
            steps = decode(session, ids)
            counts[tuple(token for step in steps for token in step.tokens)[:NUM_TOKENS]] += 1
        often: dict[tuple[int, ...], float] = {(): float(num_draws)}
        for _ in range(NUM_TOKENS):  # texts that are drawn often, and how often
            often = {
                (*tokens, token): mean * float(p)
                for tokens, mean in often.items()
                for token, p in enumerate(p_after([*ids, *tokens]))
                if mean * float(p) >= MIN_EXPECTED
            }
    observed = [*(float(counts[tokens]) for tokens in often)]
    observed.append(num_draws - sum(observed))
    means = [*often.values(), num_draws - sum(often.values())]
    return float(stats.chisquare(observed, means, sum_check=False).pvalue)


def main() -> None:
    """All heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, nargs="+")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("-n", "--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = (DEMO_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    is_sound = True
    for head in arguments.heads:
        is_sound &= greedy_is_equal(head, prompts, arguments.new_tokens)
        for name, tree in SAMPLED_TREES.items():
            p = p_value(head, tree, prompts[0], arguments.draws)
            print(f"{head.name} {name}: chi-square p {p:.3g} over {arguments.draws} draws", flush=True)
            is_sound &= p >= BOUND
    sys.exit(0 if is_sound else 1)


if __name__ == "__main__":
    main()
