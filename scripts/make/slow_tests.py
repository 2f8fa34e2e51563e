"""Write `tests/slow_tests.txt`, the tests that are too slow for README's command, from a run of all tests.

    python -m pytest -m "" -n auto -o junit_family=xunit1 --junitxml all.xml
    python -m scripts.make.slow_tests all.xml

A test is slow if the median of its cases takes more than 0.3 s, fixtures included. Run it on a quiet machine.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

SLOW_TESTS = Path(__file__).parents[2] / "tests" / "slow_tests.txt"
MAX_S = 0.3


def slow_functions(results: Path) -> list[str]:
    """Return the node ids, without cases, of the slow tests of a file that pytest's `--junitxml` wrote."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(results).iter("testcase"):
        path = Path(case.attrib["file"])
        module = ".".join(path.with_suffix("").parts)
        within = case.attrib["classname"].removeprefix(module).split(".")[1:]  # a class's tests
        name = case.attrib["name"].partition("[")[0]
        seconds["::".join([path.as_posix(), *within, name])].append(float(case.attrib["time"]))
    return sorted(function for function, found in seconds.items() if statistics.median(found) > MAX_S)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the file of --junitxml")
    found = slow_functions(parser.parse_args().results)
    SLOW_TESTS.write_text("".join(f"{function}\n" for function in found), encoding="utf-8")
    print(f"{len(found)} tests are slow")


if __name__ == "__main__":
    main()
