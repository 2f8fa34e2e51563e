"""Every kind of draft keeps the contract: texts are plain decoding's, and what is drafted depends on the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import EdgespecError, Engine, SamplingSettings, TreeSettings
from edgespec.chat.answer import answer_format_of
from edgespec.chat.call_grammar import calls_or_answer, forced_calls, strict_calls
from edgespec.cli import run
from edgespec.config import DraftSampling
from edgespec.pair.pair import open_pair
from edgespec.sampling.grammar import regex_grammar
from edgespec.sampling.processors import LogitProcessors
from tests.edgespec.chat.test_call_grammar import ANSWER, SUN
from tests.edgespec.draft.contract import (
    DRAFTS,
    GREEDY_AND_WARM,
    OF_FAMILIES,
    PLAIN,
    POLICIES,
    PROMPT,
    TEXT,
    check_after_cancel,
    check_company,
    check_turns,
    drafter_at,
    name_of,
    open_engine,
    rounds_of,
)
from tests.offload.gguf.files import copy_gguf
from tests.support.families import VOCAB, make_tokenizer

TREES = [*POLICIES, TreeSettings(policy="opt-tree", draw="chosen", size=12, lookup=False)]
# All with a draft of each way of guessing: node by node, a block at once, from hidden states; others with two in turn
CASES = [*((tree, "float32") for tree in TREES), *((tree, "bfloat16") for tree in TREES[:2])]
IN_ALL = ("language model", "DFlash2", "routed head")
COVERING = [
    (draft, *case)
    for place, draft in enumerate(DRAFTS)
    for number, case in enumerate(CASES)
    if draft in IN_ALL or number in {place % len(TREES), len(TREES) + place % 2}
]
# In a folder or a file of their own
OF_THEIR_OWN = [name for name in DRAFTS if not name.startswith(("copy", "MTP")) and "streamed" not in name]
every_draft = pytest.mark.parametrize("draft", DRAFTS)
every_family = pytest.mark.parametrize(("draft", "family"), OF_FAMILIES)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A target of a family, and its draft of a kind."""
    pairs: dict[tuple[str, str], tuple[Path, Path]] = {}

    def pair_of(draft: str, family: str | None = None) -> tuple[Path, Path]:
        key = draft, family or DRAFTS[draft].families[0]
        if key not in pairs:
            pairs[key] = DRAFTS[draft].write(tmp_path_factory.mktemp("pair") / "target", key[1])
        return pairs[key]

    return pair_of


def opened(written: Callable[..., tuple[Path, Path]], draft: str, **options: Any) -> Engine:
    return open_engine(*written(draft), **{**DRAFTS[draft].options, **options})


@pytest.mark.parametrize(
    ("draft", "tree", "dtype"), COVERING, ids=lambda value: value if isinstance(value, str) else name_of(value)
)
def test_every_policy_gives_plain_decodings_texts(draft: str, tree: TreeSettings, dtype: str, written: Any) -> None:
    with opened(written, draft, tree=tree, dtype=dtype) as engine:
        for options in GREEDY_AND_WARM:
            engine.use_tree(PLAIN)
            plain = engine.generate(PROMPT, **options)
            engine.use_tree(None)
            found = engine.generate(PROMPT, **options)
            is_equal = tree.children == "coupled" or not options["temperature"]
            assert (found.token_ids == plain.token_ids) == is_equal
            assert sum(step.num_drafted for step in found.steps) > 8


@every_family
def test_texts_are_in_company_what_they_are_alone(draft: str, family: str, written: Any) -> None:
    check_company(*written(draft, family), **DRAFTS[draft].options)


@every_family
def test_a_text_goes_on_after_one_that_was_cancelled_and_cut(draft: str, family: str, written: Any) -> None:
    check_after_cancel(*written(draft, family), **DRAFTS[draft].options)


@every_draft
def test_a_conversations_turns_and_one_that_is_taken_up_again_are_plain_decodings(
    draft: str, written: Any, tmp_path: Path
) -> None:
    check_turns(*written(draft), tmp_path / "rows.safetensors", **DRAFTS[draft].options)


