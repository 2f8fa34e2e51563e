"""Measured acceptance: which of a node's candidates the target takes, predicted from what growth knows.

A node's candidates are the best of q' = softmax(log q + g), where g is the noise that decides the target's token too
(all 0 for a greedy target). The target takes one of them, or none: the chances are a softmax over the candidates and
"none of them", so that siblings compete. Two small networks make its logits, one of a candidate and one of none. They
are fitted on a pair's own verification (`edgespec.train.fit`). The model also has a table of acceptance by
rank, for static shapes. Legend: k nodes, c candidates each, the best under the noise first; a column's index is the
rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor

from edgespec.grow.network import (
    Network,
    NetworkData,
    Number,
    bad_file,
    read_content,
    read_document,
    rounded,
    write_document,
)
from edgespec.tree.policies import Draw

SCHEMA = "edgespec.acceptance/2"
DEFAULT_FILE = Path(__file__).parents[1] / "demo" / "acceptance.json"
COPY_FILE = DEFAULT_FILE.with_name("copy_acceptance.json")
NUM_CANDIDATES = 32  # of a node that are looked at together: the target takes others once in a hundred times
SMALLEST = 1e-9  # what a logarithm sees of probabilities below it
MIN_LEFT = 1e-4  # and of what candidates leave of 1: in float32 less of it is mostly rounding

Kind = Literal["candidate", "none"]
KINDS: tuple[Kind, ...] = ("candidate", "none")

Candidates = Mapping[str, Tensor]  # one of COLUMNS -> [k, c], or [k, 1] of a node; what `candidates_of` returns
COLUMNS = ("q", "perturbed", "gumbel", "rank", "concentration", "top_q", "depth", "temperature")

# What the networks may read: of a candidate [k, c], and of a node [k, 1]
OF_A_CANDIDATE = ("log_q", "log_perturbed", "gumbel", "margin", "log_rank")
OF_A_NODE = (
    "log_first_q",
    "log_first_perturbed",
    "lead",
    "log_not_covered",
    "concentration",
    "log_top_q",
    "log_depth",
    "temperature",
)
INPUTS: Mapping[Kind, tuple[str, ...]] = {"candidate": (*OF_A_CANDIDATE, *OF_A_NODE), "none": OF_A_NODE}


def _log(probability: Tensor) -> Tensor:
    return probability.clamp(min=SMALLEST).log()


def read_of(draft_q: Tensor, tokens: Tensor, perturbed: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
    """Return the numbers that are read from the draft's q [k, vocab] for candidates `tokens` [k, c]: [k, c] or [k, 1].

    `perturbed` [k, c] is their q', and `noise` [k, c] is e^g of the tokens, None where g is 0.
    """
    q = perturbed if noise is None else draft_q.gather(1, tokens)
    gumbel = torch.zeros_like(q) if noise is None else noise.log().to(q.dtype)
    # e^-2 of Renyi's second entropy; the norm makes no second array as large as q
    concentration = torch.linalg.vector_norm(draft_q, dim=-1, keepdim=True).square()
    return q, gumbel, concentration, draft_q.amax(-1, keepdim=True)


def candidates_of(
    draft_q: Tensor, tokens: Tensor, perturbed: Tensor, noise: Tensor | None, *, depth: Tensor, temperature: float
) -> Candidates:
    """Return the features of candidates of one temperature, from `read_of` them, and their `columns`."""
    read = read_of(draft_q, tokens, perturbed, noise)
    return columns(perturbed, read, depth=depth, temperature=draft_q.new_full((1, 1), temperature))


def columns(perturbed: Tensor, read: Sequence[Tensor], *, depth: Tensor, temperature: Tensor) -> Candidates:
    """Return the features of candidates whose q' is `perturbed` [k, c]; `read` is `read_of` them.

    `depth` [k or 1, 1] counts the layers down to them, `temperature` [k or 1, 1] is the target's.
    """
    q, gumbel, concentration, top_q = read
    return {
        "q": q,
        "perturbed": perturbed,
        "gumbel": gumbel,
        "rank": torch.arange(q.shape[1], dtype=q.dtype, device=q.device)[None],
        "concentration": concentration,
        "top_q": top_q,
        "depth": depth.to(q.dtype),
        "temperature": temperature.to(q.dtype),
    }


def read_inputs(candidates: Candidates) -> dict[str, Tensor]:
    """Return all that the networks may read, by name: [k, c] of a candidate, [k or 1, 1] of a node."""
    log_q, log_perturbed = _log(candidates["q"]), _log(candidates["perturbed"])
    first = log_perturbed[..., :1]
    not_covered = 1 - candidates["perturbed"].sum(-1, keepdim=True)
    return {
        "log_q": log_q,
        "log_perturbed": log_perturbed,
        "gumbel": candidates["gumbel"],
        "margin": log_perturbed - first,
        "log_rank": torch.log1p(candidates["rank"]),
        "log_first_q": log_q[..., :1],
        "log_first_perturbed": first,
        "lead": first - log_perturbed[..., 1:2],
        "log_not_covered": not_covered.clamp(min=MIN_LEFT).log(),
        "concentration": _log(candidates["concentration"]),
        "log_top_q": _log(candidates["top_q"]),
        "log_depth": torch.log(candidates["depth"]),
        "temperature": candidates["temperature"],
    }


def network_features(names: Sequence[str], inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the features of a network that reads `names`: [k, c, i], or [k, 1, i] where all are of a node."""
    return torch.stack(torch.broadcast_tensors(*(inputs[name] for name in names)), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The acceptance by rank of children that come about by one draw, at one temperature."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    draw: Draw
    temperature: Number
    rates: tuple[Number, ...]  # chance that the child of that rank is the one accepted, given its parent is


@dataclass(frozen=True, slots=True, kw_only=True)
class _AcceptanceDocument:
    """The content of a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema: str
    about: dict[str, str]
    measured: tuple[Measured, ...]
    candidate: NetworkData
    none: NetworkData


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptanceModel:
    """Predicts acceptance, given that the parent is accepted."""

    candidate: Network  # logit of a candidate
    none: Network  # logit of none of a node's candidates
    measured: tuple[Measured, ...]
    about: Mapping[str, str]  # the pair and what it was fitted on, for people

    def candidate_acceptance(self, candidates: Candidates) -> Tensor:
        """Return the chance [k, c] that the target takes each candidate; it is 0 where q is 0."""
        inputs = read_inputs(candidates)
        logits = [network.logits(network_features(network.inputs, inputs)) for network in (self.candidate, self.none)]
        chances = torch.cat(logits, -1).softmax(-1)[..., :-1]
        return chances.masked_fill(candidates["perturbed"] <= 0, 0)

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
        """Return the model whose log odds of any candidate against none are larger by `shift`."""
        return replace(self, none=self.none.shifted(-shift))

    def to_document(self) -> dict[str, Any]:
        """Return the model as the content of a file."""
        measured = [{"draw": e.draw, "temperature": e.temperature, "rates": list(e.rates)} for e in self.measured]
        networks: dict[str, Any] = {kind: getattr(self, kind).to_data() for kind in KINDS}
        return rounded({"schema": SCHEMA, "about": dict(self.about), "measured": measured, **networks})

    def save(self, path: Path) -> None:
        """Write a JSON file; raises EdgespecError."""
        write_document(path, self.to_document())

    @classmethod
    def load(cls, path: Path) -> AcceptanceModel:
        """Read what `save` wrote; raises EdgespecError."""
        return cls.from_document(read_document(path, SCHEMA), path)

    @classmethod
    def from_document(cls, document: object, path: Path) -> AcceptanceModel:
        """Make a model of a file's content; errors name the file `path`. Raises EdgespecError."""
        content = read_content(document, path, _AcceptanceDocument)
        return cls(
            candidate=_network(content.candidate, "candidate", path),
            none=_network(content.none, "none", path),
            measured=content.measured,
            about=content.about,
        )


@functools.cache
def default_acceptance() -> AcceptanceModel:
    """Return the model that was fitted on the built-in pair."""
    return AcceptanceModel.load(DEFAULT_FILE)


@functools.cache
def copy_acceptance() -> AcceptanceModel:
    """Return the model that was fitted on the built-in target and its own nf4 copy."""
    return AcceptanceModel.load(COPY_FILE)


def _interpolate(points: list[tuple[float, float]], at: float) -> float | None:
    """Interpolate linearly between the points, constant beyond them; return None without points."""
    points = sorted(points)
    if not points:
        return None
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= at <= right and left < right:
            return low + (high - low) * (at - left) / (right - left)
    return points[0][1] if at < points[0][0] else points[-1][1]


def _network(data: NetworkData, kind: Kind, path: Path) -> Network:
    for name in data.inputs:
        if name not in INPUTS[kind]:
            raise bad_file(path, f"{kind}.inputs", f"names '{name}', which this network cannot read")
    return Network.from_data(data, path=path, key=kind)
