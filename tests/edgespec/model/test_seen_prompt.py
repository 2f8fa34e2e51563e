"""Keys of pictures: what a row shows is in the number by which it is kept, and nothing takes that for a token."""

import torch

from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seen_prompt import SeenPrompt, keys_of, without_pictures

PICTURE = 9


def prompt(*runs: tuple[int, int, str], count: int = 12) -> PicturePrompt:
    inside = {row for first, end, _ in runs for row in range(first, end)}
    return PicturePrompt(
        ids=[PICTURE if row in inside else row for row in range(count)], inputs={}, image_rows=list(runs)
    )


def test_keys_tell_pictures_and_places_apart_and_words_keep_their_ids() -> None:
    one, other = keys_of(prompt((2, 5, "a"))), keys_of(prompt((2, 5, "b")))
    assert one[:2] == [0, 1]
    assert one[5:] == list(range(5, 12))
    assert len({*one[2:5], *other[2:5]}) == 6
    assert all(-(1 << 63) <= key < 0 for key in one[2:5] + other[2:5]), "a number of 64 bits that is no token"
    assert keys_of(prompt((2, 5, "a")))[2:5] == one[2:5], "the same in every run"


def test_a_picture_of_several_runs_has_each_place_once() -> None:
    keys = keys_of(prompt((1, 3, "a"), (5, 7, "a")))
    assert len({*keys[1:3], *keys[5:7]}) == 4


def test_pictures_side_by_side_are_known_together() -> None:
    """Their rows may see each other, so a cut between them would keep rows that saw another picture."""
    alone, together = keys_of(prompt((2, 4, "a"))), keys_of(prompt((2, 4, "a"), (4, 6, "b")))
    assert not set(alone[2:4]) & set(together[2:6])


def test_words_apart_have_a_number_for_each_picture_that_matches_nothing() -> None:
    of = prompt((2, 5, "a"), (7, 8, "b"))
    seen = SeenPrompt(keys=keys_of(of), ids=of.ids, runs=list(of.image_rows), embedded=torch.zeros(12, 2))
    assert seen.words_apart([*of.ids, 50]) == [0, 1, -1, 5, 6, -2, 8, 9, 10, 11, 50]
    assert seen.words([*of.ids, 50]) == [0, 1, 5, 6, 8, 9, 10, 11, 50]
    assert without_pictures([3, 4], ()) == [[3, 4]]
    assert seen.true_ids(seen.keyed([*of.ids, 50])[1:], 1) == [*of.ids[1:], 50]
