"""An engine without trees whose target runs its family's own forward: the plan, streamed layers, turns, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, RwkvConfig

from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.prefix_cache.prompt_cache import PromptCache
from offload.stream import LayerStream
from tests.conftest import greedy_tokens
from tests.support.tiny_checkpoints import save_folder

NUM_LAYERS, NEW_TOKENS = 4, 5
PROMPTS = [list(b"def main():"), list(b"import os"), list(b"x")]
GREEDY = SamplingSettings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=257, hidden_size=32, n_layer=NUM_LAYERS, n_head=4, bos_token_id=1, eos_token_id=256, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return save_folder(tmp_path_factory.mktemp("plain") / "bloom", model)


def open_engine(folder: Path, **options: Any) -> Engine:
    limits = MemoryLimits(max_resident_layers=0)
    tree = options.pop("tree", TreeSettings(policy="none"))
    return Engine.from_pretrained(folder, dtype="float32", context_tokens=64, limits=limits, tree=tree, **options)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with open_engine(folder, parallel=3) as found:
        yield found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers' own generate adds to each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [greedy_tokens(model, prompt, NEW_TOKENS, eos_token_id=None, pad_token_id=0) for prompt in PROMPTS]


def texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the new tokens of prompts that share their passes."""
    requests = [engine.request(prompt, max_new_tokens=NEW_TOKENS, sampling=GREEDY) for prompt in prompts]
    return [list(handle.result().token_ids) for handle in [engine.submit(request) for request in requests]]


@pytest.mark.parametrize("count", [1, 3])
def test_each_streamed_layer_is_read_once_a_pass(
    engine: Engine, expected: list[list[int]], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text and three take as many reads of layers; all have the tokens of generate."""
    acquire, read = LayerStream.acquire, []

    def counted(stream: LayerStream, layer: int) -> dict[str, torch.Tensor]:
        read.append(layer)
        return acquire(stream, layer)

    monkeypatch.setattr(LayerStream, "acquire", counted)
    assert texts(engine, PROMPTS[:count]) == expected[:count]
    assert read == [*range(NUM_LAYERS)] * NEW_TOKENS


def test_a_cancel_within_a_pass_ends_the_texts_and_nothing_else(engine: Engine, expected: list[list[int]]) -> None:
    """The next text has the tokens of generate."""
    request = engine.request(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=GREEDY)
    cut = engine.submit(request, on_prefill=lambda *_: engine.cancel(abandon=True))
    assert cut.result().finish_reason == "interrupted"
    assert texts(engine, PROMPTS[:1]) == expected[:1]


def test_a_turn_goes_on_from_the_last_one(engine: Engine, expected: list[list[int]]) -> None:
    """Rows of the turn before are not read again, and the answer is that of the whole text."""
    prompt = [*PROMPTS[0], *expected[0]]
    engine.forget()
    whole = engine.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=GREEDY)
    engine.forget()
    engine.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=GREEDY)
    turn = engine.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=GREEDY, reuse=True)
    assert turn.token_ids == whole.token_ids
    assert turn.steps[0].num_cached == len(prompt) - 1


def test_sampled_texts_are_the_same_alone_and_in_company(engine: Engine) -> None:
    """The noise is the text's own."""
    request = engine.request(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=SamplingSettings(temperature=1.0), seed=3)
    alone = engine.submit(request).result().token_ids
    handles = [engine.submit(request), *(engine.submit(engine.request(p, max_new_tokens=4)) for p in PROMPTS[1:])]
    assert handles[0].result().token_ids == alone


def test_the_plan_counts_the_familys_own_cache(engine: Engine) -> None:
    """As many bytes as a text has, and more while a layer's keys become longer."""
    cache = engine.target_model.new_text()
    engine.target_model.read_text(cache, torch.zeros(64, dtype=torch.long))
    planned = engine.planned.device_bytes["target: its own cache"]
    assert 3 * cache.num_bytes <= planned <= 5 * cache.num_bytes


def test_the_output_is_verified_like_any_other(engine: Engine) -> None:
    """Each token is the target's own in its context, which is read token by token."""
    assert all(verdict.is_lossless for verdict in engine.verify_lossless(PROMPTS[:1], max_new_tokens=3))


def test_a_draft_is_refused_with_the_reason(folder: Path, pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """As target and as draft; without trees the draft is left out."""
    config = RwkvConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2, context_length=64)
    states = save_folder(tmp_path / "rwkv", AutoModelForCausalLM.from_config(config))
    with pytest.raises(EdgespecError, match="takes no draft: it is decoded plainly, one token a pass, because it has"):
        open_engine(states, draft=pair_folders[1], tree=TreeSettings())
    with pytest.raises(EdgespecError, match="cannot draft, because it adds biases"):
        open_engine(pair_folders[0], draft=folder, tree=TreeSettings())
    open_engine(folder, draft=folder, tree=TreeSettings(policy="none")).close()


def test_a_prompt_cache_is_refused(engine: Engine, tmp_path: Path) -> None:
    """The family's own cache has no form in a file."""
    with pytest.raises(EdgespecError, match="its own cache has no form in a file"):
        PromptCache(tmp_path / "rows", engine.pair, engine.run_config)
