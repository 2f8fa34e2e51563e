"""A text's cache: what it keeps, what it forgets, and how its memory grows."""

import pytest
import torch

from edgespec.model.mechanisms.keys_values import STEP_ROWS
from edgespec.model.text_cache import TextCache, num_in_place, shared_length


def rows(start: int, count: int) -> torch.Tensor:
    """Recognisable keys: [1, heads 3, count, dim 4], each row filled with its number."""
    return torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(1, 3, count, 4).clone()


def append(cache: TextCache, start: int, count: int) -> None:
    for layer in cache.layers:
        layer.append(rows(start, count), -rows(start, count))


def numbers(cache: TextCache, layer: int = 0) -> list[float]:
    """The numbers of the rows in use, read through a row that is appended and forgotten again."""
    length = cache.layers[layer].length
    keys, values = cache.layers[layer].append(rows(99, 1), -rows(99, 1))
    cache.layers[layer].length = length
    assert torch.equal(keys, -values)
    assert bool((keys == keys[:1, :1, :, :1]).all()), "all heads have the row"
    found: list[float] = keys[0, 0, :-1, 0].tolist()
    return found


def text_of(ids: list[int], *, keeps_hidden: bool = False, num_layers: int = 2) -> TextCache:
    cache = TextCache(num_layers, keeps_hidden=keeps_hidden)
    append(cache, 0, len(ids))
    cache.write_hidden(0, rows(0, len(ids))[0, 0])
    cache.commit_next(ids)
    return cache


def test_a_commit_moves_an_accepted_path_behind_the_text_and_drops_the_rest() -> None:
    cache = text_of([10, 11, 12, 13, 14])
    append(cache, 5, 6)
    cache.commit(torch.tensor([5, 7, 10]), [20, 21, 22])
    assert cache.length == 8
    assert list(cache.ids) == [10, 11, 12, 13, 14, 20, 21, 22]
    assert [numbers(cache, layer) for layer in range(2)] == [[0, 1, 2, 3, 4, 5, 7, 10]] * 2


