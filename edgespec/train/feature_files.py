"""Features on disk: a folder of shards, one a pass over the target's weights, and a note of their source.

Each shard is a safetensors file written beside its place and then renamed: it is whole or not there. The
blocks of a shard follow each other without padding. Legend: h the target's hidden size.
"""

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.user_paths import written_whole
from edgespec.validation import MAX_WHOLE, parse_json, read_as

SCHEMA = "edgespec.features/1"
NOTE = "run.json"
Count = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
SHARD_PATTERN = "features-[0-9][0-9][0-9][0-9][0-9].safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRun:
    """The source of a folder's features; a run that continues must agree in every field."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: str  # its name, for people
    target_fingerprint: str
    quant: str | None  # of the target's layers: features are those of the weights that will run
    dtype: str  # that was computed in, and in which features are stored
    hidden_size: Count
    block_tokens: Count  # of the longest block
    num_blocks: Count
    num_tokens: Count
    blocks_sha256: str  # of the blocks' ids and texts, in their order
    aux_layers: tuple[Count, ...] = ()  # numbers of layers behind which hidden states were taken, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some consecutive tokens of one text, which the target read on their own."""

    text: int  # its number: held-out splits go by it
    ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBatch:
    """Some blocks as one batch, padded at their ends."""

    ids: Tensor  # [blocks, rows]
    lengths: Tensor  # [blocks]
    features: Tensor  # [blocks, rows, h]: the target's last hidden states, 0 where padded
    states: Tensor | None = None  # [blocks, rows, aux_layers * h]: those between its layers, side by side


