"""A target of eight layers, whose hidden states heads and drafters read."""

from pathlib import Path

import pytest

from tests.edgespec.draft.eagle3_head import TARGET
from tests.support.families import make_model, save_folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("eight") / "target", make_model(TARGET))
