"""What the check of a published draft says where an EAGLE-3 head, or its reader, has a fault that gives no error.

    python -m scripts.check.draft_faults HEAD
    python -m scripts.check.draft_faults HEAD -m TARGET

HEAD is a head of the target [the built-in one], such as `scripts.papers.train_published_drafts` trains. Each fault is
planted in a copy of its folder, or in the reader's code, and the check runs as in a first run with the draft: no result
is kept. Prints what it says, and the seconds of one thread that it took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edgespec import Engine
from edgespec.draft import agreement
from edgespec.draft.eagle3 import TAPS_KEY
from edgespec.draft.eagle3_network import Eagle3Fuse
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.tuning import draft_check
from scripts.papers.tables.paper_table import markdown

Config, Tensors = dict[str, Any], dict[str, Tensor]


def shift_taps(by: int) -> Callable[[Config, Tensors, list[int]], None]:
    """Other hidden states are read than the head was trained on."""

    def plant(config: Config, _tensors: Tensors, taps: list[int]) -> None:
        config[TAPS_KEY] = [tap + by for tap in taps]

    return plant


def exchange_inputs(_config: Config, tensors: Tensors, _taps: list[int]) -> None:
    """What attention multiplies with the embedding and with the feature is exchanged."""
    for name, tensor in tensors.items():
        if name.startswith("midlayer.self_attn.") and name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        ):
            tensors[name] = torch.cat(tensor.chunk(2, 1)[::-1], 1).contiguous()


def flip(name: str) -> Callable[[Config, Tensors, list[int]], None]:
    """A norm is said to stand where it does not."""

    def plant(config: Config, _tensors: Tensors, _taps: list[int]) -> None:
        config[name] = not config.get(name, False)

    return plant


def ids_for_offsets(_config: Config, tensors: Tensors, _taps: list[int]) -> None:
    """The map of the head's tokens holds the target's ids."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def nothing(_config: Config, _tensors: Tensors, _taps: list[int]) -> None:
    """The folder stays as it is."""


IN_FILES: Mapping[str, Callable[[Config, Tensors, list[int]], None]] = {
    "none": nothing,
    "taps one layer later": shift_taps(1),
    "taps one layer earlier": shift_taps(-1),
    "embedding and feature exchanged": exchange_inputs,
    "d2t holds ids": ids_for_offsets,
    "recycled after the norm, not before": flip("norm_output"),
    "norm_before_residual the other way": flip("norm_before_residual"),
}


@contextmanager
def features_one_token_late() -> Iterator[None]:
    """Each row reads the feature of one token earlier than it should."""
    right = Eagle3Fuse.features

    def late(self: Eagle3Fuse, states: Tensor) -> Tensor:
        return right(self, states).roll(1, 0)

    with patch.object(Eagle3Fuse, "features", late):
        yield


@contextmanager
def children_one_position_late() -> Iterator[None]:
    """Rows below the root are rotated by one position too much."""

    def late(**named: Any) -> PassRows:
        rows, positions = named["ids"].shape[0], named["positions"].clone()
        positions[-rows:] += 1
        return PassRows(**{**named, "positions": positions})

    with patch.object(agreement, "PassRows", late):
        yield


IN_READER = {
    "features one token late": features_one_token_late,
    "children one position late": children_one_position_late,
}


@dataclass(frozen=True, slots=True)
class Opened:
    """Models that a check may use and close."""

    target: CausalModel
    draft: CausalModel | None
    close: Callable[[], None]


def checked(target: Path, head: Path) -> tuple[str, float]:
    """What the check says, or the reader before it, and the seconds that the check took."""
    try:
        pair = open_pair(target, head)
        with Engine.from_pair(pair, self_check=False, draft_check=False) as engine, patch.object(
            draft_check, "_kept", lambda _path: None
        ), patch.object(draft_check, "_keep", lambda _path, _found: None):  # fmt: skip
            started = time.process_time()
            found = draft_check.check_draft(pair, Opened(engine.target_model, engine.draft_model, engine.close))
            seconds = time.process_time() - started
            return ("no check" if found is None else found.in_words), seconds
    except EdgespecError as error:
        return f"{error.what} ({error.code})", 0.0


def write_copy(head: Path, folder: Path, plant: Callable[[Config, Tensors, list[int]], None]) -> Path:
    """A head's folder with a fault."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(head / "model.safetensors")
    plant(config, tensors, config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    """Plant and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("-m", "--model", type=Path, default=DEMO_FOLDER / "target")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = [["fault", "the check", "seconds"]]
    with tempfile.TemporaryDirectory() as folder:
        copies = {
            name: write_copy(arguments.head, Path(folder) / str(number), plant)
            for number, (name, plant) in enumerate(IN_FILES.items())
        }
        for name, copy in copies.items():
            words, seconds = checked(arguments.model, copy)
            table.append([name, words.replace(str(copy), "HEAD"), f"{seconds:.1f}"])
        for name, planted in IN_READER.items():
            with planted():
                words, seconds = checked(arguments.model, copies["none"])
            table.append([name, words, f"{seconds:.1f}"])
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
