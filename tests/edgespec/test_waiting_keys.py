"""Texts whose keys and values wait in RAM beside a card are, token by token, those of a card that has room for all.

The card is pretended (`tests/support/pretend_cuda.py`). Its limit is what does not hold keys and values of all layers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.model.pass_rows import next_rows
from edgespec.model.target import Target
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.tuning.draft_worth import DraftWorth
from offload.placement import KEYS
from tests.support.families import SMALL, make_model, save_folder
from tests.support.moved_keys import moved_keys
from tests.support.pretend_cuda import pretend_cuda

LONG = {**SMALL, "num_hidden_layers": 6, "max_position_embeddings": 4096}
TREE, PLAIN = TreeSettings(size=9, depth=3), TreeSettings(policy="none")
PROMPT = torch.randint(0, 255, (500,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with pretend_cuda(), patch.object(DraftWorth, "is_known", False):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of six layers, and a draft that agrees with it now and then."""
    root = tmp_path_factory.mktemp("long")
    target = make_model(LlamaConfig(**LONG, num_key_value_heads=2))
    draft = make_model(LlamaConfig(**{**LONG, "num_hidden_layers": 1}, num_key_value_heads=2))
    draft.load_state_dict(target.state_dict(), strict=False)
    return save_folder(root / "target", target), save_folder(root / "draft", draft)


def opened(folders: tuple[Path, Path], max_gpu_bytes: int, **options: Any) -> Engine:
    limits = MemoryLimits(max_gpu_bytes=max_gpu_bytes, max_cpu_bytes=2 << 30)
    options = {"context_tokens": 2048, "dtype": "float32", "parallel": 3, "tree": TREE, **options}
    return Engine.from_pretrained(
        folders[0], draft=folders[1], device="cuda", limits=limits, self_check=False, profile="none", **options
    )


def both(folders: tuple[Path, Path], read: Callable[[Engine], Any], **options: Any) -> tuple[Any, Any]:
    """What is read with all layers resident, and with keys and values of most of them in RAM."""
    with opened(folders, 4 << 30, **options) as resident:
        placement = resident.placement
        assert placement.is_resident
        assert not placement.waiting_keys
        expected = read(resident)
    limit_bytes = placement.planned_bytes - placement.device_bytes[KEYS] // 2
    with opened(folders, limit_bytes, **options) as engine:
        assert 3 <= len(engine.placement.waiting_keys) < 6
        assert engine.placement.planned_bytes <= limit_bytes
        return expected, read(engine)


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9},
]  # fmt: skip


def texts(engine: Engine, ways: list[dict[str, Any]], *, new: int = 12) -> list[Any]:
    """The tokens of texts in these ways, in company; their prompts are of several lengths."""
    requests = [
        engine.request(PROMPT[150 * number :], max_new_tokens=new, ignore_eos=True, **way)
        for number, way in enumerate(ways)
    ]
    handles = [engine.submit(request) for request in requests]
    return [handle.result().token_ids for handle in handles]


@pytest.mark.parametrize(
    ("tree", "dtype"),
    [(TREE, "bfloat16"), (TreeSettings(policy="dyspec", size=9), "float32"), (PLAIN, "bfloat16")],
    ids=["trees in bf16", "sampled trees", "none in bf16"],
)
def test_texts_alone_and_together_are_those_of_a_card_with_room(
    tree: TreeSettings, dtype: str, folders: tuple[Path, Path]
) -> None:
    def read(engine: Engine) -> list[Any]:
        return [*(texts(engine, [way]) for way in WAYS[:2]), texts(engine, WAYS)]

    expected, found = both(folders, read, tree=tree, dtype=dtype)
    assert found == expected
    assert len({tuple(ids) for ids in found[2]}) == 3


def test_turns_that_go_on_go_back_and_begin_alike(folders: tuple[Path, Path]) -> None:
    """Rows stay for the next turn, are cut, and are copied for another text that begins with them."""
    prompts = [PROMPT[:200], PROMPT[:400], PROMPT[:300], [*PROMPT[:250], 7, 8, 9], PROMPT]

    def read(engine: Engine) -> list[Any]:
        return [
            engine.generate(prompt, max_new_tokens=6, temperature=0.8, seed=1, reuse=True, ignore_eos=True).token_ids
            for prompt in prompts
        ]

    expected, found = both(folders, read, parallel=2)
    assert found == expected


def test_prompt_caches_are_written_and_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Files of both have the same rows, and what is read of a file another has written."""
    path, prompts = tmp_path / "prompt.safetensors", [[*PROMPT[:300], *PROMPT[at : at + 3]] for at in (310, 320)]
    files = []

    def read(engine: Engine) -> list[Any]:
        path.unlink(missing_ok=True)
        found = []
        for _ in range(2):
            cache = PromptCache(path, engine.pair, engine.run_config)
            cache.keep_beginning(prompts)
            engine.prefix_cache.forget()
            engine.prefix_cache.prompt_cache = cache
            found += [
                engine.generate(prompt, max_new_tokens=6, temperature=0.8, seed=1, ignore_eos=True).token_ids
                for prompt in prompts
            ]
        with safe_open(path, "pt") as file:
            files.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return found

    expected, found = both(folders, read)
    assert found == expected
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], rows) for name, rows in files[1].items())


def test_only_new_rows_go_back(folders: tuple[Path, Path]) -> None:
    """A step's pass brings the text's rows once, and takes back those of the tree, each in one piece."""

    def read(engine: Engine) -> list[Any]:
        found = texts(engine, WAYS[:1], new=1)
        with moved_keys() as moved:
            target = Target(engine.target_model)
            target.prefill(torch.tensor(PROMPT).to(engine.device))
            moved.clear()
            engine.target_model.read([next_rows(target.cache, torch.arange(9).to(engine.device))])
        num_layers = len(engine.placement.waiting_keys)
        row_bytes = 2 * 2 * 8 * 4  # of two heads of eight numbers, in float32
        if num_layers:
            assert moved["back"] == num_layers * 9 * row_bytes
            assert moved["brought"] == num_layers * len(PROMPT) * row_bytes
        return found

    both(folders, read)
