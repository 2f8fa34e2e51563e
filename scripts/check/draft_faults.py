"""What the check of a published draft says where a draft, or its reader, has a fault that gives no error.

    python -m scripts.check.draft_faults DRAFT
    python -m scripts.check.draft_faults DRAFT -m TARGET
    python -m scripts.check.draft_faults mtp -m TARGET

DRAFT is an EAGLE-3 head, a DFlash or a DSpark drafter of the target [the built-in one], such as
`scripts.papers.train_published_drafts` trains, or `mtp`: the layer in the target's own checkpoint. Each fault is
planted in a copy of its folder, or in the reader's code, and the check runs as in a first run: no result is kept.
Prints what it says, how much less is accepted than of the draft without a fault (of the sums of min(p, q) at both
depths), how likely chance alone makes that difference, and the seconds of one thread that the check took.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from edgespec import Engine
from edgespec.draft import agreement, teacher_forcing
from edgespec.draft.eagle3 import AUX_IDS, TAPS_KEY
from edgespec.draft.own_parts import taps_of
from edgespec.draft.paired_tokens import Shared, chance_of
from edgespec.draft.readings import Reading
from edgespec.draft.teacher_forcing import Guesses
from edgespec.errors import EdgespecError
from edgespec.hub.names import MTP
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows
from edgespec.pair.drafts import read_form
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.tuning import draft_check
from scripts.papers.tables.paper_table import markdown

Config, Tensors = dict[str, Any], dict[str, Tensor]
Plant = Callable[[Config, Tensors], None]
Fault = Callable[[], AbstractContextManager[None]]


def shift_taps(by: int) -> Plant:
    """Other hidden states are read than the head was trained on."""

    def plant(config: Config, _tensors: Tensors) -> None:
        config[TAPS_KEY] = [tap + by for tap in config["eagle_config"][AUX_IDS]]

    return plant


def shift_ids(by: int) -> Plant:
    """Other hidden states are read than the drafter was trained on."""

    def plant(config: Config, _tensors: Tensors) -> None:
        inner = config["dflash_config"]
        inner["target_layer_ids"] = [layer + by for layer in inner["target_layer_ids"]]

    return plant


def exchange_halves(_config: Config, tensors: Tensors) -> None:
    """What a layer multiplies with the embedding and with the feature is exchanged."""
    for name, tensor in tensors.items():
        if name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat(tensor.chunk(2, 1)[::-1], 1).contiguous()


def exchange_inputs(_config: Config, tensors: Tensors) -> None:
    """What attention multiplies with the embedding and with the feature is exchanged."""
    for name, tensor in tensors.items():
        if name.startswith("midlayer.self_attn.") and name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        ):
            tensors[name] = torch.cat(tensor.chunk(2, 1)[::-1], 1).contiguous()


def flip(name: str) -> Plant:
    """A norm is said to stand where it does not."""

    def plant(config: Config, _tensors: Tensors) -> None:
        config[name] = not config.get(name, False)

    return plant


def flip_anchor(config: Config, _tensors: Tensors) -> None:
    """The block's first row is said to guess where it does not, or the other way round."""
    is_dspark = config["dflash_config"].get("projector_type") == "dspark"
    config["sample_from_anchor"] = not config.get("sample_from_anchor", is_dspark)


