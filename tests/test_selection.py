"""README's command has every claim once, and leaves to `pytest -m ""` what multiplies, starts programs or is slow."""

from pathlib import Path

from tests import selection


def test_the_list_of_slow_tests_names_tests_that_there_are() -> None:
    root = Path(__file__).parent.parent
    for slow in selection.SLOW_TESTS.read_text(encoding="utf-8").splitlines():
        function = slow.partition("[")[0]
        path, _, name = function.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (root / path).read_text(encoding="utf-8"), function
