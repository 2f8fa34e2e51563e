"""Drafts that lack some added tokens of the target, or have some of their own: they draft, and change no text."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, PreTrainedTokenizerFast

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.cli.open_pair import open_named_pair
from edgespec.cli.options.model import ModelOptions
from edgespec.doctor.inventory import Inspector, drafts_for
from edgespec.pair.pair import check_vocabularies, open_pair
from edgespec.pair.same_tokens import MAX_UNSHARED, Tokens, unshared_tokens
from edgespec.text.results import GenerationResult
from tests.support.families import FAMILIES, SMALL, make_model, make_tokenizer, save_folder

THINK = ["<tool_response>", "</tool_response>", "<think>", "</think>"]
PADDED = 264  # rows of the tables of both
BIAS = 4.0  # of the added tokens' logits


def with_added(*names: str, special: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return tokenizer


def renamed(name: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    text = tokenizer.backend_tokenizer.to_str().replace("<|endoftext|>", name)
    return PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(text), eos_token=name)


@pytest.mark.parametrize(
    ("target", "draft", "unshared"),
    [
        (make_tokenizer(), make_tokenizer(), set()),
        (with_added(*THINK), make_tokenizer(), {257, 258, 259, 260}),
        (make_tokenizer(), with_added(*THINK), {257, 258, 259, 260}),
        (with_added("<a>", "<b>", "<c>"), with_added("<a>", "<d>"), {258, 259}),
        (with_added("<a>", special=False), with_added("<b>", special=False), {257}),
        (renamed("<|im_end|>"), make_tokenizer(), {256}),
        (with_added(*(f"<{n}>" for n in range(MAX_UNSHARED))), make_tokenizer(), set(range(257, 257 + MAX_UNSHARED))),
    ],
)  # fmt: skip
def test_ids_of_added_tokens_may_differ(
    target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast, unshared: set[int]
) -> None:
    assert unshared_tokens(Tokens.of(target), Tokens.of(draft)) == unshared


def test_ids_that_mean_two_ordinary_tokens_are_refused_by_their_number() -> None:
    with pytest.raises(EdgespecError, match="in 2 of 258: id 0 is '!' in the target and '\"' in the draft") as caught:
        unshared_tokens(Tokens.of(with_added("<a>")), Tokens.of(make_tokenizer(swapped=True)))
    assert caught.value.code == "E_TOKENIZER_MISMATCH"


def test_more_ids_than_added_tokens_can_be_are_refused() -> None:
    many = with_added(*(f"<{n}>" for n in range(MAX_UNSHARED + 1)))
    with pytest.raises(EdgespecError, match=f"in {MAX_UNSHARED + 1} of {257 + MAX_UNSHARED + 1}: id 257 is '<0>'"):
        unshared_tokens(Tokens.of(many), Tokens.of(make_tokenizer()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with four added tokens that it likes to draw, and drafts with the padded table, and a smaller one."""
    root = tmp_path_factory.mktemp("added")
    config = FAMILIES["llama"]()
    config.vocab_size = PADDED
    model = make_model(config)
    small = {**SMALL, "hidden_size": 16, "num_hidden_layers": 1}
    padded = make_model(LlamaConfig(**{**small, "vocab_size": PADDED}, num_key_value_heads=2), seed=1)
    with torch.no_grad():
        for table, share in ((model.get_input_embeddings().weight, 1), (padded.get_output_embeddings().weight, 2)):
            table[257:] = table[40:47] * share
    return {
        "target": save_folder(root / "target", model, tokenizer=with_added(*THINK)),
        "padded": save_folder(root / "padded", padded),
        "small": save_folder(root / "small", make_model(LlamaConfig(**small, num_key_value_heads=2), seed=1)),
        "more": save_folder(root / "more", padded, tokenizer=with_added(*THINK, "<x>")),
    }


