"""Which tests README's command leaves to `pytest -m ""`: by what a test uses, has taken, and is parametrised with.

`process`: it starts programs, or opens a terminal. `law`: it compares frequencies of draws with a distribution.
`slow`: most of its cases take more than 0.3 s, or this one (`slow_tests.txt`, by `python -m scripts.make.slow_tests`).
`grid`: it is a further case of a product, or of an axis that multiplies. A test without any of these is in the default.
"""

import types
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

PROCESS = frozenset({"subprocess", "pexpect", "multiprocessing", "pty"})
LAWS = frozenset({"binom", "chisquare", "kstest"})
SLOW_TESTS = Path(__file__).parent / "slow_tests.txt"
# Axes whose values repeat a claim for another model, format or number; others are tables of rules.
MULTIPLYING = frozenset({
    "architecture", "attention", "block_size", "chunk_rows", "compute_s", "copy_s", "count", "depth", "device", "draw",
    "dtype", "family", "fault", "form", "group_size", "index", "kind", "layer_rows", "make_config", "model", "nodes",
    "num_pinned", "num_resident", "order", "policy", "quant", "resident", "seed", "shape", "shard", "size",
    "temperature", "tree", "width", "window",
})  # fmt: skip
# One family a mechanism: attention, windows, an earlier layer's keys, experts, the delta rule, Mamba, latents
FAMILIES = frozenset({"llama", "gemma3", "gemma4-shared", "qwen3-moe", "qwen3-next", "mamba2", "deepseek_v3"})
MAX_VALUES = 24  # of a table of rules
NUM_KEPT = 2  # values of an axis that multiplies
OF_TESTS = ("tests.", "scripts.")
FIRST_ROOMS = (
    "test_architecture", "edgespec/tree", "edgespec/verify", "edgespec/sampling", "edgespec/grow", "edgespec/tuning",
    "edgespec/decode", "edgespec/model", "edgespec/text", "edgespec/draft", "offload", "edgespec", "profiles", "cli",
)  # fmt: skip


def mark(items: Sequence[pytest.Item]) -> None:
    """Give the tests the marks by which the default set is chosen."""
    slow = frozenset(SLOW_TESTS.read_text(encoding="utf-8").splitlines())
    by_function: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            by_function.setdefault(function_of(item), []).append(item)
    for function, cases in by_function.items():
        names = names_used(cases[0])
        marks = {"process": bool(names & PROCESS), "law": bool(names & LAWS)}
        for case, is_kept in zip(cases, are_representative([values_of(case) for case in cases]), strict=True):
            is_slow = function in slow or case.nodeid in slow
            for word, applies in {**marks, "slow": is_slow, "grid": not is_kept}.items():
                if applies:
                    case.add_marker(word)


def function_of(item: pytest.Item) -> str:
    """Return the test's name without its case."""
    return item.nodeid.partition("[")[0]


def quickness(item: pytest.Item) -> int:
    """Return the place of the test's room among all: what is quick comes first, so that a mistake shows early."""
    path = item.nodeid.removeprefix("tests/")
    return next((place for place, room in enumerate(FIRST_ROOMS) if path.startswith(room)), len(FIRST_ROOMS))


def values_of(case: pytest.Function) -> dict[tuple[str, ...], tuple[object, ...]]:
    """Return a case's values by the names of an axis: several names that are given together are one."""
    params = case.callspec.params if hasattr(case, "callspec") else {}
    axes = []
    for given in case.iter_markers("parametrize"):
        names = given.args[0]
        axes.append(tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names))
    of_marks = {name for names in axes for name in names}
    axes += [(name,) for name in params if name not in of_marks]
    return {names: tuple(params[name] for name in names) for names in axes}


def are_representative(cases: Sequence[dict[tuple[str, ...], tuple[object, ...]]]) -> list[bool]:
    """Return which cases of a test are in the default: each value that an axis keeps once, beside the others' first."""
    kept = {}  # of each axis, its values' identities, the first one first
    for names in cases[0]:
        values = {tuple(map(id, case[names])): case[names] for case in cases}
        kept[names] = list(values)
        multiplies = MULTIPLYING.issuperset(names) and (len(names) == 1 or {*names} == {"form", "model"})
        if "family" in names or multiplies or len(values) > MAX_VALUES:
            known = [of for of, value in values.items() if FAMILIES.intersection(map(str, value))]
            kept[names] = known or kept[names][:NUM_KEPT]
    found = []
    for case in cases:
        own = {names: tuple(map(id, values)) for names, values in case.items()}
        is_kept = all(own[names] in kept[names] for names in own)
        found.append(is_kept and sum(own[names] != kept[names][0] for names in own) <= 1)
    return found if any(found) else [True, *found[1:]]


def names_used(case: pytest.Function) -> frozenset[str]:
    """Return the names that a test, its fixtures, and the functions of tests that they call mention."""
    fixtures = [found.func for name in case.fixturenames for found in case._fixtureinfo.name2fixturedefs.get(name, ())]
    functions = [found for found in (case.function, *fixtures) if isinstance(found, types.FunctionType)]
    return frozenset().union(*map(_mentioned, functions))


@cache
def _mentioned(function: types.FunctionType) -> frozenset[str]:
    names: set[str] = set()
    seen = set()
    waiting: list[object] = [function]
    while waiting:
        current = waiting.pop()
        current = getattr(current, "__wrapped__", current)
        if not isinstance(current, types.FunctionType) or current in seen:
            continue
        seen.add(current)
        own = set(_names_in(current.__code__))
        names |= own
        for name in own:
            found = current.__globals__.get(name)
            if isinstance(found, types.ModuleType):
                names.add(found.__name__.partition(".")[0])
                if found.__name__.startswith(OF_TESTS):
                    waiting += [getattr(found, other) for other in own if hasattr(found, other)]
            elif str(getattr(found, "__module__", "")).startswith(OF_TESTS):
                waiting += vars(found).values() if isinstance(found, type) else [found]
    return frozenset(names)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
