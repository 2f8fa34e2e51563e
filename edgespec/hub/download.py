"""Bringing a published model into Hugging Face's local cache: only where somebody asked for it."""

import glob
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.hub.cache import CACHED_PREFIX, folder_bytes, hub_cache
from edgespec.hub.gguf_models import GIB, MAX_NAMED
from offload.gguf.files import SUFFIX, all_of_one_model, one_of_each_model, says_type

POLL_S = 0.5  # between looks at how far a download is
DOWNLOAD_MARGIN_BYTES = 1 << 30  # left free on the disk
# What a model folder needs here; weights in other formats and folders within the repository are not among it.
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
UNWANTED_FILES = ["*/*", "consolidated*"]
GGUF_FILES = f"*{SUFFIX}"
NO_MODELS = ("mmproj", "imatrix")  # words in the names of files beside a model

Progress = Callable[[int, int], None]  # bytes that are there, bytes in all


def download(
    repository: str, *, revision: str | None = None, tag: str | None = None, progress: Progress | None = None
) -> Path:
    """Bring a model into the cache: its safetensors, configuration and tokenizer, or one GGUF file with its parts.

    The GGUF file is that of the type `tag`, or of a repository without safetensors the only one. Raises EdgespecError.
    """
    import shutil

    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    wanted, unwanted = ([GGUF_FILES], None) if tag else ([*WANTED_FILES, GGUF_FILES], UNWANTED_FILES)
    with _network():
        listed = snapshot_download(
            repository, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted, dry_run=True
        )
    sizes = {file.filename: file.file_size or 0 for file in listed}
    names = {name for name in sizes if not name.endswith(SUFFIX)}
    if tag or (len(names) < len(sizes) and not any(name.endswith(".safetensors") for name in names)):
        names = _gguf_names(repository, sizes, tag)
    listed = [file for file in listed if file.filename in names]
    missing_bytes = sum(file.file_size or 0 for file in listed if file.will_download)
    total_bytes = sum(file.file_size or 0 for file in listed)
    cache = hub_cache()
    if not cache.is_absolute() and cache.parts[0] == "~":  # nobody's home: it would be a folder beside one's work
        what = f"there is no place for '{repository}': the user has no home folder."
        raise EdgespecError("E_DOWNLOAD", what, "Set HF_HOME to a folder that can be written.")
    cache.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(cache).free
    if missing_bytes + DOWNLOAD_MARGIN_BYTES > free_bytes:
        raise EdgespecError(
            "E_DOWNLOAD",
            f"'{repository}' takes {missing_bytes / 2**30:.1f} GiB more, and {free_bytes / 2**30:.1f} GiB "
            f"are free at '{cache}'.",
            "Free some space, or set HF_HOME to a folder on a larger disk.",
        )
    blobs = cache / (CACHED_PREFIX + repository.replace("/", "--")) / "blobs"
    with _network(), _watched(blobs, total_bytes, progress):
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=[glob.escape(name) for name in sorted(names)]
            )
        )


def _gguf_names(repository: str, sizes: Mapping[str, int], tag: str | None) -> set[str]:
    """Return the names of one model's GGUF files; raises EdgespecError where several are meant, or none."""
    paths = {Path(name): name for name in sizes if name.endswith(SUFFIX)}
    models = {
        path: all_of_one_model(path, paths)
        for path in one_of_each_model(paths)
        if not any(word in path.name.lower() for word in NO_MODELS)
    }
    fitting = [path for path in models if tag is None or says_type(path.as_posix(), tag)]
    if len(fitting) == 1:
        return {paths[path] for path in models[fitting[0]]}
    listed = [
        f"{paths[path]} ({sum(sizes[paths[part]] for part in models[path]) / GIB:.1f} GiB)"
        for path in fitting or models
    ]
    found = f"{len(fitting) or 'none'} of type '{tag}'" if tag else str(len(fitting))
    what = f"'{repository}' has GGUF models, and {found}: {', '.join(listed[:MAX_NAMED]) or 'no model at all'}."
    raise EdgespecError("E_MODEL_NOT_FOUND", what, f"Name one by its type, as in {repository}:Q4_K_M.")


@contextmanager
def _network() -> Iterator[None]:
    """Within this block huggingface_hub may use the network; raises EdgespecError for what it meets."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = False
    try:
        yield
    except Exception as error:  # a dozen kinds, of two libraries: no such model, no permission, no network, no space
        cause = error.__cause__ or error
        reason = (str(cause).strip() or "no reason given").splitlines()[0][:200]
        raise EdgespecError(
            "E_DOWNLOAD",
            f"the download failed ({type(cause).__name__}: {reason}).",
            "Check name, network and, for a gated model, `hf auth login`; "
            "or leave out `local_files_only=False` for what is here.",
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@contextmanager
def _watched(blobs: Path, total_bytes: int, progress: Progress | None) -> Iterator[None]:
    """Within this block, report now and then how many bytes lie in a folder that is being filled."""
    ended = threading.Event()

    def watch() -> None:
        while progress is not None and not ended.wait(POLL_S):
            progress(min(total_bytes, folder_bytes(blobs)), total_bytes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        if progress is not None:
            progress(total_bytes, total_bytes)
    finally:
        ended.set()
        thread.join()
