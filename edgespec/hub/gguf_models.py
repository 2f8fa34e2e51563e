"""Which GGUF file is meant by a folder: its only one, or that of the type that was named.

`FOLDER:Q4_K_M` names a file by a word of its name, or by the recipe that it states. Projectors, adapters and the like
beside a model are no models. Headers are read where names do not decide.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from offload.gguf.files import SUFFIX, TYPE, all_of_one_model, one_of_each_model, says_type

GIB, MIB = 1 << 30, 1 << 20
TAG = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # a type behind a colon
MAX_NAMED = 20  # files in an error
CACHE_DEPTH = 1  # folders below a repository's, which may have one for each type


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A model's file, or the first of its parts."""

    path: Path
    recipe: str  # the name of its quantisation; what keeps it from being read, where it is damaged
    num_bytes: int  # of all parts


def split_tag(name: str) -> tuple[str, str | None]:
    """Return a name without the type behind its last colon, and that type."""
    whole, colon, tag = name.rpartition(":")
    return (whole, tag) if colon and len(whole) > 1 and TAG.fullmatch(tag) else (name, None)


def gguf_files(folder: Path, *, depth: int = 0) -> Iterator[Path]:
    """Yield a file of each GGUF model in a folder, and in folders below it."""
    try:
        inside = sorted(folder.iterdir())
        yield from one_of_each_model(path for path in inside if path.suffix.lower() == SUFFIX and path.is_file())
        below = [path for path in inside if path.is_dir()] if depth else []
    except OSError:  # somebody else's
        return
    for path in below:
        yield from gguf_files(path, depth=depth - 1)


def files_of(path: Path) -> list[Path]:
    """Return the files of the model that a GGUF file is a part of."""
    try:
        return all_of_one_model(path, path.parent.iterdir())
    except OSError:  # its folder cannot be listed, or is not there
        return [path]


def file_meant(folder: Path, tag: str | None = None, *, depth: int = 0) -> Path | None:
    """Return the GGUF file that a folder means, and None for a folder without one; raises EdgespecError for several."""
    paths = list(gguf_files(folder, depth=depth))
    if not paths:
        return None
    if len(paths) == 1 and (tag is None or says_type(paths[0].name, tag)):
        return paths[0]
    models = list(read_models(paths))
    fitting = models if tag is None else fitting_models(models, tag, folder)
    if len(fitting) == 1:
        return fitting[0].path
    if not models:
        what = f"'{folder}' holds GGUF files ({paths[0].name} ...), and none of them is a model."
        raise EdgespecError("E_MODEL_NOT_FOUND", what, "Give the folder of a model.")
    raise _several(folder, fitting or models, tag, is_found=bool(fitting))


def read_models(paths: Sequence[Path]) -> Iterator[GgufModel]:
    """Yield what each file holds, without those that hold no model."""
    from offload.errors import CheckpointError
    from offload.gguf.header import read_gguf
    from offload.gguf.kinds import other_kind, recipe

    for path in paths:
        try:
            header = read_gguf(path)
        except (CheckpointError, OSError) as error:  # said in full where it is the one that is meant
            reason = error.code if isinstance(error, CheckpointError) else error.strerror
            yield GgufModel(path=path, recipe=f"not readable: {reason}", num_bytes=path.stat().st_size)
            continue
        if other_kind(header) is None:
            files = {tensor.file for tensor in header.tensors.values()}
            num_bytes = sum(file.stat().st_size for file in files)
            yield GgufModel(path=path, recipe=recipe(header), num_bytes=num_bytes)


def holds_adapter(path: Path) -> bool:
    """Return whether a GGUF file holds an adapter; False where it cannot be read."""
    from offload.errors import CheckpointError
    from offload.gguf.header import read_gguf
    from offload.gguf.kinds import ADAPTER, other_kind

    try:
        return other_kind(read_gguf(path)) == ADAPTER
    except (CheckpointError, OSError):
        return False


def named_models(paths: Sequence[Path]) -> Iterator[GgufModel]:
    """Yield what each file is by its name alone, whatever it holds: of hundreds, headers take seconds."""
    for path in paths:
        stated = TYPE.search(path.stem)
        recipe = stated[0].removeprefix(stated[0][0]) if stated else ""
        yield GgufModel(path=path, recipe=recipe, num_bytes=path.stat().st_size)


def fitting_models(models: Sequence[GgufModel], tag: str, folder: Path) -> list[GgufModel]:
    """Return the models of a type: those whose name says it, else those that state it."""
    named = [model for model in models if says_type(model.path.relative_to(folder).as_posix(), tag)]
    return named or [model for model in models if model.recipe.lower() == tag.lower()]


def _several(folder: Path, models: Sequence[GgufModel], tag: str | None, *, is_found: bool) -> EdgespecError:
    listed = [
        f"{model.path.relative_to(folder).as_posix()} ({model.recipe}, {size(model.num_bytes)})" for model in models
    ]
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    of_type = f" of type '{tag}'" if tag else ""
    holds = f"holds {len(models)} GGUF models{of_type}" if is_found else f"holds GGUF models, and none{of_type}"
    by_type = "" if tag and is_found else ", or by its type behind a colon, as in NAME:Q4_K_M"
    return EdgespecError(
        "E_MODEL_NOT_FOUND",
        f"'{folder}' {holds}: {', '.join(listed[:MAX_NAMED])}{more}.",
        f"Name one by its file{by_type}.",
    )


def size(num_bytes: int) -> str:
    """Return a model's bytes in words."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