@every_draft
def test_what_is_drafted_after_trees_and_commits_depends_on_the_text_alone(draft: str, written: Any) -> None:
    with opened(written, draft, tree=TreeSettings(size=16)) as engine:
        looked, drafter = drafter_at(engine, TEXT)
        for text, paths, q in rounds_of(looked, drafter, count=5):
            _, fresh = drafter_at(engine, text)
            expected = fresh.expand(torch.tensor(paths[0]), torch.tensor([-1]))
            torch.testing.assert_close(q[:1], expected, rtol=1e-3, atol=1e-5)
            drafter.rewind()
            again = drafter.expand(torch.tensor(paths[0]), torch.tensor([-1]))
            torch.testing.assert_close(again, q[:1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("draft", OF_THEIR_OWN)
def test_a_draft_is_no_target_and_is_listed_with_its_own(
    draft: str, written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = written(draft)
    if draft != "language model":
        with pytest.raises(EdgespecError, match="drafts for it, and is no"):
            open_pair(path, None)
    assert run(["models", str(path.parent)]) == 0
    assert f"draft: {path} (" in capsys.readouterr().out


@pytest.mark.parametrize("draft", [name for name in OF_THEIR_OWN if name.endswith("GGUF")])
def test_a_file_of_other_tokens_or_with_a_tensor_that_no_draft_has_is_refused(
    draft: str, written: Any, tmp_path: Path
) -> None:
    target, path = written(draft)
    vocab = make_tokenizer(swapped=True).get_vocab()
    others = {"tokenizer.ggml.tokens": sorted(vocab, key=lambda token: vocab[token])}
    with pytest.raises(EdgespecError, match="token ids differ"):
        open_pair(target, copy_gguf(path, tmp_path / "others.gguf", settings=others))
    further = [("blk.0.attn_sinks.weight", (4,), 0, bytes(16))]
    with pytest.raises(EdgespecError, match=r"'blk\.0\.attn_sinks\.weight'"):
        open_pair(target, copy_gguf(path, tmp_path / "more.gguf", further=further))


class OfThePath:
    """A grammar that depends on every token of a path."""

    def add(self, tokens: Sequence[int]) -> None:
        raise AssertionError("no text")

    def allowed(self, path: Sequence[int]) -> torch.Tensor:
        return (torch.arange(VOCAB) + sum(path)) % 3 != len(path) % 3

    def likely(self, path: Sequence[int]) -> list[int]:
        raise AssertionError("nobody asks")


@every_draft
def test_a_node_has_what_the_grammar_and_the_texts_length_allow_behind_its_own_path(draft: str, written: Any) -> None:
    stop, least = 5, 2
    with opened(written, draft, tree=TreeSettings(size=16)) as engine:
        looked, drafter = drafter_at(engine, TEXT)
        processors = LogitProcessors(SamplingSettings(), ruled_out=(), matcher=OfThePath(), vocab=VOCAB,
                                     device=torch.device("cpu"), stop_tokens=[stop], min_new_tokens=least)  # fmt: skip
        drafter.process = processors.on_draft
        rounds = zip(rounds_of(looked, drafter, count=3), rounds_of(*drafter_at(engine, TEXT), count=3), strict=True)
        for (_, paths, found), (_, _, free) in rounds:
            assert found.shape[1] == VOCAB
            for (_, *path), own, whole in zip(paths, found, free, strict=True):
                allowed = OfThePath().allowed(path)
                allowed[stop] &= len(path) >= least
                expected = whole * allowed / whole[allowed].sum().clamp(min=1e-9)
                torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)


FORMS = {
    "regex": lambda _: regex_grammar("([a-f]x|[g-m]yz){3,5}(one|two) [0-9]{3}"),
    "forced": lambda tokenizer: forced_calls(answer_format_of(tokenizer), [SUN], "none"),
    "strict": lambda tokenizer: strict_calls(answer_format_of(tokenizer), [SUN], "open"),
    "beside": lambda tokenizer: calls_or_answer(answer_format_of(tokenizer), [SUN], ANSWER, "none"),
}


@pytest.mark.parametrize(
    ("draft", "dtype", "form"),
    [
        (draft, ("float32", "bfloat16")[(number + place) % 2], form)
        for number, draft in enumerate(["DFlash", "DSpark", "DFlash2", "EAGLE-3"])
        for place, form in enumerate(FORMS)
    ],
)
def test_texts_of_a_grammar_are_plain_decodings(
    draft: str, dtype: str, form: str, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tools as of other forms; what is drafted behind a node is what the grammar has behind its own path."""
    masked, on_draft = list[int](), LogitProcessors.on_draft

    def seen(self: LogitProcessors, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        found = on_draft(self, logits, paths)
        for path, row, free in zip(paths, found, logits, strict=True):
            allowed = self._matcher and self._matcher.allowed(path)
            if allowed is not None and free[allowed[: len(free)]].isfinite().any():  # a draft may have none of these
                assert not row[~allowed[: len(row)]].isfinite().any()
                masked.append(len(path))
        return found

    monkeypatch.setattr(LogitProcessors, "on_draft", seen)
    with opened(written, draft, tree=POLICIES[2], dtype=dtype) as engine:
        engine.pair.tokenizer.chat_template = "<tool_call> <think>"
        grammar = FORMS[form](engine.pair.tokenizer)
        for options in GREEDY_AND_WARM:
            options = {**options, "max_new_tokens": 16 if form == "regex" else 40}
            engine.use_tree(PLAIN)
            plain = engine.generate(PROMPT, grammar=grammar, **options)
            engine.use_tree(None)
            found = engine.generate(PROMPT, grammar=grammar, **options)
            assert found.token_ids == plain.token_ids
            assert sum(step.num_drafted for step in found.steps) > 8
    has_few = draft in {"EAGLE-3", "DFlash2"}  # tokens or candidates
    assert max(masked) > 0 or has_few, "places below the root are masked too"


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@every_draft
def test_a_draft_whose_logits_are_nan_says_so(draft: str, temperature: float, written: Any) -> None:
    """Also where the largest logit alone counts: its place hides what it is."""
    with opened(written, draft, tree=TreeSettings(size=8)) as engine:
        _, drafter = drafter_at(engine, TEXT, sampling=DraftSampling(temperature=temperature))
        output = drafter.model.model.get_output_embeddings()
        output.register_forward_hook(lambda _module, _inputs, logits: logits * torch.nan)
        with pytest.raises(EdgespecError, match="draft's logits are NaN"):
            drafter.expand(torch.tensor([1]), torch.tensor([-1]))
