"""How often what followed some tokens before follows them again, in held-out Python sources: the priors of lookup.

    python -m scripts.make.lookup_priors

Every text is read token by token with the built-in pair's tokenizer, and each token is compared with the likeliest
continuation of the longest match before it, by its class (`edgespec/draft/lookup_acceptance.py`). Printed are the rows
of `PRIORS`, drawn to the shorter match's by 20 tokens, with the tokens of each cell, then the microseconds that a token
of a text and a step's candidates take, and the bytes of a token.
"""

import argparse
import json
import statistics
import time
import tracemalloc

from edgespec.draft.lookup import TextLookup
from edgespec.draft.lookup_acceptance import MATCHES, NUM_KINDS, cell_of
from edgespec.draft.suffix_automaton import SuffixAutomaton
from edgespec.pair.pair import open_pair
from scripts.situations import held_out_halves

DRAWN = 20.0  # tokens of the next shorter matches' chance that a class begins with


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=2000, help="of a text, at most")
    arguments = parser.parse_args()
    tokenizer = open_pair(None, None).tokenizer
    texts = [
        tokenizer.encode(text, verbose=False)[: arguments.tokens] for text in held_out_halves()[0][: arguments.texts]
    ]
    hits, totals = [0.0] * NUM_KINDS * (len(MATCHES) + 1), [0.0] * NUM_KINDS * (len(MATCHES) + 1)
    for ids in texts:
        automaton = SuffixAutomaton()
        for token in ids:
            state = automaton.links[automaton.last] if automaton.num_tokens else 0
            after = automaton.transitions[state] if state > 0 else {}
            if after:
                counts = {other: automaton.counts[behind] for other, behind in after.items()}
                total = sum(counts.values())
                # The best one, and the next, of which there are few.
                for other, count in sorted(counts.items(), key=lambda pair: pair[1], reverse=True)[:2]:
                    cell = cell_of(automaton.lengths[state], count, total)
                    hits[cell] += other == token
                    totals[cell] += 1
            automaton.append(token)
    chances = [sum(hits) / sum(totals)] * NUM_KINDS  # of the row before
    for row in range(len(MATCHES) + 1):
        cells = range(NUM_KINDS * row, NUM_KINDS * (row + 1))
        chances = [
            (hits[cell] + DRAWN * before) / (totals[cell] + DRAWN) for cell, before in zip(cells, chances, strict=True)
        ]
        print(f"    ({', '.join(f'{chance:.2f}' for chance in chances)}),  # of {[round(totals[c]) for c in cells]}")
    print(json.dumps(costs(texts)))


def costs(texts: list[list[int]]) -> dict[str, float]:
    """The microseconds of a token and of a step's candidates, and the bytes of a token."""
    reading, proposing = [], []
    for ids in texts:
        lookup = TextLookup()
        lookup.begin(ids[:10])
        lookup.candidates(1, depth=1, least=1.0)
        started = time.perf_counter()
        lookup.add(ids[10:])
        reading.append((time.perf_counter() - started) / max(1, len(ids) - 10))
        for most in (64,):
            started = time.perf_counter()
            lookup.candidates(most, depth=64, least=0.05)
            proposing.append(time.perf_counter() - started)
    tracemalloc.start()
    automaton = SuffixAutomaton()
    automaton.extend(token for ids in texts for token in ids)
    size = tracemalloc.get_traced_memory()[0] / automaton.num_tokens
    tracemalloc.stop()
    return {
        "token_us": 1e6 * statistics.median(reading),
        "candidates_us": 1e6 * statistics.median(proposing),
        "token_bytes": size,
    }


if __name__ == "__main__":
    main()
