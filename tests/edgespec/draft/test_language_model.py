"""The language-model drafter: q after every node is that of its path, over rounds of commits."""

import copy

import pytest
import torch

from edgespec.config import DraftSampling
from edgespec.draft.language_model import LanguageModelDrafter, expand_batched
from edgespec.errors import EdgespecError
from edgespec.grow.batched import grow_batched, grown
from edgespec.grow.growing import GrowingTree, GrowthAlone
from edgespec.model.causal_model import CausalModel
from edgespec.model.text_cache import TextCache
from edgespec.sampling.distribution import to_draft_probs
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.draft.contract import TEXT, rounds_of
from tests.support.families import FAMILIES, RECURRENT, VOCAB, make_model

CPU = torch.device("cpu")
SAMPLING = DraftSampling(temperature=0.8, top_p=0.95, tail_share=0.05)


@pytest.mark.parametrize(
    ("family", "vocab"),
    [
        ("llama", VOCAB),
        ("llama", VOCAB + 7),  # the target's is padded
        ("llama", VOCAB - 3),  # the draft's is
        *((family, VOCAB) for family in RECURRENT),
    ],
)
def test_q_is_the_models_own_after_each_path(family: str, vocab: int) -> None:
    model = make_model({**FAMILIES, **RECURRENT}[family]())
    plain = copy.deepcopy(model)
    drafter = LanguageModelDrafter(CausalModel(model, device=CPU), vocab=vocab, sampling=SAMPLING)

    def expected(ids: list[int]) -> torch.Tensor:
        logits = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:, :vocab]
        return torch.nn.functional.pad(to_draft_probs(logits, SAMPLING), (0, vocab - logits.shape[1]))[0]

    drafter.begin(TEXT)
    for text, paths, q in rounds_of(None, drafter, count=4):
        for found, path in zip(q, paths, strict=True):
            torch.testing.assert_close(found, expected(text + path), rtol=1e-4, atol=1e-6)


def test_ids_beyond_the_drafts_table_do_not_stop_it() -> None:
    """A target's padded table has more rows; whatever the draft makes of such an id, it must go on."""
    model = make_model(FAMILIES["llama"]())
    drafter = LanguageModelDrafter(CausalModel(model, device=CPU), vocab=VOCAB + 7, sampling=SAMPLING)
    drafter.begin([1, VOCAB + 2])
    drafter.commit(VOCAB + 3, [], [])
    q = drafter.expand(torch.tensor([VOCAB + 4]), torch.tensor([-1]))
    assert q.shape == (1, VOCAB + 7)
    torch.testing.assert_close(q.sum(), torch.tensor(1.0))


