"""README's command has every claim once, and leaves to `pytest -m ""` what multiplies, starts programs or is slow."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.make.slow_tests import slow_functions
from tests import selection


def product(*axes: tuple[str, list[Any]]) -> list[dict[tuple[str, ...], tuple[object, ...]]]:
    """The cases of a test with these axes, the first one slowest."""
    cases: list[dict[tuple[str, ...], tuple[object, ...]]] = [{}]
    for names, values in axes:
        key = tuple(names.split(","))
        cases = [{**case, key: value if len(key) > 1 else (value,)} for case in cases for value in values]
    return cases


def kept(*axes: tuple[str, list[Any]]) -> list[tuple[object, ...]]:
    """The values of the cases that are in the default."""
    cases = product(*axes)
    chosen = selection.are_representative(cases)
    return [sum(case.values(), ()) for case, is_kept in zip(cases, chosen, strict=True) if is_kept]


def test_a_test_without_axes_is_in_it() -> None:
    assert selection.are_representative([{}]) == [True]


def test_a_table_of_rules_is_whole_and_a_long_one_is_cut() -> None:
    rows = [(f"key {number}", number) for number in range(20)]
    assert kept(("key,value", rows)) == rows
    assert kept(("name", list(range(100)))) == [(0,), (1,)]


def test_of_families_there_is_one_a_mechanism_and_of_seeds_there_are_two() -> None:
    assert kept(("family", ["opt", "llama", "gpt2", "qwen3-next"])) == [("llama",), ("qwen3-next",)]
    assert kept(("family", ["bloom", "mpt", "gpt_neo"])) == [("bloom",), ("mpt",)]
    pairs = [("llama", True), ("opt", True), ("qwen3-next", False)]
    assert kept(("family,streams", pairs)) == [("llama", True), ("qwen3-next", False)]
    assert kept(("seed", list(range(60)))) == [(0,), (1,)]


def test_a_product_has_each_value_once_beside_the_first_of_the_others() -> None:
    assert kept(("family", ["llama", "mamba2"]), ("flag", ["a", "b", "c"])) == [
        ("llama", "a"), ("llama", "b"), ("llama", "c"), ("mamba2", "a"),
    ]  # fmt: skip


def test_a_product_that_has_none_of_these_cases_has_its_first() -> None:
    cases = [
        case for case in product(("family", ["llama", "mamba2"]), ("flag", ["a", "b"])) if case[("flag",)] == ("b",)
    ]
    assert selection.are_representative(cases[1:]) == [True]


def starts_a_program() -> None:
    subprocess.run(["true"], check=True)


def test_what_a_test_calls_counts_as_used() -> None:
    def calls() -> None:
        starts_a_program()

    case = SimpleNamespace(function=calls, fixturenames=(), _fixtureinfo=SimpleNamespace(name2fixturedefs={}))
    assert selection.names_used(case) & selection.PROCESS  # type: ignore[arg-type]


def test_slow_are_functions_whose_median_case_takes_long(tmp_path: Path) -> None:
    (tmp_path / "all.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.cli.test_a" name="test_one[x]" file="tests/cli/test_a.py" time="0.9"/>
        <testcase classname="tests.cli.test_a" name="test_one[y]" file="tests/cli/test_a.py" time="0.8"/>
        <testcase classname="tests.cli.test_a" name="test_one[z]" file="tests/cli/test_a.py" time="0.1"/>
        <testcase classname="tests.cli.test_a" name="test_two[x]" file="tests/cli/test_a.py" time="9.0"/>
        <testcase classname="tests.cli.test_a" name="test_two[y]" file="tests/cli/test_a.py" time="0.1"/>
        <testcase classname="tests.cli.test_a" name="test_two[z]" file="tests/cli/test_a.py" time="0.1"/>
        </testsuite></testsuites>""",
        encoding="utf-8",
    )
    assert slow_functions(tmp_path / "all.xml") == ["tests/cli/test_a.py::test_one"]


def test_the_list_of_slow_tests_names_tests_that_there_are() -> None:
    root = Path(__file__).parent.parent
    for function in selection.SLOW_TESTS.read_text(encoding="utf-8").split():
        path, _, name = function.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (root / path).read_text(encoding="utf-8"), function