def ids_for_offsets(_config: Config, tensors: Tensors) -> None:
    """The map of the head's tokens holds the target's ids."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def nothing(_config: Config, _tensors: Tensors) -> None:
    """The folder stays as it is."""


OF_BLOCKS: Mapping[str, Plant] = {
    "none": nothing,
    "taps one layer later": shift_ids(1),
    "taps one layer earlier": shift_ids(-1),
    "sample_from_anchor the other way": flip_anchor,
}
IN_FILES: Mapping[str, Mapping[str, Plant]] = {
    "eagle3": {
        "none": nothing,
        "taps one layer later": shift_taps(1),
        "taps one layer earlier": shift_taps(-1),
        "embedding and feature exchanged": exchange_inputs,
        "d2t holds ids": ids_for_offsets,
        "recycled after the norm, not before": flip("norm_output"),
        "norm_before_residual the other way": flip("norm_before_residual"),
    },
    "mtp": {"none": nothing, "embedding and feature exchanged": exchange_halves},
    "dflash": OF_BLOCKS,
    "dspark": OF_BLOCKS,
}


@contextmanager
def features_one_token_late() -> Iterator[None]:
    """Each row reads the feature of one token earlier than it should."""
    right = agreement._features

    def late(draft: CausalModel, hidden: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        return right(draft, hidden, states).roll(1, 0)

    with patch.object(agreement, "_features", late):
        yield


@contextmanager
def features_before_the_norm() -> Iterator[None]:
    """A layer is given the target's last states before the norm in place of those after it, and the other way round."""

    def other(draft: CausalModel, hidden: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        return states[max(states)] if taps_of(draft.model) is None else hidden

    with patch.object(agreement, "_features", other):
        yield


@contextmanager
def recycled_before_the_norm() -> Iterator[None]:
    """A layer's own output is recycled before its norm."""
    right = agreement.read_as

    @contextmanager
    def other(draft: PreTrainedModel, reading: Reading, *, num_layers: int) -> Iterator[None]:
        flipped = replace(reading, flips_output=not reading.flips_output)
        with right(draft, flipped, num_layers=num_layers):
            yield

    with patch.object(agreement, "read_as", other):
        yield


@contextmanager
def children_one_position_late() -> Iterator[None]:
    """Rows below the root, or of a block, are rotated by one position too much."""

    def late(**named: Any) -> PassRows:
        rows, positions = named["ids"].shape[0], named["positions"].clone()
        if named.get("visible") is not None:  # these are no rows of the text
            positions[-rows:] += 1
        return PassRows(**{**named, "positions": positions})

    with patch.object(teacher_forcing, "PassRows", late):
        yield


@contextmanager
def bias_of_the_token_before() -> Iterator[None]:
    """A DSpark drafter's places have the bias of one token earlier than they should."""
    right = teacher_forcing._biases

    def early(draft: CausalModel, known: Tensor, *more: Any) -> tuple[Tensor | None, Tensor | None]:
        return right(draft, known.roll(1), *more)

    with patch.object(teacher_forcing, "_biases", early):
        yield


POSITIONS: Mapping[str, Fault] = {
    "features one token late": features_one_token_late,
    "drafted rows one position late": children_one_position_late,
}
IN_READER: Mapping[str, Mapping[str, Fault]] = {
    "eagle3": POSITIONS,
    "mtp": {
        "feature before the norm, not after": features_before_the_norm,
        "recycled before the norm, not after": recycled_before_the_norm,
        **POSITIONS,
    },
    "dflash": POSITIONS,
    "dspark": {**POSITIONS, "bias of the token before": bias_of_the_token_before},
}


@dataclass(frozen=True, slots=True)
class Opened:
    """Models that a check may use and close."""

    target: CausalModel
    draft: CausalModel | None
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check has said, and how long it took."""

    words: str
    seconds: float = 0.0
    shared: Shared | None = None  # with the target, as the folder states the draft; None: the reader refused it


@contextmanager
def shared_of_readings() -> Iterator[list[Shared]]:
    """Yield what each reading that the check tries shares with the target, as the draft is stated first."""
    seen: list[Shared] = []
    right = agreement._guesses

    def kept(*found: Any, **named: Any) -> Guesses:
        guesses = right(*found, **named)
        seen.append(guesses.both)
        return guesses

    with patch.object(agreement, "_guesses", kept):
        yield seen


def checked(target: Path, draft: Path) -> Checked:
    """Run the check as in a first run, or find what the reader says before it."""
    try:
        pair = open_pair(target, draft)
        with (
            Engine.from_pair(pair, self_check=False, draft_check=False) as engine,
            patch.object(draft_check, "_kept", lambda _path: None),
            patch.object(draft_check, "_keep", lambda _path, _found: None),
            shared_of_readings() as seen,
        ):
            started = time.process_time()
            found = draft_check.check_draft(pair, Opened(engine.target_model, engine.draft_model, engine.close))
            seconds = time.process_time() - started
    except EdgespecError as error:
        return Checked(words=f"{error.what} ({error.code})")
    assert found is not None
    return Checked(words=found.in_words, seconds=seconds, shared=seen[0])


def compared(right: Shared, found: Shared | None) -> list[str]:
    """Return the tokens of the two depths that a fault costs, and the chance that it costs none."""
    if found is None or found is right:
        return ["", ""]
    cost = float((right.accepted - found.accepted).mean())
    return [f"{cost:.4f}", f"{chance_of(right.affinity - found.affinity):.1g}"]


def write_copy(draft: Path, folder: Path, plant: Plant) -> Path:
    """A draft's folder with a fault."""
    shutil.copytree(draft, folder)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(draft / "model.safetensors")
    plant(config, tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    """Plant and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("-m", "--model", type=Path, default=DEMO_FOLDER / "target")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_own = arguments.draft == MTP
    source = arguments.model if is_own else arguments.draft
    kind = "mtp" if is_own else read_form(source).kind
    table = [["fault", "the check", "tokens that it costs, of two depths", "chance alone", "seconds"]]
    with tempfile.TemporaryDirectory() as folder:
        copies = {
            name: write_copy(source, Path(folder) / str(number), plant)
            for number, (name, plant) in enumerate(IN_FILES[kind].items())
        }

        def found_in(copy: Path) -> Checked:
            found = checked(copy, MTP) if is_own else checked(arguments.model, copy)
            return replace(found, words=found.words.replace(str(copy), "DRAFT"))

        rows = {name: found_in(copy) for name, copy in copies.items()}
        for name, planted in IN_READER[kind].items():
            with planted():
                rows[name] = found_in(copies["none"])
    right = rows["none"].shared
    assert right is not None
    table += [[name, row.words, *compared(right, row.shared), f"{row.seconds:.1f}"] for name, row in rows.items()]
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
