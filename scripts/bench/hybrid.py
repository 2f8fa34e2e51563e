"""Is a model with recurrent layers faster with trees than without, where its weights come from the disk?

    python -m scripts.make.hybrid hybrid
    python -m scripts.make.inflate hybrid/large --source hybrid/target --params 500M
    python -m scripts.bench.hybrid hybrid/large hybrid/draft

No layer is ever found in the page cache, and the target has the memory of --limit. Both ways of decoding take every
prompt in turn, on one loaded pair: plainly, and with the trees of the default settings, which tune themselves. Prints
tokens a second of each round, behind the first tokens; tokens a pass; and how many texts are equal, token by token:
all in float32, while bf16 rounds a batch of rows otherwise than a row alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from edgespec import Engine, MemoryLimits, SamplingSettings
from edgespec.config import parse_size
from edgespec.doctor.benchmark import Round, compare_modes
from edgespec.pair.pair import open_pair
from edgespec.placement.pair_setup import set_up_by_profile
from edgespec.placement.run_config import resolve_run_config
from edgespec.text.request import TextOptions
from edgespec.tree.settings import TreeOptions
from scripts.situations import GIB, SEED, drop_behind_reader, read_texts, write_prompts


def main() -> None:
    """Load the pair, and run both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the inflated hybrid")
    parser.add_argument("draft", type=Path, help="its draft")
    parser.add_argument("--limit", default="512MiB", help="of memory, for all that is planned [512MiB]")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pair = open_pair(arguments.target, arguments.draft)
    drop_behind_reader(pair)
    with tempfile.TemporaryDirectory() as folder:
        texts = read_texts(write_prompts(Path(folder), arguments.num_prompts))
    prompts = [pair.tokenizer.encode(text) for text in texts]
    longest = max(map(len, prompts))
    run_config = resolve_run_config(
        pair.target,
        pair.max_context,
        draft=pair.draft,
        limits=MemoryLimits(max_resident_layers=0, max_cpu_bytes=parse_size(arguments.limit)),
        dtype=arguments.dtype,
        context_tokens=longest + arguments.new_tokens,
        prompt_tokens=longest,
    )
    sampling = SamplingSettings(temperature=arguments.temperature, top_p=0.95 if arguments.temperature else 1.0)
    setup = set_up_by_profile(pair, run_config, TreeOptions(), temperature=arguments.temperature)
    with Engine(setup) as engine:
        placement = engine.placement
        print(f"{placement.streamed_bytes / GIB:.2f} GiB a pass in {arguments.dtype}, "
              f"{placement.planned_bytes / GIB:.2f} GiB of memory planned", flush=True)  # fmt: skip
        options: TextOptions = {"sampling": sampling, "max_new_tokens": arguments.new_tokens, "seed": SEED}
        rounds = compare_modes(engine, prompts, options=options, repeats=arguments.repeats, progress=say)
        words = engine.trees_in_use(sampling)
    for mode, found in rounds.items():
        print(f"{mode:>6} {described(found)}")
    plain, tree = (statistics.median(one.tokens_per_s for one in found) for found in rounds.values())
    both = [pair for each in zip(*rounds.values(), strict=True) for pair in zip(*(r.texts for r in each), strict=True)]
    equal = sum(ours.token_ids == theirs.token_ids for ours, theirs in both)
    print(f"trees over plain decoding: {tree / plain:.2f}; {equal} of {len(both)} texts equal; {words}")


def say(done: int, total: int) -> None:
    """How far it is."""
    print(f"{done} of {total} texts", file=sys.stderr)


def described(rounds: list[Round]) -> str:
    """A mode's line."""
    per_s = ", ".join(f"{found.tokens_per_s:.2f}" for found in rounds)
    per_pass = statistics.mean(found.tokens_per_pass for found in rounds)
    return f"{per_s} tokens/s by round, {per_pass:.2f} tokens a pass"


if __name__ == "__main__":
    main()
