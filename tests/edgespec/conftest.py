"""A draft for targets of any family, with the same tokens."""

from pathlib import Path

import pytest

from tests.support.families import FAMILIES, make_model, save_folder


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("pair") / "draft", make_model(FAMILIES["llama"](), seed=1))
