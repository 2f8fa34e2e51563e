"""How much memory the rows of texts that have ended may keep, of what is planned for texts."""

from offload.placement import Placement

MEMORY_SHARE = 32  # of the device's memory, one part may keep rows, however small the model
_ROWS = ("keys and values", "its own cache", "recurrent states")
_WEIGHTS = ("weights", "resident layers", "embeddings, norms, head")


def most_kept_bytes(placement: Placement, *, num_texts: int) -> int:
    """Return the bytes: those of one text of full length, of the weights, or a share of the memory, what is most.

    So a small model that is planned for long texts does not fill a large memory with what was said. Where weights are
    streamed, reading anew is dear, and all that is planned may keep rows.
    """
    rows_bytes = _sum(placement, _ROWS)
    if not placement.is_resident:
        return rows_bytes
    most_bytes = max(rows_bytes // num_texts, _sum(placement, _WEIGHTS), placement.device_budget_bytes // MEMORY_SHARE)
    return min(rows_bytes, most_bytes)


def _sum(placement: Placement, ends: tuple[str, ...]) -> int:
    uses = (*placement.device_bytes.items(), *placement.host_bytes.items())  # keys and values may wait in RAM
    return sum(num_bytes for use, num_bytes in uses if use.endswith(ends))