@pytest.mark.parametrize(("path", "num_copied"), [([0, 1, 2], 0), ([0, 1, 3, 4], 2), ([0, 3], 1), ([0], 0)])
def test_rows_that_follow_the_text_already_are_not_copied(
    path: list[int], num_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is two launches a layer."""
    cache, plain = (text_of([10, 11, 12], keeps_hidden=True) for _ in range(2))
    copied = []
    select = torch.Tensor.index_select
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *of: copied.append(of[2].numel()) or select(*of))
    for each, there in ((cache, num_in_place(path)), (plain, 0)):
        append(each, 3, 5)
        each.write_hidden(3, rows(3, 5)[0, 0])
        each.commit(torch.tensor(path) + 3, path, num_in_place=there)
    assert copied == [num_copied] * (5 if num_copied else 0) + [len(path)] * 5
    assert [numbers(cache, layer) for layer in range(2)] == [numbers(plain, layer) for layer in range(2)]
    assert torch.equal(cache.features_before(0, 3 + len(path) + 1), plain.features_before(0, 3 + len(path) + 1))


@pytest.mark.parametrize("num_rows", [8, 128])  # within the rows that there are, and all of them
def test_overlapping_source_and_destination_do_not_disturb_each_other(num_rows: int) -> None:
    cache = TextCache(1)
    append(cache, 0, num_rows)
    kept = list(range(1, num_rows))
    cache.commit(torch.tensor(kept), kept)
    assert numbers(cache) == kept


def test_a_commit_of_no_rows_drops_the_tree() -> None:
    cache = text_of([1, 2, 3])
    append(cache, 3, 4)
    cache.commit(torch.empty(0, dtype=torch.long), [])
    assert numbers(cache) == [0, 1, 2]
    assert list(cache.ids) == [1, 2, 3]


def test_truncating_forgets_what_lies_behind_also_where_a_pass_ended_in_the_middle() -> None:
    cache = text_of([1, 2, 3, 4])
    cache.layers[0].append(rows(50, 3), -rows(50, 3))  # the pass came no further than the first layer
    cache.truncate()
    assert [layer.length for layer in cache.layers] == [4, 4]
    cache.truncate(2)
    assert [layer.length for layer in cache.layers] == [2, 2]
    assert list(cache.ids) == [1, 2]
    append(cache, 70, 2)
    assert numbers(cache, 1) == [0, 1, 70, 71]


@pytest.mark.parametrize(
    ("ids", "kept"), [([1, 2, 3, 4, 5], 4), ([1, 2], 2), ([1, 2, 9, 4], 2), ([9], 0), ([], 0), ([1, 2, 3, 4], 4)]
)
def test_what_a_new_text_shares_with_the_old_one_is_kept(ids: list[int], kept: int) -> None:
    cache = text_of([1, 2, 3, 4])
    append(cache, 4, 3)  # of a tree
    assert shared_length(cache.ids, ids) == kept
    assert cache.keep_prefix(ids) == kept
    assert cache.length == len(cache.ids) == kept
    assert numbers(cache) == list(range(kept))


def test_a_copy_has_rows_of_its_own() -> None:
    cache = text_of([1, 2, 3, 4], keeps_hidden=True)
    copied = cache.copy(3)
    assert list(copied.ids) == [1, 2, 3]
    assert copied.features_before(1, 4)[:, 0].tolist() == [0, 1, 2]
    append(copied, 60, 2)
    copied.write_hidden(3, rows(60, 2)[0, 0])
    copied.commit_next([6, 7])
    assert numbers(copied, 1) == [0, 1, 2, 60, 61]
    assert copied.features_before(1, 6)[:, 0].tolist() == [0, 1, 2, 60, 61]
    assert numbers(cache, 1) == [0, 1, 2, 3]
    assert list(cache.ids) == [1, 2, 3, 4]
    assert cache.features_before(1, 5)[:, 0].tolist() == [0, 1, 2, 3]
    cache.truncate(0)
    assert numbers(copied) == [0, 1, 2, 60, 61]


def test_a_copy_of_nothing_is_an_empty_text() -> None:
    for copied in (TextCache(2, keeps_hidden=True).copy(0), text_of([1, 2], keeps_hidden=True).copy(0)):
        assert (copied.length, list(copied.ids)) == (0, [])
        append(copied, 5, 1)
        copied.write_hidden(0, rows(5, 1)[0, 0])
        copied.commit_next([9])
        assert numbers(copied) == [5]
        assert copied.features_before(0, 2)[:, 0].tolist() == [0, 5]


def test_tensors_for_a_file_stay_as_they_are_while_the_text_goes_on() -> None:
    cache = TextCache(1, keeps_hidden=True)
    one_head = rows(0, 4)[:, :1]  # whose rows lie in the order of the file already
    cache.layers[0].append(one_head, -one_head)
    cache.write_hidden(0, rows(0, 4)[0, 0])
    cache.commit_next([1, 2, 3, 4])
    found = cache.tensors()
    assert sum(part.nbytes for part in found.values()) == cache.text_bytes
    cache.truncate(1)
    cache.layers[0].append(rows(60, 2)[:, :1], rows(60, 2)[:, :1])
    cache.write_hidden(1, rows(60, 2)[0, 0])
    for part in (found["keys.0"][:, 0], -found["values.0"][:, 0], found["hidden"]):
        assert part[:, 0].tolist() == [0, 1, 2, 3]


def test_hidden_states_follow_the_rows_of_a_path() -> None:
    cache = text_of([1, 2, 3], keeps_hidden=True)
    append(cache, 3, 5)
    cache.write_hidden(3, rows(3, 5)[0, 0])
    cache.commit(torch.tensor([3, 5, 7]), [4, 5, 6])
    assert cache.features_before(0, 7)[:, 0].tolist() == [0, 0, 1, 2, 3, 5, 7]


def test_memory_grows_in_steps_and_is_not_touched_between_them() -> None:
    cache = TextCache(1)
    layer = cache.layers[0]
    assert (layer.capacity, cache.num_bytes) == (0, 0)
    keys, _ = layer.append(rows(0, 1), rows(0, 1))
    where = keys.data_ptr()
    assert layer.capacity == STEP_ROWS
    assert cache.num_bytes == 2 * STEP_ROWS * 3 * 4 * 4
    keys, _ = layer.append(rows(1, STEP_ROWS - 1), rows(1, STEP_ROWS - 1))
    layer.keep(2, torch.tensor([7, 9]))
    keys, _ = layer.append(rows(4, 1), rows(4, 1))
    assert (keys.data_ptr(), layer.capacity) == (where, STEP_ROWS)
    grown, _ = layer.append(rows(5, STEP_ROWS), rows(5, STEP_ROWS))
    assert grown[0, 0, :, 0].tolist() == [0, 1, 7, 9, *range(4, STEP_ROWS + 5)]
    assert layer.capacity == 2 * STEP_ROWS


def test_memory_of_a_long_text_grows_by_a_share_of_it() -> None:
    layer = TextCache(1).layers[0]
    layer.append(rows(0, 4096), rows(0, 4096))
    assert layer.capacity == 4096
    layer.append(rows(4096, 1), rows(4096, 1))
    assert layer.capacity == 4096 + 256