@pytest.fixture(scope="module", params=["padded", "small", "more"])
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Engine]:
    options: dict[str, Any] = {"dtype": "float32", "parallel": 24, "context_tokens": 64}
    draft = folders[request.param]
    with Engine.from_pretrained(folders["target"], draft=draft, tree=TreeSettings(size=16), **options) as found:
        yield found


def drawn(engine: Engine, tree: TreeSettings, count: int, **options: Any) -> list[tuple[int, ...]]:
    """Texts in which the target likes the added tokens, and the draft would too, if it were let."""
    engine.use_tree(tree)
    bias = dict.fromkeys(range(257, 261), BIAS)
    asked = [
        engine.request([258, 40 + seed % 3], seed=seed, logit_bias=bias, ignore_eos=True, **options)
        for seed in range(count)
    ]
    found = dict(engine.generate_many(asked))
    steps = [step for result in found.values() if isinstance(result, GenerationResult) for step in result.steps]
    proposed = {  # by the draft: what the text has had before may have any token
        token
        for step in steps
        for token, is_proposed, is_looked_up in zip(step.tokens, step.from_draft, step.from_lookup, strict=False)
        if is_proposed and not is_looked_up
    }
    assert not proposed & engine.pair.unshared
    return [found[number].token_ids for number in range(count)]


def share_of_added(texts: list[tuple[int, ...]]) -> float:
    tokens = [token for text in texts for token in text]
    return sum(257 <= token <= 260 for token in tokens) / len(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_gives_plain_decodings_text_and_never_proposes_them(engine: Engine, temperature: float) -> None:
    options = {"max_new_tokens": 12, "temperature": temperature}
    plain = drawn(engine, TreeSettings(policy="none"), 4, **options)
    assert share_of_added(plain) > 0.1
    for policy in ("adaptive", "opt-tree", "eagle2"):
        tree = TreeSettings(policy=policy, size=6, draw="coupled")
        assert drawn(engine, tree, 4, **options) == plain, policy


@pytest.mark.parametrize("engine", ["padded"], indirect=True)
def test_sampled_children_of_such_a_draft_leave_the_targets_distribution(engine: Engine) -> None:
    """Of 240 second tokens by rejection and 240 plain ones, as many are such ids: within 4 deviations, odds 6e-5."""
    shares = []
    for tree in (TreeSettings(policy="dyspec", size=4, depth=2, draw="sampled"), TreeSettings(policy="none")):
        texts = drawn(engine, tree, 240, max_new_tokens=2, temperature=1.0)
        shares.append(share_of_added([text[1:] for text in texts]))
    assert 0.1 < shares[1] < 0.9
    assert abs(shares[0] - shares[1]) < 4 * (2 * 0.25 / 240) ** 0.5


def test_a_note_says_how_many(engine: Engine, folders: dict[str, Path]) -> None:
    count = len(engine.pair.unshared)
    (note,) = engine.pair.notes
    assert count == (1 if engine.pair.draft and engine.pair.draft.folder == folders["more"] else 4)
    assert note.startswith("1 token id is not" if count == 1 else "4 token ids are not the same in draft and target")


def test_what_looks_for_drafts_says_the_same_as_a_run(folders: dict[str, Path], tmp_path: Path) -> None:
    inspector = Inspector()
    target, *drafts = (inspector.inspect(name, folder) for name, folder in folders.items())
    assert {draft.name for draft in drafts_for(target, drafts)} == {"padded", "small", "more"}
    pair = open_pair(folders["target"], folders["small"])
    assert pair.draft is not None
    check_vocabularies(pair.target, pair.draft)
    other = shutil.copytree(folders["small"], tmp_path / "other")
    make_tokenizer(swapped=True).save_pretrained(other)
    assert drafts_for(target, [inspector.inspect("other", other)]) == []
    shutil.copytree(folders["small"], tmp_path / "fitting")
    with pytest.raises(EdgespecError) as caught:
        open_named_pair(ModelOptions(target=folders["target"], draft=other))
    assert "fitting" in caught.value.fix
