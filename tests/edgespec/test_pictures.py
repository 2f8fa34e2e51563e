"""Prompts with pictures through a whole engine: texts are those of generate, and no picture finds another's rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec.config import MemoryLimits
from edgespec.draft.lookup import TextLookup
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.prefix_cache.slots import Slots
from edgespec.text.request import TextOptions
from edgespec.text.results import GenerationResult
from edgespec.tree.settings import TreeSettings
from tests.support.families import FAMILIES, make_model, save_folder
from tests.support.tiny_pictures import NEW, SEEING, Family, generated, seeing_prompt

GREEDY: TextOptions = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_id": []}


def saved(family: Family, folder: Path) -> Path:
    family.model.save_pretrained(folder)
    family.processor.tokenizer.save_pretrained(folder)
    return folder


def opened(
    folder: Path, *, policy: str | None = None, resident: int | None = None, draft: Path | None = None
) -> Engine:
    return Engine.from_pretrained(
        folder, draft=draft, device="cpu", dtype="float32", context_tokens=512, parallel=4,
        tree=None if policy is None else TreeSettings(policy=policy), limits=MemoryLimits(max_resident_layers=resident),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["smolvlm"])
def family(request: pytest.FixtureRequest) -> Family:
    return SEEING[request.param]()


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(family, tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with opened(folder) as engine:
        yield engine


def text_of(result: GenerationResult) -> list[int]:
    return list(result.token_ids)


def num_runs(engine: Engine) -> int:
    return engine._loaded.sight.num_runs


@pytest.mark.parametrize(
    ("family", "resident"), [(name, (None, 0)[number % 2]) for number, name in enumerate(SEEING)], indirect=["family"]
)
def test_texts_alone_and_in_company_are_those_of_generate(family: Family, folder: Path, resident: int | None) -> None:
    """Two pictures' texts and one of words share passes; a further question runs no tower, and keeps earlier rows."""
    first, second = seeing_prompt(family, (1, 2)), seeing_prompt(family, (3, 4))
    words = PicturePrompt(ids=list(range(40, 60)), inputs={}, image_rows=[])
    truths = [generated(family, prompt) for prompt in (first, second, words)]
    with opened(folder, resident=resident) as engine:
        assert text_of(engine.generate(first, **GREEDY)) == truths[0]
        requests = [engine.request(prompt, **GREEDY) for prompt in (first, second)]
        found = dict(engine.generate_many([*requests, engine.request(words.ids, **GREEDY)]))
        assert [text_of(found[number]) for number in range(3)] == truths
        assert num_runs(engine) == 2
        again = engine.generate(first, reuse=True, **GREEDY)
        assert text_of(again) == truths[0]
        assert num_runs(engine) == 2
        has_states = "qwen3_5" in type(family.model).__module__  # which reach back to the ends of turns alone
        assert again.cached_tokens == (0 if has_states else len(first.ids))


def test_another_picture_under_the_same_words_keeps_none_of_the_rows(engine: Engine, family: Family) -> None:
    one, other = seeing_prompt(family, (1, 2)), seeing_prompt(family, (3, 2))
    assert one.ids == other.ids
    engine.generate(one, **GREEDY)
    found = engine.generate(other, reuse=True, **GREEDY)
    assert found.cached_tokens <= one.image_rows[0][0]
    assert text_of(found) == generated(family, other)


def test_texts_that_go_on_begin_on_all_rows(engine: Engine, family: Family) -> None:
    prompt = seeing_prompt(family, (1, 2))
    text = text_of(engine.generate(prompt, **GREEDY))
    longer = replace(prompt, ids=[*prompt.ids, *text[:9]])
    found = engine.generate(longer, reuse=True, **GREEDY)
    assert text_of(found)[: NEW - 9] == text[9:]
    assert found.cached_tokens == len(longer.ids) - 1
    assert num_runs(engine) == 1


