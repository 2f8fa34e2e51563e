"""Write a part of a page that is made from the code, or say whether it is stale."""

import argparse
from collections.abc import Callable
from pathlib import Path


def write_or_compare(path: Path, made: Callable[[str], str], *, module: str, description: str | None) -> int:
    """Write the page that `made` gives for the one at `path`; with --check, return 1 where they differ."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is stale")
    check = parser.parse_args().check
    page = path.read_text(encoding="utf-8")
    if check:
        is_stale = page != made(page)
        print(f"{path} is {f'stale: run python -m {module}' if is_stale else 'up to date'}")
        return int(is_stale)
    path.write_text(made(page), encoding="utf-8")
    print(f"written: {path}")
    return 0
