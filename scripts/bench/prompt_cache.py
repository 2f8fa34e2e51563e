"""What the first turn behind a long system prompt waits for, with and without a prompt cache on disk.

    python -m scripts.bench.prompt_cache -m LARGE -md edgespec/demo/draft --max-cpu-mem 1300MiB

A conversation with a system prompt of so many tokens is asked its first question: once with a file that is written
then, and after that, in turns, without the file and with it. Before each question the target's files are dropped from
the page cache, so that weights come from disk. Opening the prompt cache, which checks it whole, counts as waiting.
Prints seconds to the first token (medians, lowest and highest), the file's size, and one JSON line. Answers must be
equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import parse_size
from edgespec.prefix_cache.prompt_cache import PromptCache
from profiles.measure import drop_page_cache
from scripts.bench.chat import long_text
from scripts.situations import GIB

QUESTION = "def total(values):"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="the target")
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--max-cpu-mem", type=parse_size, help="less than the target needs, so that it streams")
    parser.add_argument("--tokens", type=int, default=2000, help="of the system prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.from_pretrained(
            asked.model,
            draft=asked.draft_model,
            tree=TreeSettings(size=16),
            limits=MemoryLimits(max_cpu_bytes=asked.max_cpu_mem),
            context_tokens=asked.tokens + asked.new_tokens + 64,
        ) as engine,
    ):
        tokenizer = engine.pair.tokenizer
        system = str(tokenizer.decode(tokenizer.encode(long_text()[: 20 * asked.tokens])[: asked.tokens]))
        file = Path(folder) / "system.safetensors"
        written_s, expected = first_turn(engine, system, asked.new_tokens, file)
        found: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(asked.repeats):
            for name, path in (("without", None), ("with", file)):
                seconds, tokens = first_turn(engine, system, asked.new_tokens, path)
                if tokens != expected:
                    raise SystemExit(f"the answer {name} the prompt cache is another one")
                found[name].append(seconds)
        placement = engine.placement
        size_bytes = file.stat().st_size
    layers = f"{placement.num_resident} of {placement.num_layers} layers resident"
    streamed = f"{placement.streamed_bytes / GIB:.2f} GiB streamed a pass"
    print(f"{layers}, {streamed}; {asked.tokens} tokens, a file of {size_bytes / 2**20:.1f} MiB")
    medians = {name: statistics.median(own) for name, own in found.items()}
    for name, own in found.items():
        print(f"first token {name:<8}{medians[name]:8.2f} s ({min(own):.2f} to {max(own):.2f})")
    print(f"{medians['without'] / medians['with']:.1f} times sooner; the turn that wrote the file: {written_s:.2f} s")
    print(json.dumps({"tokens": asked.tokens, "first_token_s": found, "written_s": written_s, "bytes": size_bytes}))
    return 0


def first_turn(engine: Engine, system: str, new_tokens: int, path: Path | None) -> tuple[float, tuple[int, ...]]:
    """Return the seconds until a new conversation's first token, and its tokens."""
    engine.forget()
    drop_page_cache(sorted(engine.pair.target.folder.glob("*.safetensors")))
    started = time.perf_counter()
    chat = engine.chat(system=system, temperature=0, max_new_tokens=new_tokens)
    cache = None if path is None else PromptCache(path, engine.pair, engine.run_config)
    if cache is not None:
        cache.keep_beginning([chat.first_ids(QUESTION)])
    engine.prefix_cache.prompt_cache = cache
    opened_s = time.perf_counter() - started
    result = chat.send(QUESTION)
    return opened_s + result.time_to_first_token_s, result.token_ids


if __name__ == "__main__":
    sys.exit(main())
