"""Measured acceptance: what verification accepts of a pair's drafts, predicted from what growth knows.

A model has three small networks, fitted on verification records (`edgespec.train.fit`): one for slots before their
token is drawn, one for sampled tokens, one for chosen tokens. It also has tables of what was measured: tokens a
pass by temperature and draw, and acceptance by rank.

What the slot network reads is known before the slot's own token is drawn: selecting sampled children
by anything else would bias the output. Legend: k nodes, c child positions each; a column's index is
the rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from edgespec.grow.network import (
    Network,
    bad_file,
    read_document,
    read_keys,
    read_number,
    rounded,
    write_document,
)
from edgespec.tree.token_tree import Draw

SCHEMA = "edgespec.acceptance/1"
DEFAULT_FILE = Path(__file__).parents[1] / "demo" / "acceptance.json"
SMALLEST = 1e-9  # what a logarithm sees of probabilities below it

Kind = Literal["slot", "sampled", "chosen"]
KINDS: tuple[Kind, ...] = ("slot", "sampled", "chosen")
KEYS = {"about", "measured", *KINDS}

# What a network may read, from columns of one shape
INPUTS: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "log_rank": lambda column: torch.log1p(column["rank"]),
    "is_first": lambda column: (column["rank"] == 0).to(column["rank"].dtype),
    "log_mass_left": lambda column: _log(column["mass_left"]),
    "entropy": lambda column: column["entropy"],
    "log_top_q": lambda column: _log(column["top_q"]),
    "log_not_top_q": lambda column: _log(1 - column["top_q"]),
    "log_depth": lambda column: torch.log(column["depth"]),
    "temperature": lambda column: column["temperature"],
    "log_q": lambda column: _log(column["q"]),
    "log_conditional": lambda column: _log(_conditional(column)),
    "log_not_conditional": lambda column: _log(1 - _conditional(column)),
}
OF_THE_TOKEN = {"log_q", "log_conditional", "log_not_conditional"}


def _log(probability: Tensor) -> Tensor:
    return probability.clamp(min=SMALLEST).log()


def _conditional(column: Mapping[str, Tensor]) -> Tensor:
    """Return q over what is left of the draft's mass."""
    mass_left = column["mass_left"]
    return column["q"] / mass_left.clamp(min=torch.finfo(mass_left.dtype).tiny)


