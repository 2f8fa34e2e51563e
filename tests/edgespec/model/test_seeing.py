"""What a family hands its decoder of pictures is read in parts and through trees: texts are those of generate."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seeing import see
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from tests.support.tiny_pictures import NEW, SEEING, Family, generated, seeing_prompt

CPU = torch.device("cpu")


def random_tree(root: int, truth: list[int], vocab: int, generator: torch.Generator) -> TokenTree:
    """A tree that holds the true continuation up to some depth, among wrong nodes."""
    tokens, parents, spine = [root], [-1], [0]
    depth = int(torch.randint(0, min(5, len(truth)) + 1, (1,), generator=generator))
    for token in truth[:depth]:
        for _ in range(int(torch.randint(0, 3, (1,), generator=generator))):  # wrong siblings and their children
            tokens.append(int(torch.randint(0, vocab, (1,), generator=generator)))
            parents.append(int(torch.randint(0, len(tokens) - 1, (1,), generator=generator)))
        tokens.append(token)
        parents.append(spine[-1])
        spine.append(len(tokens) - 1)
    count = len(tokens)
    return TokenTree(
        tokens=torch.tensor(tokens), parents=torch.tensor(parents), ranks=torch.zeros(count, dtype=torch.long),
        draw="chosen", draft_rows=torch.full((count,), -1),
    )  # fmt: skip


def accepted(tree: TokenTree, logits: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """The path of nodes that greedy decoding takes, and the token after it."""
    tokens, parents, node, path = tree.tokens.tolist(), tree.parents.tolist(), 0, []
    while True:
        wanted = int(logits[node].argmax())
        following = [n for n in range(len(tokens)) if parents[n] == node and tokens[n] == wanted]
        if not following:
            return tuple(path), wanted
        node = following[0]
        path.append(node)


def read_prompt(target: Target, ids: list[int], *, most: int) -> torch.Tensor:
    """The last hidden state [1, h] of a prompt that is read in parts of `most` rows, or of one block more."""
    target.begin(ids)
    while target.num_unread:
        (hidden,) = target.read([rows := target.text_rows(target.rows_within(most))])
        target.took_in(rows.count)
    return hidden[-1:]


def decoded(target: Target, ids: list[int], truth: list[int], *, most: int) -> list[int]:
    """The text that a target writes through random trees."""
    generator = torch.Generator().manual_seed(most)
    text = [int(target.logits(read_prompt(target, ids, most=most))[0].argmax())]
    while len(text) < NEW:
        tree = random_tree(text[-1], truth[len(text) : len(text) + 5], target.vocab, generator)
        path, bonus = accepted(tree, target.logits(target.look(tree)))
        target.commit(path)
        text += [int(tree.tokens[node]) for node in path] + [bonus]
    return text[:NEW]


def opened(family: Family, seen: SeenPrompt, *, chunk_rows: int = 8) -> Target:
    target = Target(CausalModel(copy.deepcopy(family.model), device=CPU, chunk_rows=chunk_rows))
    target.seen = seen
    return target


@pytest.mark.parametrize("family", SEEING)
def test_texts_are_those_of_generate(family: str) -> None:
    """Two pictures, prompts read whole and in parts of a block's edge, trees with wrong branches."""
    of = SEEING[family]()
    prompt = seeing_prompt(of, (1, 2))
    truth = generated(of, prompt)
    assert truth != generated(of, seeing_prompt(of, (3, 4))), "another picture gives another text"
    target = opened(of, see(of.model, prompt))
    for most in (len(prompt.ids), 8):
        target.cache.truncate(0)
        assert decoded(target, prompt.ids, truth, most=most) == truth


@pytest.mark.parametrize("family", SEEING)
def test_texts_with_and_without_pictures_share_a_pass(family: str) -> None:
    of = SEEING[family]()
    first, second = seeing_prompt(of, (1,), words=one_picture(of)), seeing_prompt(of, (3, 4))
    words = [token for token in first.ids if token < 200][:12]
    targets = [opened(of, see(of.model, prompt)) for prompt in (first, second)]
    blind = Target(targets[0]._model)
    alone = []
    for target, ids in ((targets[0], first.ids), (targets[1], second.ids), (blind, words)):
        alone.append(target.logits(read_prompt(target, ids, most=512)))
        target.cache.truncate(0)
        target.begin(ids)
        target._model = blind._model
    found = blind.read([target.text_rows(512) for target in (blind, *targets)])
    for own, hidden in zip((alone[2], alone[0], alone[1]), found, strict=True):
        assert float((blind.logits(hidden[-1:]) - own).abs().max() / own.abs().max()) < 1e-5


