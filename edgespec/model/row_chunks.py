"""The number of rows that the head turns into logits at once is bounded.

Logits [n, vocab] of a large tree would not fit beside a large vocabulary, so whoever needs logits of many
rows makes them chunk by chunk. Legend: n rows, vocab columns.
"""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_BYTES = 32 << 20  # of float32 logits at once
FLOAT32_BYTES = 4


def rows_at_once(vocab: int) -> int:
    """Return how many rows' float32 logits fit a chunk, one at least."""
    return max(1, CHUNK_BYTES // (FLOAT32_BYTES * vocab))


def row_chunks(num_rows: int, vocab: int) -> Iterator[slice]:
    """Return the rows 0 … n - 1 in chunks."""
    step = rows_at_once(vocab)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
