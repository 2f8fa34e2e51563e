"""Text of LLVM is compiled for this processor, once: the machine's code stays in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.native import threads

MISSING = "llvmlite is not installed"
DIGEST_BYTES = 32  # before what is kept
_kept: list[Callable[[], Path]] = []  # the folder is the last one
NEEDED = ("avx2", "fma", "f16c")
WIDE = ("avx512vl", "avx512bw")  # of processors with registers of 512 bits
OLDER = "haswell"


@functools.cache
def why_unavailable() -> str | None:
    """Return why nothing can be compiled here; None where it can."""
    try:
        from llvmlite import binding

        from offload.native.instructions import ARM, X86
    except ImportError:
        return MISSING
    if platform.machine() not in X86 | ARM:
        return f"there are no kernels for processors like {platform.machine()}"
    if not threads.are_known():
        return "torch's threads are no GNU OpenMP's, whose functions start them here"
    needed = NEEDED if platform.machine() in X86 else ()
    missing = [feature for feature in needed if not binding.get_host_cpu_features().get(feature)]
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
        found = int(self._engine.get_function_address(name))
        assert found, f"the module has no function {name}"
        return found

    def function(self, name: str, *kinds: type) -> Any:
        """Return a function of these types of arguments, which Python can call without its lock."""
        found: Any = ctypes.CFUNCTYPE(None, *kinds)(self.address(name))
        found.code = self  # which lives as long
        return found


class _ObjectCache:
    """What llvmlite asks before it compiles a module, and tells what it made. A broken file would end the process."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def find(self, _module: Any) -> bytes | None:
        if self.file is None:
            return None
        try:
            whole = self.file.read_bytes()
        except OSError:
            return None
        digest, made = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
        return made if hashlib.sha256(made).digest() == digest else None

    def keep(self, _module: Any, made: bytes) -> None:
        if self.file is None:
            return
        with contextlib.suppress(OSError):  # it is compiled again next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{secrets.token_hex(8)}.partial")
            part.write_bytes(hashlib.sha256(made).digest() + made)
            part.replace(self.file)


def keep_in(folder: Callable[[], Path]) -> None:
    """Keep what is compiled from now on in this folder, so that the next start finds it."""
    _kept.append(folder)


def compiled(text: str, *, cpu: str = "") -> Compiled:
    """Compile a module's text: for this processor, or for an older one of this name."""
    from llvmlite import __version__, binding

    _prepare()
    name = cpu or processor_name()
    is_host = name == binding.get_host_cpu_name()
    features = binding.get_host_cpu_features().flatten() if is_host else ""
    machine = binding.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=3)
    key = hashlib.sha256("\n".join((__version__, machine.triple, name, features, text)).encode()).hexdigest()
    cache = _ObjectCache(_kept[-1]() / f"{key[:32]}.o" if _kept else None)
    module = binding.parse_assembly(text)
    if cache.find(module) is None:
        _optimise(module, machine, unrolls=has_wide_registers() and not cpu)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.set_object_cache(cache.keep, cache.find)
    engine.finalize_object()
    return Compiled(engine)


def _optimise(module: Any, machine: Any, *, unrolls: bool) -> None:
    """Let LLVM improve a module. If it `unrolls` loops, it needs more registers than AVX2 has."""
    from llvmlite import binding

    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = unrolls
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


@functools.cache
def processor_name() -> str:
    """Return LLVM's name of the processor: an older one where torch is told to compute as one."""
    from llvmlite import binding

    computes_as_older = torch.backends.cpu.get_cpu_capability() == "AVX2" and _has_avx512()
    return OLDER if computes_as_older else str(binding.get_host_cpu_name())


def has_wide_registers() -> bool:
    """Return whether there are 32 registers of vectors, and not 16."""
    return _has_avx512() and processor_name() != OLDER


@functools.cache
def _has_avx512() -> bool:
    from llvmlite import binding

    return all(binding.get_host_cpu_features().get(feature) for feature in WIDE)


@functools.cache
def _prepare() -> None:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