def one_picture(family: Family) -> str:
    """The family's prompt with its first picture alone."""
    return family.prompt.partition(" and ")[0] + " What?"


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4_e", "gemma3"])
def test_rows_behind_a_prompt_may_be_read_with_it(family: str) -> None:
    """As those of a text are that is read again with what it has written."""
    of = SEEING[family]()
    prompt = seeing_prompt(of, (1, 2))
    truth = generated(of, prompt)
    target = opened(of, see(of.model, prompt), chunk_rows=64)
    together = target.logits(read_prompt(target, [*prompt.ids, *truth[:9]], most=512))
    assert int(together[0].argmax()) == truth[9]
    target.cache.truncate(len(prompt.ids))
    apart = target.logits(read_prompt(target, [*prompt.ids, *truth[:9]], most=512))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_a_prompt_without_pictures_has_no_shift_of_the_one_before() -> None:
    of = SEEING["qwen3_vl"]()
    with_picture = see(of.model, seeing_prompt(of, (1, 2)))
    ids = list(range(30))
    kinds = torch.zeros(1, len(ids), dtype=torch.long)
    words = see(of.model, PicturePrompt(ids=ids, inputs={"mm_token_type_ids": kinds}, image_rows=[]))
    assert with_picture.shift < 0
    assert words.shift == 0


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_rows_that_see_each_other_are_not_parted(family: str) -> None:
    """By no part of a prompt, no chunk, and no prefix that is kept."""
    of = SEEING[family]()
    prompt = seeing_prompt(of, (1, 2))
    seen = see(of.model, prompt)
    first, end, _ = prompt.image_rows[0]
    middle = (first + end) // 2
    whole = opened(of, seen, chunk_rows=1024)
    expected = whole.logits(read_prompt(whole, prompt.ids, most=1024))
    target = opened(of, seen, chunk_rows=4)
    found = target.logits(read_prompt(target, prompt.ids, most=4))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    target.cache.truncate(middle)  # as a prompt leaves it that was cut there
    found = target.logits(read_prompt(target, prompt.ids, most=4))
    assert target.num_kept == first
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_in_gemma_4_short_prompts_have_blocks_in_layers_with_windows_alone() -> None:
    """A window that holds the whole prompt is one all the same."""
    of = SEEING["gemma4"]()
    of.model.config.text_config.sliding_window = 512
    for part in of.model.modules():
        if getattr(part, "sliding_window", None):
            part.sliding_window = 512
    prompt = seeing_prompt(of, (1,), words=one_picture(of))
    truth = generated(of, prompt)
    assert decoded(opened(of, see(of.model, prompt), chunk_rows=512), prompt.ids, truth, most=512) == truth


def test_rows_of_another_picture_are_not_kept() -> None:
    of = SEEING["smolvlm"]()
    one, other = seeing_prompt(of, (1, 2)), seeing_prompt(of, (3, 2))
    assert one.ids == other.ids
    target = opened(of, see(of.model, one), chunk_rows=512)
    read_prompt(target, one.ids, most=512)
    target.seen = see(of.model, other)
    found = target.logits(read_prompt(target, other.ids, most=512))
    assert target.num_kept == one.image_rows[0][0]
    fresh = opened(of, see(of.model, other), chunk_rows=512)
    torch.testing.assert_close(found, fresh.logits(read_prompt(fresh, other.ids, most=512)), rtol=1e-4, atol=1e-4)


def test_what_a_decoder_gets_and_is_not_known_is_refused() -> None:
    of = SEEING["smolvlm"]()
    prompt = seeing_prompt(of, (1, 2))
    odd = replace(prompt, inputs={**prompt.inputs, "heat": torch.zeros(1)})
    with pytest.raises(EdgespecError, match="pictures for model type 'smolvlm' are not read: its decoder gets heat"):
        see(of.model, odd)
