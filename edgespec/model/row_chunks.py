"""Chunks of rows whose logits exist at once.

Logits [n, vocab] of a large tree and vocabulary would not fit, so they are made chunk by chunk. Legend: n rows.
"""

from collections.abc import Iterator

CHUNK_BYTES = 32 << 20  # of float32 logits at once
FLOAT32_BYTES = 4


def rows_at_once(vocab: int) -> int:
    """Return the number of rows whose float32 logits fit a chunk, one at least."""
    return max(1, CHUNK_BYTES // (FLOAT32_BYTES * vocab))


def row_chunks(num_rows: int, vocab: int) -> Iterator[slice]:
    """Return the rows 0 … n - 1 in chunks."""
    step = rows_at_once(vocab)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