def network_features(names: Sequence[str], columns: Mapping[str, Tensor]) -> Tensor:
    """Return the inputs [..., i] of a network that reads `names`, from columns that broadcast to [...]."""
    return torch.stack(torch.broadcast_tensors(*(INPUTS[name](columns) for name in names)), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What trees of one draw yielded at one temperature."""

    draw: Draw
    temperature: float
    tokens: float  # a pass, on average
    rates: tuple[float, ...]  # chance that the child of that rank is the one accepted, given its parent is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptanceModel:
    """Predicts acceptance, given that the slot is tried (of chosen children: that the parent is accepted)."""

    slot: Network
    sampled: Network
    chosen: Network
    measured: tuple[Measured, ...]
    about: Mapping[str, str]  # the pair and what it was fitted on, for people

    def slot_acceptance(
        self, *, mass_left: Tensor, entropy: Tensor, top_q: Tensor, depth: int, temperature: float
    ) -> Tensor:
        """Return the acceptance [k, c] of sampled children before they are drawn.

        `mass_left` is [k, c]; `entropy` and `top_q` are [k].
        """
        return self.slot(network_features(self.slot.inputs, _columns(mass_left, entropy, top_q, depth, temperature)))

    def token_acceptance(
        self,
        *,
        draw: Draw,
        q: Tensor,
        mass_left: Tensor,
        entropy: Tensor,
        top_q: Tensor,
        depth: int,
        temperature: float,
    ) -> Tensor:
        """Return the acceptance [k, c] of children of known q [k, c]; it is 0 where q is 0."""
        network = self.chosen if draw == "top_k" else self.sampled
        columns = {**_columns(mass_left, entropy, top_q, depth, temperature), "q": q}
        return network(network_features(network.inputs, columns)).masked_fill(q <= 0, 0)

    def expected_tokens(self, temperature: float, draw: Draw) -> float | None:
        """Return tokens a pass, interpolated between the measured temperatures; None without any."""
        return _interpolate([(found.temperature, found.tokens) for found in self.measured if found.draw == draw],
                            temperature)  # fmt: skip

    def better_draw(self, temperature: float) -> Draw:
        """Return the draw that yields more tokens a pass at this temperature; sampled where they tie."""
        sampled = self.expected_tokens(temperature, "without_replacement")
        chosen = self.expected_tokens(temperature, "top_k")
        return "top_k" if chosen is not None and (sampled is None or chosen > sampled) else "without_replacement"

    def rank_acceptance(self, temperature: float, draw: Draw) -> list[float]:
        """Return acceptance by rank, Sequoia's vector, interpolated between the measured temperatures."""
        found = [entry for entry in self.measured if entry.draw == draw]
        width = max((len(entry.rates) for entry in found), default=0)
        by_rank = (
            [(entry.temperature, entry.rates[rank] if rank < len(entry.rates) else 0.0) for entry in found]
            for rank in range(width)
        )
        return [_interpolate(points, temperature) or 0.0 for points in by_rank]

    def shifted(self, shift: float) -> AcceptanceModel:
        """Return the model whose predictions have log odds larger by `shift`."""
        return replace(
            self, slot=self.slot.shifted(shift), sampled=self.sampled.shifted(shift), chosen=self.chosen.shifted(shift)
        )

    def to_document(self) -> dict[str, Any]:
        """Return the model as the content of a file."""
        measured = [
            {"draw": e.draw, "temperature": e.temperature, "tokens": e.tokens, "rates": list(e.rates)}
            for e in self.measured
        ]
        networks: dict[str, Any] = {kind: getattr(self, kind).to_data() for kind in KINDS}
        return rounded({"schema": SCHEMA, "about": dict(self.about), "measured": measured, **networks})

    def save(self, path: Path) -> None:
        """Write a JSON file; raises EdgespecError."""
        write_document(path, self.to_document())

    @classmethod
    def load(cls, path: Path) -> AcceptanceModel:
        """Read what `save` wrote; raises EdgespecError."""
        return cls.from_document(read_document(path, SCHEMA, KEYS), path)

    @classmethod
    def from_document(cls, document: object, path: Path) -> AcceptanceModel:
        """Make a model of a file's content; errors name the file `path`. Raises EdgespecError."""
        content = read_keys(document, KEYS | {"schema"}, path=path, key="")
        about = content["about"]
        if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
            raise bad_file(path, "about", "is no object of texts")
        if not isinstance(content["measured"], list):
            raise bad_file(path, "measured", "is no list")
        networks = {kind: _read_network(content[kind], kind, path) for kind in KINDS}
        return cls(
            slot=networks["slot"],
            sampled=networks["sampled"],
            chosen=networks["chosen"],
            measured=tuple(
                _read_measured(entry, path, f"measured.{index}") for index, entry in enumerate(content["measured"])
            ),
            about=about,
        )


@functools.cache
def default_acceptance() -> AcceptanceModel:
    """Return the model that was fitted on the built-in pair."""
    return AcceptanceModel.load(DEFAULT_FILE)


def check_inputs(kind: Kind, names: Sequence[str]) -> str | None:
    """Return the first of `names` that a network of this kind may not read; None where it may read all."""
    for name in names:
        if name not in INPUTS or (kind == "slot" and name in OF_THE_TOKEN):
            return name
    return None


def _columns(mass_left: Tensor, entropy: Tensor, top_q: Tensor, depth: int, temperature: float) -> dict[str, Tensor]:
    """Return what is known of slots [k, c], in shapes that broadcast."""
    return {
        "rank": torch.arange(mass_left.shape[1], dtype=mass_left.dtype, device=mass_left.device),
        "mass_left": mass_left,
        "entropy": entropy[:, None],
        "top_q": top_q[:, None],
        "depth": mass_left.new_full((1, 1), depth),
        "temperature": mass_left.new_full((1, 1), temperature),
    }


def _interpolate(points: list[tuple[float, float]], at: float) -> float | None:
    """Interpolate linearly between the points, constant beyond them; return None without points."""
    points = sorted(points)
    if not points:
        return None
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= at <= right and left < right:
            return low + (high - low) * (at - left) / (right - left)
    return points[0][1] if at < points[0][0] else points[-1][1]


def _read_network(data: object, kind: Kind, path: Path) -> Network:
    network = Network.from_data(data, path=path, key=kind)
    name = check_inputs(kind, network.inputs)
    if name is not None:
        raise bad_file(path, f"{kind}.inputs", f"names '{name}', which this network cannot read")
    return network


def _read_measured(data: Any, path: Path, key: str) -> Measured:
    found = read_keys(data, {"draw", "temperature", "tokens", "rates"}, path=path, key=key)
    if found["draw"] not in ("without_replacement", "top_k"):
        raise bad_file(path, f"{key}.draw", "is neither 'without_replacement' nor 'top_k'")
    if not isinstance(found["rates"], list):
        raise bad_file(path, f"{key}.rates", "is no list")
    return Measured(
        draw=found["draw"],
        temperature=read_number(found["temperature"], path=path, key=f"{key}.temperature"),
        tokens=read_number(found["tokens"], path=path, key=f"{key}.tokens"),
        rates=tuple(
            read_number(rate, path=path, key=f"{key}.rates.{rank}") for rank, rate in enumerate(found["rates"])
        ),
    )
