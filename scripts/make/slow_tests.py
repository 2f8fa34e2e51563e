"""Write `tests/slow_tests.txt`, the tests that are too slow for README's command, from a run of all tests.

    python -m pytest -m "" -n auto -o junit_family=xunit1 --junitxml all.xml
    python -m scripts.make.slow_tests all.xml

A test is slow if the median of its cases takes more than 0.3 s, fixtures included; of another one those cases are that
take longer, but for the first, which makes what all of them use. Run it on a quiet machine.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

SLOW_TESTS = Path(__file__).parents[2] / "tests" / "slow_tests.txt"
MAX_S = 0.3


def slow_tests(results: Path) -> list[str]:
    """Return the node ids of the slow tests, without cases, and of slow cases of a file that `--junitxml` wrote."""
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for case in ElementTree.parse(results).iter("testcase"):
        path = Path(case.attrib["file"])
        module = ".".join(path.with_suffix("").parts)
        within = case.attrib["classname"].removeprefix(module).split(".")[1:]  # a class's tests
        function = "::".join([path.as_posix(), *within, case.attrib["name"].partition("[")[0]])
        seconds[function][case.attrib["name"]] = float(case.attrib["time"])
    slow = []
    for function, found in seconds.items():
        if statistics.median(found.values()) > MAX_S:
            slow.append(function)
        else:
            place = function.rpartition("::")[0]
            slow += [f"{place}::{name}" for name in list(found)[1:] if found[name] > MAX_S]
    return sorted(slow)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the file of --junitxml")
    found = slow_tests(parser.parse_args().results)
    SLOW_TESTS.write_text("".join(f"{function}\n" for function in found), encoding="utf-8")
    print(f"{len(found)} tests and cases are slow")


if __name__ == "__main__":
    main()
