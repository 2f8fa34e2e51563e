"""A prompt's log-probabilities: the model's own, in few passes, and in memory that is planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.decode import batch, reading
from edgespec.model.pass_rows import PassRows
from edgespec.model.row_chunks import rows_at_once
from tests.edgespec.draft.contract import open_engine
from tests.edgespec.draft.test_distributions import Allocated
from tests.support.families import FAMILIES, GROUPED, RECURRENT, make_model, save_folder

PLAIN = TreeSettings(policy="none")
PROMPT = [7 * number % 250 for number in range(90)]
WIDE = 40_000  # tokens of a vocabulary


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3.5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [None, 8])
def test_nothing_that_draws_a_text_counts(family: str, dtype: str, rows: int | None, tmp_path: Path) -> None:
    """Each is of the token that follows, at temperature 1, whatever the text's own settings are."""
    plain = make_model({**FAMILIES, **RECURRENT}[family](), dtype=getattr(torch, dtype))
    with torch.no_grad():
        whole = plain(torch.tensor([PROMPT]), use_cache=False).logits[0].double().log_softmax(-1)
    expected = whole[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].tolist()
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.3, "top_k": 2, "min_p": 0.2},
        {"temperature": 1.7, "repetition_penalty": 1.8, "presence_penalty": 1.0, "logit_bias": {PROMPT[4]: 50.0}},
    ]
    with open_engine(save_folder(tmp_path, plain), None, tree=PLAIN, dtype=dtype) as engine:
        if rows is not None:
            engine.target_model._chunk_rows = engine.target_model.layer_rows = rows
        found = [
            engine.generate(PROMPT, max_new_tokens=count, prompt_logprobs=2, seed=1, **options).prompt_logprobs
            for options in settings
            for count in (0, 3)
        ]
    near = 1e-4 if dtype == "float32" else 0.15  # of logits that are rounded to eight bits, in rows of other shapes
    for entries in found:
        assert [entry.token for entry in entries] == PROMPT[1:]
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=near)
        assert all(entry.top[0][1] >= entry.logprob - 1e-9 and len(entry.top) == 2 for entry in entries)


@pytest.mark.parametrize(("is_streamed", "parallel", "most"), [(True, 8, 1), (True, 3, 3), (False, 8, 2)])
def test_many_rows_share_a_pass_and_none_takes_two(
    pair_folders: tuple[Path, Path], is_streamed: bool, parallel: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = MemoryLimits(max_resident_layers=0) if is_streamed else MemoryLimits()
    with open_engine(*pair_folders, parallel=parallel, limits=limits) as engine:
        assert engine.draft_model is not None
        passes, drafted = count_passes(monkeypatch, engine)
        requests = [
            replace(engine.request(PROMPT[number:], max_new_tokens=0, prompt_logprobs=0), name=str(number))
            for number in range(8)
        ]
        found = dict(engine.generate_many(requests))
        assert [len(found[number].prompt_logprobs) for number in range(8)] == [89 - number for number in range(8)]
        assert (sum(passes), drafted) == (sum(90 - number for number in range(8)), [])
        assert len(passes) <= most
        del passes[:]
        engine.submit(requests[0]).result()
        assert passes == [90], "nothing is kept from before, and it is read once"


def count_passes(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> tuple[list[int], list[int]]:
    """The rows of each pass of the target and of the draft."""
    heard: tuple[list[int], list[int]] = [], []
    for model, rows in zip((engine.target_model, engine.draft_model), heard, strict=True):
        read = model.read

        def hearing(parts: list[PassRows], read: Any = read, rows: list[int] = rows) -> Any:
            rows.append(sum(part.count for part in parts))
            return read(parts)

        monkeypatch.setattr(model, "read", hearing)
    return heard


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])
def test_the_plan_has_room_for_them(
    kind: type[LlamaConfig], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path, make_model(kind(**{**GROUPED, "vocab_size": WIDE}, head_dim=8)))
    prompt = [number % 250 for number in range(rows_at_once(WIDE) + 20)]
    peaks: list[int] = []
    take = batch.take_prompt_rows

    def measured(sequence: Any, hidden: torch.Tensor, count: int) -> None:
        with Allocated() as allocated:
            take(sequence, hidden, count)
        peaks.append(allocated.peak + hidden.nbytes)

    monkeypatch.setattr(batch, "take_prompt_rows", measured)
    with open_engine(folder, None, tree=PLAIN, dtype=dtype, context_tokens=512) as engine:
        planned = engine.placement.device_bytes["target: one pass"]
        engine.generate(prompt, max_new_tokens=0, prompt_logprobs=5)
        assert WIDE * rows_at_once(WIDE) * engine.run_config.dtype.itemsize < peaks[0] < planned
        monkeypatch.setattr(reading, "row_chunks", lambda count, _vocab: [slice(0, count)])
        monkeypatch.setattr(reading, "ROWS_AT_ONCE", len(prompt))
        engine.generate(prompt, max_new_tokens=0, prompt_logprobs=5)
        assert peaks[1] > planned, "all rows at once are seen"
