"""Results stay the same when copies or arithmetic are made slow on the device."""

from typing import Any

import torch

from edgespec.pair.pair import ModelPair
from offload.loaders import CudaLoader
from scripts.gpu.card import run_passes, written_shape
from scripts.gpu.finding import Finding, judged

CYCLES = 20_000_000  # some 10 ms


def check(*, is_full: bool) -> Finding:
    """Compare slow passes with resident ones."""
    with written_shape("7B-like") as pair:
        differing = differing_when_slow(pair)
    return judged(not differing, differing, f"logits differ: {', '.join(differing)}")


def differing_when_slow(pair: ModelPair) -> list[str]:
    """Return what changed the logits when it was slow."""
    expected = run_passes(pair, 16).logits
    original: dict[str, Any] = {"load": CudaLoader.load, "release": CudaLoader.release}

    def sleepy_load(self: CudaLoader, *arguments: Any) -> None:
        with torch.cuda.stream(self._slots.copy_stream):
            torch.cuda._sleep(CYCLES)
        original["load"](self, *arguments)

    def sleepy_release(self: CudaLoader, *arguments: Any) -> None:
        torch.cuda._sleep(CYCLES)  # the layer's readers are still at work when it is given back
        original["release"](self, *arguments)

    differing = []
    for name, slow in (("load", sleepy_load), ("release", sleepy_release)):
        setattr(CudaLoader, name, slow)
        try:
            if not torch.equal(run_passes(pair, 16, max_resident_layers=0).logits, expected):
                differing.append(name)
        finally:
            setattr(CudaLoader, name, original[name])
    return differing