@pytest.mark.parametrize("kind", ["slots", "prompt_cache"])
def test_files_of_rows_tell_pictures_apart(family: Family, folder: Path, kind: str, tmp_path: Path) -> None:
    one, other = seeing_prompt(family, (1, 2)), seeing_prompt(family, (3, 2))

    def use_files(engine: Engine) -> None:
        if kind == "slots":
            (tmp_path / "slots").mkdir(exist_ok=True)
            engine.prefix_cache.slots = Slots(tmp_path / "slots", engine.pair, engine.run_config)
        else:
            cache = PromptCache(tmp_path / "rows.safetensors", engine.pair, engine.run_config)
            cache.keep_beginning([engine.request(one, **GREEDY).keys])
            engine.prefix_cache.prompt_cache = cache

    with opened(folder) as engine:
        use_files(engine)
        engine.generate(one, **GREEDY)
        engine.prefix_cache.store()
    with opened(folder) as engine:
        use_files(engine)
        found = engine.generate(other, **GREEDY)
        assert found.cached_tokens < one.image_rows[0][1]
        assert text_of(found) == generated(family, other)
        engine.forget()
        again = engine.generate(one, **GREEDY)
        assert again.cached_tokens >= len(one.ids) - 1, "the same picture's rows are found"
        assert text_of(again) == generated(family, one)


def test_drawn_texts_are_those_of_plain_decoding(family: Family, folder: Path) -> None:
    prompt = seeing_prompt(family, (1, 2))
    options: TextOptions = {"max_new_tokens": NEW, "temperature": 0.8, "seed": 5, "eos_token_id": []}
    with opened(folder) as engine, opened(folder, policy="none") as plain:
        assert text_of(engine.generate(prompt, **options)) == text_of(plain.generate(prompt, **options))


def test_looked_up_text_and_the_corpus_have_no_rows_of_pictures(
    engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, image = seeing_prompt(family, (1, 2)), family.model.config.image_token_id
    begun: list[list[int]] = []
    before = TextLookup.begin

    def begin(lookup: TextLookup, ids: Sequence[int]) -> None:
        begun.append(list(ids))
        before(lookup, ids)

    monkeypatch.setattr(TextLookup, "begin", begin)
    corpus = engine.trees.use_corpus(own_texts=True)
    text = text_of(engine.generate(prompt, **GREEDY))
    (ids,) = begun
    assert image not in ids
    assert [token for token in ids if token < 0] == [-1 - number for number in range(len(prompt.image_rows))]
    words = [token for token in prompt.ids if token != image]
    assert [token for token in ids if token >= 0] == words
    assert corpus.num_tokens == len(words) + len(text) + len(prompt.image_rows) + 1
    assert all(image not in after for after in corpus.automaton.transitions)


def test_a_prompts_own_tokens_are_scored_with_its_pictures(engine: Engine, family: Family) -> None:
    prompt = seeing_prompt(family, (1, 2))
    found = engine.generate(prompt, max_new_tokens=0, prompt_logprobs=0)
    with torch.no_grad():
        logits = family.model(input_ids=torch.tensor([prompt.ids]), **prompt.inputs).logits[0].log_softmax(-1)
    expected = [float(logits[row, token]) for row, token in enumerate(prompt.ids[1:])]
    assert [entry.logprob for entry in found.prompt_logprobs] == pytest.approx(expected, abs=1e-3)


def test_the_check_for_losslessness_reads_pictures(engine: Engine, family: Family) -> None:
    (verdict,) = engine.verify_lossless([seeing_prompt(family, (1, 2))], max_new_tokens=8, ignore_eos=True)
    assert verdict.is_lossless
    assert verdict.num_tokens == 8


def test_a_model_of_words_alone_refuses_pictures(tmp_path: Path, family: Family) -> None:
    folder = save_folder(tmp_path / "llama", make_model(FAMILIES["llama"]()))
    with opened(folder) as engine, pytest.raises(EdgespecError, match=r"type 'llama' are not read: .* no tower"):
        engine.generate(PicturePrompt(ids=[1, 2, 3], inputs={}, image_rows=[(1, 2, "a")]), **GREEDY)
