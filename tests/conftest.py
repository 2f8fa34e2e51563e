"""Shared fixtures, and which tests run in which order.

Modules that take seconds to import are named within functions: the process that hands tests to workers begins them
that much earlier.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# One thread in the programs that tests start too: several workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import importlib
import itertools
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from edgespec.hub import other_programs
from tests import selection
from tests.hub import Cache
from tests.support.warm_program import warm_programs

gc.disable()  # until all tests are collected: what modules bring stays, and looks through it take a quarter of the time


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks say what README's command leaves out; the quickest rooms come first."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    selection.mark(items)
    items.sort(key=selection.quickness)


def pytest_collection_finish() -> None:
    """What is loaded by now is no garbage: it is not looked through again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    """One thread: results repeat, and tiny models run faster."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test draws without a seed of its own is the same in every run: what fails once fails again."""
    import torch

    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths for homes, made only by who writes to one: a folder for each of thousands of tests would take time."""
    root = tmp_path_factory.mktemp("homes")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(scope="session", autouse=True)
def _kernels_compiled_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Code is found by its text: tests with homes of their own, other workers and other runs compile nothing again."""
    from offload.native import compiler

    importlib.import_module("edgespec.placement.weights")  # whose folder would be the later one
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("kernels") if cache is None else cache.mkdir("kernels")
    compiler.keep_in(lambda: folder)


@pytest.fixture(autouse=True)
def _own_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own profiles and caches are none of a test's business."""
    monkeypatch.setenv("EDGESPEC_HOME", str(next(_homes)))
    monkeypatch.delenv("EDGESPEC_CACHE", raising=False)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What begins a command in place of `python` where the program is to have torch and transformers at once."""
    with warm_programs(tmp_path_factory.mktemp("warm") / "socket") as command:
        yield command


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder beside which nothing lies: drafts are looked for beside a model, and other tests' would be found."""
    path = tmp_path / "alone"
    path.mkdir()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty Hugging Face cache, and no other program's models."""
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(other_programs, "home_folder", lambda: tmp_path / "home")
    monkeypatch.setattr(other_programs, "SYSTEM_OLLAMA", tmp_path / "system-ollama")
    found = Cache(tmp_path / "hub")
    found.folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(found.folder))
    return found


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sharded bf16 Llama target and a smaller draft."""
    import torch
    from transformers import LlamaConfig

    from tests.support.families import FAMILIES, SMALL, make_model, save_folder

    root = tmp_path_factory.mktemp("pair")
    target = save_folder(root / "target", make_model(FAMILIES["llama"](), dtype=torch.bfloat16), shard="20KB")
    small = LlamaConfig(**{**SMALL, "hidden_size": 16, "num_hidden_layers": 1}, num_key_value_heads=2)
    return target, save_folder(root / "draft", make_model(small, seed=1, dtype=torch.bfloat16))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that sees, as `SeeingModel`: modules that use it are left out where Pillow is not installed."""
    module = importlib.import_module("tests.support.seeing_model")
    return module.seeing_model(tmp_path_factory.mktemp("seeing") / "model")