def test_a_root_that_was_never_expanded_becomes_pending() -> None:
    """Near a text's end no tree grows; the next one must still see what was committed."""
    model = make_model(FAMILIES["llama"]())
    plain = copy.deepcopy(model)
    drafter = LanguageModelDrafter(CausalModel(model, device=CPU), vocab=VOCAB, sampling=SAMPLING)
    drafter.begin(range(5))
    drafter.commit(9, [], [])
    drafter.commit(8, [], [])
    q = drafter.expand(torch.tensor([3]), torch.tensor([-1]))
    logits = plain(input_ids=torch.tensor([[0, 1, 2, 3, 4, 9, 8, 3]]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(q, to_draft_probs(logits, SAMPLING), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", *RECURRENT])
def test_steps_without_rows_leave_the_cache_to_the_next_tree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looked up text suffices a step is short; what a pass that was not made left there must not show."""
    model = make_model({**FAMILIES, **RECURRENT}[family]())
    plain = copy.deepcopy(model)
    drafter = LanguageModelDrafter(CausalModel(model, device=CPU), vocab=VOCAB, sampling=SAMPLING)
    text = list(range(30, 42))
    drafter.begin(text)
    for round_number in range(2):
        drafter.expand(torch.tensor([7]), torch.tensor([-1]))
        drafter.expand(torch.tensor([50, 51]), torch.tensor([0, 0]))
        drafter.rewind()
        with monkeypatch.context() as patched:
            patched.delattr(TextCache, "commit")
            drafter.commit(7, [-1, -1], [8, 9])
            drafter.commit(10 + round_number, [], [])
        assert (drafter.num_pending, drafter.num_unread) == (4, 3)
        text += [7, 8, 9, 10 + round_number]
        q = drafter.expand(torch.tensor([3]), torch.tensor([-1]))
        logits = plain(input_ids=torch.tensor([[*text, 3]]), use_cache=False).logits[0, -1:]
        torch.testing.assert_close(q, to_draft_probs(logits, SAMPLING), rtol=1e-4, atol=1e-6)
        drafter.commit(3, [], [])
        text.append(3)


def drafter_at_a_text(*, pending: bool) -> LanguageModelDrafter:
    """A drafter behind a text whose last token, where `pending`, has no row yet."""
    model = CausalModel(make_model(FAMILIES["llama"]()), device=CPU)
    drafter = LanguageModelDrafter(model, vocab=VOCAB, sampling=SAMPLING)
    drafter.begin(range(12))
    if pending:
        drafter.commit(40, [], [])
    return drafter


def growth(width: int) -> GrowthAlone:
    tree = GrowingTree(7, device=CPU, keeps_draft_probs=True)
    yield from tree.expand()
    for _ in range(3):
        tokens = tree.q.topk(width).indices
        row = torch.arange(tokens.shape[0]).repeat_interleave(width)
        tree.add(row, torch.arange(width).repeat(tokens.shape[0]), tokens.flatten())
        yield from tree.expand(torch.arange(0, row.shape[0], 2))
    return tree.finished("chosen")


def grow(drafter: LanguageModelDrafter, *, width: int) -> TokenTree:
    return grown(growth(width), drafter)


@pytest.mark.parametrize("pending", [False, True], ids=["", "pending"])
def test_trees_grown_after_a_rewind_are_those_grown_fresh(pending: bool) -> None:
    drafter = drafter_at_a_text(pending=pending)
    for width in (4, 2, 3):  # the larger tree first: what it leaves behind must not show
        tree, fresh_drafter = grow(drafter, width=width), drafter_at_a_text(pending=pending)
        fresh = grow(fresh_drafter, width=width)
        for name in ("tokens", "parents", "ranks", "draft_rows"):
            assert torch.equal(getattr(tree, name), getattr(fresh, name)), name
        torch.testing.assert_close(tree.draft_probs, fresh.draft_probs)
        rows = torch.arange(tree.draft_probs.shape[0])
        torch.testing.assert_close(drafter.hidden(rows), fresh_drafter.hidden(rows))
        drafter.rewind()
    drafter.expand(torch.tensor([7]), torch.tensor([-1]))
    drafter.commit(7, [], [])
    q = drafter.expand(torch.tensor([3]), torch.tensor([-1]))
    text = [*range(12), *([40] if pending else []), 7, 3]
    logits = make_model(FAMILIES["llama"]())(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(q, to_draft_probs(logits, SAMPLING), rtol=1e-4, atol=1e-6)


def test_q_comes_from_the_hidden_states_of_its_rows_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.model.row_chunks.CHUNK_BYTES", 3 * VOCAB * 4)
    drafter = drafter_at_a_text(pending=True)
    tree = grow(drafter, width=4)  # layers of 2, 4 and 8 expanded nodes
    rows = torch.randperm(tree.draft_probs.shape[0], generator=torch.Generator().manual_seed(0))
    model = CausalModel(make_model(FAMILIES["llama"]()), device=CPU)
    q = to_draft_probs(model.logits(drafter.hidden(rows)), SAMPLING)
    torch.testing.assert_close(q, tree.draft_probs[rows], rtol=1e-4, atol=1e-6)


def test_a_text_is_read_with_its_first_root_and_its_beginning_is_kept() -> None:
    model = CausalModel(make_model(FAMILIES["llama"]()), device=CPU)
    rows = model.new_text()
    for text, kept in (([*range(12)], 0), ([*range(9), 70, 71], 9)):
        drafter = LanguageModelDrafter(model, vocab=VOCAB, sampling=SAMPLING, cache=rows)
        drafter.begin(text)
        assert (rows.length, drafter.num_pending) == (kept, len(text) - kept)
        q = drafter.expand(torch.tensor([3]), torch.tensor([-1]))
        assert (list(rows.ids), drafter.num_pending) == (text, 0)
        plain = make_model(FAMILIES["llama"]())
        logits = plain(input_ids=torch.tensor([[*text, 3]]), use_cache=False).logits[0, -1:]
        torch.testing.assert_close(q, to_draft_probs(logits, SAMPLING), rtol=1e-4, atol=1e-6)


OTHER_SAMPLING = DraftSampling(temperature=1.7)


def three_texts(model: CausalModel) -> list[LanguageModelDrafter]:
    """Drafters at texts of different lengths; one of them draws in another way."""
    drafters = []
    for text, sampling in ((range(12), SAMPLING), (range(40, 43), OTHER_SAMPLING), (range(90, 110), SAMPLING)):
        drafter = LanguageModelDrafter(model, vocab=VOCAB, sampling=sampling)
        drafter.begin(text)
        drafters.append(drafter)
    return drafters


def test_trees_that_grow_together_are_those_grown_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(make_model(FAMILIES["llama"]()), device=CPU, chunk_rows=7)
    alone = [grow(drafter, width=width) for drafter, width in zip(three_texts(model), (4, 2, 3), strict=True)]
    passes: list[int] = []
    read = CausalModel.read
    monkeypatch.setattr(CausalModel, "read", lambda self, parts: passes.append(len(parts)) or read(self, parts))
    drafters = three_texts(model)
    together = grow_batched(
        [(growth(width), drafter) for width, drafter in zip((4, 2, 3), drafters, strict=True)],
        lambda expansions: expand_batched(expansions),
    )
    assert passes == [3] * 4, "one pass a layer"
    for found, expected in zip(together, alone, strict=True):
        assert isinstance(found, TokenTree)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.draft_probs, expected.draft_probs, rtol=1e-4, atol=1e-6)


def test_a_text_whose_draft_says_nan_ends_its_own_growth_alone() -> None:
    model = make_model(FAMILIES["llama"]())
    model.get_input_embeddings().weight.data[41].fill_(float("nan"))
    model.get_output_embeddings().weight = torch.nn.Parameter(make_model(FAMILIES["llama"]()).lm_head.weight)
    drafters = three_texts(CausalModel(model, device=CPU))
    first, failed, last = grow_batched(
        [(growth(2), drafter) for drafter in drafters],
        lambda expansions: expand_batched(expansions),
    )
    assert isinstance(failed, EdgespecError)
    assert failed.code == "E_NAN_LOGITS"
    assert isinstance(first, TokenTree)
    assert isinstance(last, TokenTree)
