"""Records on disk: a folder of parts, one a prompt and setting, so that collecting can be resumed.

Each part is a safetensors file written beside its place and then renamed: it is whole or not there.
Its metadata holds a JSON header. Loading puts the parts together; those of another pair are refused.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.train.feature_files import Count
from edgespec.train.records import Records
from edgespec.tree.policies import Draw
from edgespec.user_paths import written_whole
from edgespec.validation import parse_json, read_as

SCHEMA = "edgespec.records/2"
_HEADER_KEY = "edgespec"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsHeader:
    """The source of a part's records."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: str  # names of the pair
    draft: str
    prompt: Count  # its number: held-out splits go by it
    tree: str  # policy and draw that grew the trees
    draw: Draw
    temperature: float
    draft_temperature: float
    num_trees: Count
    tokens: float  # a pass, on average over the trees

    @property
    def setting(self) -> tuple[int, str, float]:
        """Return prompt, tree and temperature, for which there is one part."""
        return self.prompt, self.tree, self.temperature


def save_records(folder: Path, records: Records, header: RecordsHeader) -> Path:
    """Write the next part; raises EdgespecError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(path.stem.removeprefix("part-")) for path in _parts(folder)]
        path = folder / f"part-{max(taken, default=0) + 1:05}.safetensors"
        content = {"schema": SCHEMA, **asdict(header)}
        columns = {name: column.detach().cpu().contiguous() for name, column in records.items()}
        with written_whole(path, is_private=False) as partial:
            save_file(columns, partial, metadata={_HEADER_KEY: json.dumps(content)})
    except (OSError, SafetensorError) as error:  # safetensors words a full disk in its own way
        raise EdgespecError(
            "E_OUTPUT", f"records cannot be written to '{folder}' ({error}).", "Choose another folder."
        ) from error
    return path


def read_headers(folder: Path) -> list[RecordsHeader]:
    """Read the headers of all parts, in their order; none where there is no folder. Raises EdgespecError."""
    return [_read_header(path) for path in _parts(folder)]


def load_records(folder: Path) -> tuple[Records, list[RecordsHeader]]:
    """Load all parts as one, with a column `prompt`, and return them with their headers.

    Raises EdgespecError where there are none, or they are damaged, or of several pairs.
    """
    paths = _parts(folder)
    if not paths:
        raise EdgespecError("E_FILE_NOT_FOUND", f"'{folder}' has no records.", "Name a folder that some were saved to.")
    headers = read_headers(folder)
    pairs = sorted({(header.target, header.draft) for header in headers})
    if len(pairs) > 1:
        names = ", ".join(f"{target} with {draft}" for target, draft in pairs)
        raise EdgespecError(
            "E_RECORDS", f"'{folder}' mixes records of several pairs: {names}.", "Keep a folder for each pair."
        )
    parts = [_read_columns(path, header.prompt) for path, header in zip(paths, headers, strict=True)]
    for path, part in zip(paths, parts, strict=True):
        if part.keys() != parts[0].keys():
            raise _damaged(path, "its columns differ from those of the first part")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, headers


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-[0-9][0-9][0-9][0-9][0-9].safetensors"))


def _read_header(path: Path) -> RecordsHeader:
    try:
        with safe_open(path, framework="pt") as file:
            content = parse_json((file.metadata() or {}).get(_HEADER_KEY, "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise _damaged(path, f"it is not of schema {SCHEMA}")
    return read_as(RecordsHeader, content, lambda key, problem: _damaged(path, f"header {key} {problem}"))


def _read_columns(path: Path, prompt: int) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    lengths = {column.shape[:1] for column in columns.values()}
    if len(lengths) != 1:
        raise _damaged(path, "its columns differ in length")
    (length,) = lengths
    return {**columns, "prompt": torch.full(length, prompt, dtype=torch.long)}


def _damaged(path: Path, reason: str) -> EdgespecError:
    return EdgespecError("E_RECORDS", f"'{path}' is no part of records ({reason}).", "Delete it and collect it again.")
