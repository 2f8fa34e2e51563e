"""Every published form of a draft: its container, and whether what it computes in a tree is what the format says.

    python -m scripts.check.draft_forms

Each form is a tiny random draft, written as the format has it; nodes of random trees are compared with an independent
forward over two to four commits, in float32. Prints a line a form. Exits 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from edgespec.hub.names import MTP
from tests.conftest import make_model, save_folder
from tests.edgespec.draft import test_dflash, test_dspark, test_eagle3, test_mtp
from tests.edgespec.draft.dflash_drafter import write_drafter
from tests.edgespec.draft.eagle3_head import tensors_of, write_head
from tests.edgespec.draft.mtp_target import TYPES, write_target
from tests.edgespec.draft.texts import open_engine

WHAT = {
    "EAGLE-3": "hidden states, logits", "DFlash": "marginals", "DSpark": "distributions of paths",
    "MTP": "hidden states, logits",
}  # fmt: skip


def forms(work: Path) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield each draft's kind, its container and form, and the comparison, which raises AssertionError."""
    plain = make_model(test_eagle3.PLAIN)
    target = save_folder(work / "target", plain)
    for name, head in test_eagle3.FORMS.items():

        def eagle3(name: str = name, head: test_eagle3.Head = head) -> None:
            with open_engine(target, write_head(work / f"eagle3 {name}", head)) as engine:
                test_eagle3.compare(engine, plain, head, tensors_of(head))

        yield "EAGLE-3", name, eagle3
    for name, drafter in test_dflash.FORMS.items():

        def dflash(name: str = name, drafter: test_dflash.Drafter = drafter) -> None:
            with open_engine(target, write_drafter(work / f"dflash {name}", drafter)) as engine:
                test_dflash.compare(engine, plain, drafter)

        yield "DFlash", name, dflash
    for name, drafter in test_dspark.FORMS.items():

        def dspark(name: str = name, drafter: test_dflash.Drafter = drafter) -> None:
            with open_engine(target, write_drafter(work / f"dspark {name}", drafter)) as engine:
                test_dspark.compare(engine, drafter)

        yield "DSpark", name, dspark
    for kind in TYPES:

        def mtp(kind: str = kind) -> None:
            folder, own = write_target(work / kind, kind)
            with open_engine(folder, MTP) as engine:
                test_mtp.compare(engine, own)

        yield "MTP", f"in the checkpoint, {kind}", mtp


def main() -> int:
    """Compare all; the exit status says whether they are equal."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    num_wrong = 0
    print(f"{'draft':<8} {'container, form':<52} {'compared':<24} equal")
    with tempfile.TemporaryDirectory() as work:
        for kind, form, compare in forms(Path(work)):
            try:
                compare()
                found = "yes"
            except AssertionError as error:
                num_wrong += 1
                found = f"NO: {str(error).splitlines()[0]}"
            print(f"{kind:<8} {form:<52} {WHAT[kind]:<24} {found}", flush=True)
    print("all equal" if not num_wrong else f"{num_wrong} forms differ")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
