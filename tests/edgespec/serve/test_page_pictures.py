"""Pictures on the page, in a browser where one is here: the answers are transformers' own."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import Engine
from tests.edgespec.serve.conftest import Started
from tests.support.page_browser import Page, browser, from_elsewhere, why_not
from tests.support.page_pictures import pictures
from tests.support.picture_files import saved
from tests.support.seeing_model import CAT, DOG, PLACE, SeeingModel, engine_of

MISSING = why_not()


@pytest.fixture(scope="module")
def engine(seeing: SeeingModel) -> Iterator[Engine]:
    with engine_of(seeing, parallel=2) as engine:
        yield engine


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_what_is_claimed_of_pictures_on_the_page_holds(start: Started, seeing: SeeingModel, tmp_path: Path) -> None:
    files = {"cat": tmp_path / "cat.png", "dog": tmp_path / "dog.webp", "text": tmp_path / "words.txt"}
    files["cat"].write_bytes(saved(CAT))
    files["dog"].write_bytes(saved(DOG, "WEBP", lossless=True))
    files["text"].write_text("words")
    first = seeing.said(f"[user]{PLACE}What is this?\n[assistant]", CAT)
    second = f"[user]{PLACE}What is this?\n[assistant]{first}\n[user]{PLACE}And this?\n[assistant]"
    truths = {"cat": first, "dog": seeing.said(second, CAT, DOG)}
    _, address = start()
    with browser() as driver:
        found = dict(pictures(Page(driver, address), files, base64.b64encode(saved(CAT)).decode(), truths))
        if shown := os.environ.get("EDGESPEC_SCREENSHOT"):
            driver.save_screenshot(shown)
        assert driver.execute_script("return window.violations") == []
        assert from_elsewhere(driver, address) == []
    assert len(found) == 9
    assert not [claim for claim, holds in found.items() if not holds]
