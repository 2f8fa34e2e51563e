"""Texts that grow by chains in a family's own cache: rows that are read at once, and cut back to those that are kept.

The reference is a forward of the whole text without a cache.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.cache_utils import Cache

from edgespec.model import tree_support
from edgespec.model.mechanisms.windows import SMALL_WINDOW
from edgespec.model.narrow_copy import narrow_copy, random_model
from edgespec.model.own_pass_model import OwnPassModel
from edgespec.model.own_pass_text import OwnPassText
from edgespec.model.self_check import plain_logits
from edgespec.model.target import Target
from edgespec.model.tree_support import support_of
from edgespec.tree.token_tree import chain_of
from tests.support.tiny_configs import tiny_config

CPU = torch.device("cpu")
LEVELS = {
    "llama": "trees",
    "bloom": "chains",
    "mpt": "chains",
    "gpt_neo": "chains",
    "bart": "chains",
    "kosmos-2": "chains",
    "inkling_text": "chains",  # windows, what falls out of which is kept until they are cut
    "rwkv": "plainly",
    "recurrent_gemma": "plainly",  # keeps its state in its modules
    "openai-gpt": "plainly",  # is read whole
    "blt": "plainly",  # as well
    "zamba2": "plainly",
}
PROMPTS = [torch.arange(1, 20), torch.arange(40, 49)]
ROUNDS = [((5, 3), (4, 1)), ((1, 1), (6, 6)), ((7, 2), (2, 1)), ((4, 4), (5, 2))]  # rows read, rows kept


@pytest.mark.parametrize("family", LEVELS)
def test_the_support_is_found_by_trials(family: str) -> None:
    """The families of each kind have theirs, and the sentence says how they are decoded."""
    support = support_of(tiny_config(family), device=CPU)
    assert support.name == LEVELS[family]
    assert support.has_own_passes == (support.name != "trees")
    assert not support.cuts_back or support.in_words.startswith(
        "decoded by chains, trees without branches, because it "
    )


def _kept(text: OwnPassText, count: int) -> bool:
    return True


def _one_too_few(text: OwnPassText, count: int) -> bool:
    for cache in text.carried.values():
        if isinstance(cache, Cache) and count > 1:
            cache.crop(1 - count)
    return True


def _refused(text: OwnPassText, count: int) -> bool:
    return False


@pytest.mark.parametrize("wrong", [_kept, _one_too_few, _refused])
def test_a_cache_that_is_cut_wrongly_is_found_by_the_trial(
    wrong: Callable[[OwnPassText, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that stay, a row too many, and a cache that would be read anew in each pass."""
    monkeypatch.setattr(OwnPassText, "_is_cut", wrong)
    tree_support._of_own_passes.cache_clear()
    assert support_of(tiny_config("bloom"), device=CPU).name == "plainly"
    tree_support._of_own_passes.cache_clear()


@pytest.mark.skipif("inkling_text" not in CONFIG_MAPPING, reason="this transformers does not have it")
@torch.no_grad()
def test_windows_keep_what_falls_out_of_them_until_they_are_cut() -> None:
    """A chain may be dropped or stay, and nothing beyond the windows does; for a longer cut the text is read anew."""
    torch.manual_seed(1)
    plain = OwnPassModel(random_model(narrow_copy(tiny_config("inkling_text")), CPU), device=CPU, reads_on=True)
    (target,), text = begun(plain, PROMPTS[:1]), PROMPTS[0]
    cache = target.cache
    assert isinstance(cache, OwnPassText)
    for count in (6, 1, 4):
        target.look(chain_of(torch.randint(1, 90, (count,))))
        cache.truncate()
        assert cache.length == len(text)
        assert [layer.keys.shape[-2] for layer in windows_of(cache)] == [SMALL_WINDOW - 1]
    (expected,) = plain_logits(plain.model, torch.cat([text, torch.tensor([7])]))[-1:]
    torch.testing.assert_close(target.look(chain_of(torch.tensor([7])))[-1], expected, atol=1e-4, rtol=1e-4)
    target.commit(())
    cache.truncate()  # to what it has
    assert [layer.keys.shape[-2] for layer in windows_of(cache)] == [SMALL_WINDOW - 1]
    cache.truncate(len(text) - 2)
    assert (cache.length, len(cache.ids)) == (0, 0)
    plain.close()


