"""Text of LLVM is compiled for this processor, once: the machine's code stays in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

MISSING = "llvmlite is not installed"
PROCESSORS = {"x86_64", "AMD64"}
NEEDED = ("avx2", "fma", "f16c")


@functools.cache
def why_unavailable() -> str | None:
    """Return why nothing can be compiled here; None where it can."""
    if platform.machine() not in PROCESSORS:
        return f"there are no kernels for processors like {platform.machine()}"
    try:
        from llvmlite import binding
    except ImportError:
        return MISSING
    missing = [feature for feature in NEEDED if not binding.get_host_cpu_features().get(feature)]
    return f"the processor lacks {', '.join(missing)}" if missing else None


def is_available() -> bool:
    """Return whether kernels can be compiled here."""
    return why_unavailable() is None


class Compiled:
    """The machine's code of a module, whose functions are called by their addresses."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # whose memory the code is in

    def address(self, name: str) -> int:
        """Return where a function is."""
        return int(self._engine.get_function_address(name))

    def function(self, name: str, *kinds: type) -> Any:
        """Return a function of these types of arguments, which Python can call without its lock."""
        return ctypes.CFUNCTYPE(None, *kinds)(self.address(name))


class _ObjectCache:
    """What llvmlite asks before it compiles a module, and tells what it made."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def find(self, _module: Any) -> bytes | None:
        return self.file.read_bytes() if self.file is not None and self.file.is_file() else None

    def keep(self, _module: Any, made: bytes) -> None:
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{id(self)}.part")
            part.write_bytes(made)
            part.replace(self.file)
        except OSError:
            pass  # it is compiled again next time


def compiled(text: str, *, cpu: str = "", folder: Path | None = None) -> Compiled:
    """Compile a module's text: for this processor, or for an older one of this name.

    `folder` keeps the machine's code from one start to the next.
    """
    from llvmlite import __version__, binding

    _prepare()
    features = "" if cpu else binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu or binding.get_host_cpu_name(), features=features, opt=3)
    key = hashlib.sha256("\n".join((__version__, machine.triple, cpu or binding.get_host_cpu_name(), features, text)).encode())
    cache = _ObjectCache(None if folder is None else folder / f"{key.hexdigest()[:32]}.o")
    module = binding.parse_assembly(text)
    if cache.find(module) is None:
        module.verify()
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(module, builder)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.set_object_cache(cache.keep, cache.find)
    engine.finalize_object()
    return Compiled(engine)


@functools.cache
def _prepare() -> None:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
