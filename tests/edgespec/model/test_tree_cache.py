"""The tree cache: what it keeps, what it forgets, and that its memory stays where it is."""

import torch

from edgespec.model.tree_cache import TreeCache


def rows(start: int, count: int) -> torch.Tensor:
    """Recognisable keys: [batch 2, heads 3, count, dim 4], each row filled with its number."""
    return torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(2, 3, count, 4).clone()


def test_keep_moves_an_accepted_path_behind_the_text_and_drops_the_rest() -> None:
    cache = TreeCache(2, 16)
    for layer in range(2):
        cache.update(rows(0, 5), -rows(0, 5), layer)
        cache.update(rows(5, 6), -rows(5, 6), layer)
    cache.keep(5, torch.tensor([5, 7, 10]))
    assert cache.length == 8
    for layer in range(2):
        keys, values = cache.update(rows(90, 1), -rows(90, 1), layer)
        assert keys[1, 2, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 7, 10, 90]
        assert values[0, 0, :, 3].tolist() == [0, -1, -2, -3, -4, -5, -7, -10, -90]


def test_overlapping_source_and_destination_do_not_disturb_each_other() -> None:
    cache = TreeCache(1, 8)
    cache.update(rows(0, 8), rows(0, 8), 0)
    cache.keep(0, torch.tensor([1, 2, 3, 7]))
    assert cache.tree_layers[0].keys is not None
    assert cache.tree_layers[0].keys[0, 0, :4, 0].tolist() == [1, 2, 3, 7]


def test_memory_is_allocated_once_within_the_capacity_and_grows_beyond_it() -> None:
    cache = TreeCache(1, 10)
    cache.update(rows(0, 4), rows(0, 4), 0)
    keys = cache.tree_layers[0].keys
    assert keys is not None
    cache.update(rows(4, 6), rows(4, 6), 0)
    cache.truncate(2)
    assert cache.tree_layers[0].keys is keys
    grown, _ = cache.update(rows(2, 30), rows(2, 30), 0)
    assert grown[0, 0, :, 0].tolist() == list(range(32))
