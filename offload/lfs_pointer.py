"""Git LFS pointers: small notes that a clone without git-lfs leaves in the place of large files."""

from pathlib import Path

from offload.errors import CheckpointError

POINTER_START = b"version https://git-lfs.github.com/spec/"


def is_pointer(path: Path) -> bool:
    """Return whether Git LFS left its note of a file in the file's place."""
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER_START)) == POINTER_START
    except (OSError, ValueError):
        return False


def pointer_error(path: Path) -> CheckpointError:
    """Return the error of a file whose content is not here."""
    what = f"'{path}' is a Git LFS pointer, a small text in the place of the file: it was cloned without git-lfs."
    return CheckpointError("E_LFS_POINTER", what, "Run 'git lfs pull' in the folder, or download the file again.")
