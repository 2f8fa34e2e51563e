"""SentencePiece's merging by scores, as the merges of a byte-pair model. They are made once, and kept.

SentencePiece joins the neighbours whose whole has the best score, until there are none. A token's last step, alone, is
therefore its last step in every text: a part that is joined to something else never becomes the token. So a model of
byte pairs needs one merge for each token, in the order of the scores.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edgespec.user_paths import cache_folder, make_folder, written_whole

FOLDER, SUFFIX = "tokenizers", ".merges"
VERSION = b"edgespec.merges/1"  # of what is kept, and of how it is made
DIGEST_BYTES = 16
NONE = 1 << 62  # ranks after all others: no token


def cached_merges(
    tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float], apart: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the merges in their order; `apart` are the ids of tokens that merging must not make."""
    made_of = hashlib.blake2b(VERSION + sys.byteorder.encode(), digest_size=DIGEST_BYTES)
    for part in ("\0".join(tokens).encode(), array.array("d", scores).tobytes(), str(apart).encode()):
        made_of.update(len(part).to_bytes(8, "little") + part)
    path = cache_folder() / FOLDER / f"{made_of.hexdigest()}{SUFFIX}"
    numbers = _read(path, made_of.digest())
    if numbers is None:
        numbers = array.array("I", (number for pair in _merges(tokens, ids, scores, apart) for number in pair))
        _write(path, made_of.digest(), numbers)
    parts = map(tokens.__getitem__, numbers)
    return list(zip(parts, parts, strict=True))


def _merges(
    tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float], apart: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the ids of the parts of each token's last step, best scores first."""
    order = sorted({*ids.values()}.difference(apart), key=lambda number: (-scores[number], number))
    ranks = {tokens[number]: rank for rank, number in enumerate(order)}
    for number in order:
        parts = _last_step(tokens[number], ranks)
        if parts is not None and parts[0] in ids and parts[1] in ids:
            yield ids[parts[0]], ids[parts[1]]


def _last_step(token: str, ranks: dict[str, int]) -> Sequence[str] | None:
    """Return the two parts that a token is joined of; None where joining its characters does not make it."""
    parts = list(token)
    found = [ranks.get(token[index : index + 2], NONE) for index in range(len(token) - 1)]
    while len(parts) > 2:
        best = min(found)
        if best == NONE:
            return None
        index = found.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        del found[index]
        if index:
            found[index - 1] = ranks.get(parts[index - 1] + parts[index], NONE)
        if index < len(found):
            found[index] = ranks.get(parts[index] + parts[index + 1], NONE)
    return parts if len(parts) == 2 else None


def _read(path: Path, made_of: bytes) -> array.array[int] | None:
    """Return the numbers that were kept; None where there are none, or the file is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    start, packed, digest = content[:DIGEST_BYTES], content[DIGEST_BYTES:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    numbers = array.array("I")
    if start != made_of or _digest(packed) != digest or len(packed) % (2 * numbers.itemsize):
        return None
    numbers.frombytes(packed)
    return numbers


def _write(path: Path, made_of: bytes, numbers: array.array[int]) -> None:
    """Keep the numbers; a home that cannot be written ends nothing."""
    packed = numbers.tobytes()
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        with written_whole(path) as partial:
            partial.write_bytes(made_of + packed + _digest(packed))


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()