def begin_run(folder: Path, run: FeatureRun) -> None:
    """Note the source of a new folder's features; raises EdgespecError where it was begun with another."""
    note = folder / NOTE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            with written_whole(note, is_private=False) as partial:
                partial.write_text(json.dumps({"schema": SCHEMA, **asdict(run)}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise EdgespecError("E_OUTPUT", f"'{note}' cannot be written ({error}).", "Choose another folder.") from error
    found = read_run(folder)
    odd = [field.name for field in fields(FeatureRun) if getattr(found, field.name) != getattr(run, field.name)]
    if odd:
        pairs = "; ".join(f"{name} {getattr(found, name)}, not {getattr(run, name)}" for name in odd[:3])
        what = "texts" if set(odd) <= {"num_blocks", "num_tokens", "blocks_sha256"} else "a run"
        raise EdgespecError(
            "E_FEATURES",
            f"'{folder}' holds features of other {what} ({pairs}).".replace("other a run", "another run"),
            "Name another folder, or delete this one.",
        )


def read_run(folder: Path) -> FeatureRun:
    """Read the source of a folder's features; raises EdgespecError."""
    note = folder / NOTE
    try:
        content: Any = parse_json(note.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(note, str(error)) from error
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise _unusable(note, f"it is not of schema {SCHEMA}")
    if "taps" in content:  # as files of before have them
        content["aux_layers"] = content.pop("taps")
    return read_as(FeatureRun, content, lambda key, problem: _unusable(note, f"{key} {problem}"))


def save_shard(folder: Path, blocks: Sequence[Block], features: Tensor, states: Tensor | None = None) -> None:
    """Write the next shard: features [tokens, h] of the blocks' tokens, one block after the other.

    Beside them stand states [tokens, aux_layers * h] from between the layers, if any. Raises EdgespecError where the
    folder cannot be written.
    """
    path = folder / f"features-{len(_shards(folder)):05}.safetensors"
    columns = {
        "ids": torch.tensor([token for block in blocks for token in block.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(block.ids) for block in blocks], dtype=torch.int32),
        "texts": torch.tensor([block.text for block in blocks], dtype=torch.int32),
        "features": features,
        **({} if states is None else {"states": states}),
    }
    assert features.shape[0] == columns["ids"].shape[0]
    try:
        with written_whole(path, is_private=False) as partial:
            save_file(columns, partial)
    except (OSError, SafetensorError) as error:  # safetensors words a full disk in its own way
        raise EdgespecError(
            "E_OUTPUT", f"features cannot be written to '{folder}' ({error}).", "Make room there, and go on."
        ) from error


class FeatureFiles:
    """The blocks of a folder by their number; features stay on disk until they are read."""

    def __init__(self, folder: Path) -> None:
        """Open all shards; raises EdgespecError for a damaged one."""
        self._folder = folder
        self._shards: list[Any] = []
        self._ids: list[Tensor] = []  # [tokens], one a shard
        self._starts: list[list[int]] = []  # of every block in its shard, and the end
        lengths, texts = [], []
        for path in _shards(folder):
            try:
                shard: Any = safe_open(path, framework="pt")
                self._ids.append(shard.get_tensor("ids"))
                lengths.append(shard.get_tensor("lengths").long())
                texts.append(shard.get_tensor("texts").long())
                self._shards.append(shard)
                tokens = shard.get_slice("features").get_shape()[0]
                if not int(lengths[-1].sum()) == tokens == self._ids[-1].shape[0]:
                    raise ValueError("its columns differ in length")
            except (OSError, SafetensorError, ValueError) as error:
                raise _damaged(path, str(error)) from error
            self._starts.append([0, *itertools.accumulate(lengths[-1].tolist())])
        none = torch.zeros(0, dtype=torch.long)
        self.lengths = torch.cat([none, *lengths])  # [blocks]
        self.texts = torch.cat([none, *texts])  # [blocks]
        self._firsts = [0, *itertools.accumulate(len(starts) - 1 for starts in self._starts)]

    @property
    def num_blocks(self) -> int:
        """Count the blocks of all shards."""
        return self._firsts[-1]

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all blocks."""
        return int(self.lengths.sum())

    def token_counts(self, vocab: int) -> Tensor:
        """Count how often each token [vocab] stands in the blocks."""
        none = torch.zeros(0, dtype=torch.int32)
        return torch.cat([none, *self._ids]).bincount(minlength=vocab)

    @property
    def has_states(self) -> bool:
        """Return whether there are hidden states from between the layers."""
        return bool(self._shards) and "states" in self._shards[0].keys()  # noqa: SIM118 (no dictionary)

    def block(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ids [n] and features [n, h] of one block; raises EdgespecError where they cannot be read."""
        number, rows = self._rows(index)
        return self._ids[number][rows].long(), self._column("features", index)

    def _rows(self, index: int) -> tuple[int, slice]:
        """Return the shard of a block, and its rows there."""
        number = bisect.bisect_right(self._firsts, index) - 1
        place = index - self._firsts[number]
        return number, slice(*self._starts[number][place : place + 2])

    def _column(self, name: str, index: int) -> Tensor:
        """Return a column's rows of one block."""
        number, rows = self._rows(index)
        try:
            return self._shards[number].get_slice(name)[rows]  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise _damaged(_shards(self._folder)[number], str(error)) from error

    def batch(self, indices: Sequence[int], *, device: torch.device) -> FeatureBatch:
        """Return several blocks as one batch on a device, with features in float32."""
        blocks = [self.block(index) for index in indices]
        ids, features = zip(*blocks, strict=True)

        def padded(rows: Sequence[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)

        return FeatureBatch(
            ids=padded(ids),
            lengths=torch.tensor([block.shape[0] for block in ids]).to(device),
            features=padded(features).float(),
            states=padded([self._column("states", index) for index in indices]).float() if self.has_states else None,
        )


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob(SHARD_PATTERN))


def _unusable(note: Path, reason: str) -> EdgespecError:
    fix = "Delete the folder and collect features again."
    return EdgespecError("E_FEATURES", f"'{note}' cannot be used ({reason}).", fix)


def _damaged(path: Path, reason: str) -> EdgespecError:
    return EdgespecError("E_FEATURES", f"'{path}' is no shard of features ({reason}).", "Delete it, and collect again.")