@torch.no_grad()
def test_a_prompt_is_not_kept_beyond_its_windows() -> None:
    """Nothing of it is cut."""
    plain = OwnPassModel(random_model(narrow_copy(tiny_config("inkling_text")), CPU), device=CPU, reads_on=True)
    (target,) = begun(plain, PROMPTS[:1])
    assert isinstance(target.cache, OwnPassText)
    assert [layer.keys.shape[-2] for layer in windows_of(target.cache)] == [SMALL_WINDOW - 1]
    plain.close()


def windows_of(text: OwnPassText) -> list[Any]:
    (cache,) = text.carried.values()
    return [layer for layer in cache.layers if layer.is_sliding]


@pytest.fixture(params=["bloom", "mpt", "gpt_neo", "bart", "inkling_text"])
def model(request: pytest.FixtureRequest) -> Iterator[OwnPassModel]:
    torch.manual_seed(0)
    plain = OwnPassModel(random_model(narrow_copy(tiny_config(request.param)), CPU), device=CPU, reads_on=True)
    yield plain
    plain.close()


def begun(model: OwnPassModel, prompts: list[Tensor]) -> list[Target]:
    targets = [Target(model) for _ in prompts]
    for target, prompt in zip(targets, prompts, strict=True):
        target.prefill(prompt)
    return targets


@torch.no_grad()
def test_all_rows_of_chains_have_the_logits_of_their_texts(model: OwnPassModel) -> None:
    """Two texts in company; of each chain a part is kept, and other rows follow."""
    torch.manual_seed(1)
    targets, texts = begun(model, PROMPTS), list(PROMPTS)
    for sizes in ROUNDS:
        rows = [torch.randint(1, 90, (count,)) for count, _ in sizes]
        found = targets[0].read([target.tree_rows(chain_of(ids)) for target, ids in zip(targets, rows, strict=True)])
        assert [target.cache.length for target in targets] == [
            len(text) + len(ids) for text, ids in zip(texts, rows, strict=True)
        ]
        for number, (count, num_kept) in enumerate(sizes):
            expected = plain_logits(model.model, torch.cat([texts[number], rows[number]]))[-count:]
            torch.testing.assert_close(targets[number].logits(found[number]), expected, atol=1e-4, rtol=1e-4)
            targets[number].commit(tuple(range(1, num_kept)))
            texts[number] = torch.cat([texts[number], rows[number][:num_kept]])
            assert list(targets[number].cache.ids) == texts[number].tolist()


@torch.no_grad()
@pytest.mark.parametrize("at", [0.0, 0.5])
def test_a_chain_whose_pass_was_cut_is_read_with_its_whole_text(model: OwnPassModel, at: float) -> None:
    """No row of the pass that was cut is left, and the logits are the text's."""
    (target,), rows = begun(model, PROMPTS[:1]), torch.tensor([7, 8, 9])

    def cut(share: float) -> None:
        if share >= at:
            raise KeyboardInterrupt

    model.watch = cut
    with pytest.raises(KeyboardInterrupt):
        target.look(chain_of(rows + 10))
    model.watch = None
    expected = plain_logits(model.model, torch.cat([PROMPTS[0], rows]))[-3:]
    torch.testing.assert_close(target.look(chain_of(rows)), expected, atol=1e-4, rtol=1e-4)


def test_branches_are_no_chain(model: OwnPassModel) -> None:
    """Two children of a node would be read as if one followed the other."""
    (target,) = begun(model, PROMPTS[:1])
    tree = chain_of(torch.tensor([7, 8, 9]))
    tree.parents[2] = 0
    with pytest.raises(AssertionError, match="branches"):
        target.look(tree)
