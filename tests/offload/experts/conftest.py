"""A mixture that no test changes."""

from pathlib import Path

import pytest

from tests.offload.experts.mixtures import save_mixture


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("mixture"), "qwen3-moe")
