"""Layouts with other kernels than their own, wherever they are looked up."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from offload.layouts import at_load, known, table_kernels, two_terms
from offload.layouts.layout import Kernel


def pretend_kernels(kernels: Mapping[str, Callable[..., Kernel | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give layouts, by the names of what is stored in them, kernels for that alone."""

    def of_own(kind: type, kernel: Callable[..., Kernel | None]) -> Callable[..., Kernel | None]:
        return lambda stored, *about: kernel(stored, *about) if isinstance(stored, kind) else None

    layouts = {
        layout.own.name: replace(layout, kernel=of_own(type(layout.own), kernels[layout.own.name]))
        if layout.own.name in kernels
        else layout
        for layout in known.LAYOUTS
    }
    lossless = tuple(layouts[layout.own.name] for layout in known.LOSSLESS)
    monkeypatch.setattr(table_kernels, "is_available", lambda: False)
    monkeypatch.setattr(known, "LAYOUTS", tuple(layouts.values()))
    monkeypatch.setattr(at_load, "LOSSLESS", lossless)
    monkeypatch.setattr(two_terms, "INT4_LAYOUT", layouts["int4"])
    monkeypatch.setattr(two_terms, "NF4_CPU_LAYOUT", layouts["nf4-cpu"])
