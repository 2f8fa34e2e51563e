"""The process of one part: set up as the command line is, and ended with its finding in a file.

python -X faulthandler -m scripts.gpu.child --limit 60 attention finding.json
"""

import argparse
import dataclasses
import faulthandler
import importlib
import json
import traceback
from pathlib import Path

from edgespec.machine.environment import set_up_environment
from scripts.gpu.finding import FAIL, Finding, skipped
from scripts.gpu.parts import PARTS

STACK_SHARE = 0.9  # of the time, after which a part that is not done shows where its threads are


def main() -> None:
    """Check one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="Check more shapes and rows.")
    parser.add_argument("--limit", type=float, required=True, help="The seconds after which it is killed.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("finding", type=Path, help="The file to write.")
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(STACK_SHARE * arguments.limit)
    set_up_environment()
    try:
        finding = _checked(arguments.part, is_full=arguments.full)
    except Exception as error:  # a part that breaks is a finding
        finding = Finding(verdict=FAIL, reason=f"{type(error).__name__}: {error}"[:300], found=traceback.format_exc())
    arguments.finding.write_text(json.dumps(dataclasses.asdict(finding), default=str), encoding="utf-8")


def _checked(part: str, *, is_full: bool) -> Finding:
    """Return what a part finds on the card, which is claimed as for a pair."""
    import torch

    from edgespec.machine.claim import claim_device
    from scripts.gpu.card import DEVICE

    if not torch.cuda.is_available():
        return skipped(f"torch {torch.__version__} finds no CUDA device")
    total_bytes = torch.cuda.get_device_properties(DEVICE).total_memory
    claim_device(DEVICE, limit_bytes=None, planned_bytes=total_bytes)
    module = importlib.import_module(f".{part}", __package__)
    finding: Finding = module.check(is_full=is_full)
    torch.cuda.synchronize()  # an error of the last kernels is this part's
    return finding


if __name__ == "__main__":
    main()
