"""The page in a browser, where one is here: a talk, branches, hostile markup. `scripts.check.page` tries the rest."""

import pytest

from tests.edgespec.serve.conftest import Started
from tests.support.page_browser import Page, browser, from_elsewhere, why_not
from tests.support.page_keeps import branches, failures
from tests.support.page_markup import code, formulas, hostile_formulas
from tests.support.page_talk import hostile, talking

MISSING = why_not()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_what_is_claimed_of_the_page_holds(start: Started) -> None:
    _, address = start()
    with browser() as driver:
        page = Page(driver, address)
        claims = (talking, hostile, code, formulas, hostile_formulas, branches, failures)
        found = dict(claim for one in claims for claim in one(page))
        assert driver.execute_script("return window.violations") == []
        assert from_elsewhere(driver, address) == []
    assert len(found) >= 40
    assert not [claim for claim, holds in found.items() if not holds]
