"""Improving-MCSD's decision models say whether drafting below a node pays.

A small net on the draft's last hidden state at the node (three layers), or on the top-k probabilities
of its distribution and their entropy (two), predicts the chance that the node's child is accepted.
Drafting stops when it is below a threshold, 0.4 in the paper, at all nodes of a layer. Source:
Improving-MCSD, section 3.3. A model is kept as safetensors with a JSON header, because hidden states are wide.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edgespec.draft import Drafter
from edgespec.errors import EdgespecError
from edgespec.grow.growing import Layer
from edgespec.grow.network import Activation, Network, bad_file, read_content
from edgespec.sampling.distribution import entropy_of_top
from edgespec.user_paths import written_whole
from edgespec.validation import parse_json

SCHEMA = "edgespec.stop_model/1"
DISTRIBUTION_INPUTS = 11  # ten probabilities and the entropy
_HEADER_KEY = "edgespec"

StopKind = Literal["hidden", "probabilities"]


@runtime_checkable
class HiddenStates(Protocol):
    """A drafter that keeps its last hidden states."""

    def hidden(self, rows: Tensor) -> Tensor:
        """Return the hidden states [k, h] of its rows [k] since the last commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a file says beside its tensors."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema: str
    kind: StopKind
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StopModel:
    """Predicts the chance that a child of a node is accepted, given that the node is."""

    kind: StopKind
    network: Network

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the chance [k] of nodes by hidden states [k, h], or by `distribution_inputs` [k, top + 1]."""
        return self.network(inputs)

    @property
    def num_inputs(self) -> int:
        """The width of the hidden states, or the number of probabilities and one."""
        return len(self.network.inputs)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all; raises EdgespecError."""
        network = self.network
        tensors = {"mean": network.mean, "std": network.std}
        for index, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
            tensors |= {f"weight.{index}": weight, f"bias.{index}": bias}
        header = {"schema": SCHEMA, "kind": self.kind, "activation": network.activation}
        columns = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        try:
            with written_whole(path, is_private=False) as partial:
                save_file(columns, partial, metadata={_HEADER_KEY: json.dumps(header)})
        except (OSError, SafetensorError) as error:  # safetensors words a full disk in its own way
            raise EdgespecError(
                "E_OUTPUT", f"'{path}' cannot be written ({error}).", "Choose another place."
            ) from error

    @classmethod
    def load(cls, path: Path) -> StopModel:
        """Read what `save` wrote; raises EdgespecError."""
        try:
            if not path.exists():
                raise EdgespecError("E_FILE_NOT_FOUND", f"'{path}' does not exist.", "Check the path.")
            with safe_open(path, framework="pt") as file:
                header = parse_json((file.metadata() or {}).get(_HEADER_KEY, "null"))
                tensors = {name: file.get_tensor(name).double() for name in file.keys()}  # noqa: SIM118, it is no dict
        except (OSError, SafetensorError, ValueError) as error:
            raise bad_file(path, "the file", f"cannot be read as safetensors ({error})") from error
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise bad_file(path, "schema", f"is not '{SCHEMA}'")
        found = read_content(header, path, _Header)
        return cls(kind=found.kind, network=_read_network(tensors, found.activation, found.kind, path))


def distribution_inputs(q: Tensor, num_inputs: int = DISTRIBUTION_INPUTS) -> Tensor:
    """Return the `num_inputs` - 1 largest probabilities of q [k, vocab], and their entropy: [k, num_inputs]."""
    top = q.topk(min(num_inputs - 1, q.shape[-1]), -1).values
    missing = num_inputs - 1 - top.shape[-1]
    return torch.cat([torch.nn.functional.pad(top, (0, missing)), entropy_of_top(q)[:, None]], -1)


def input_names(kind: StopKind, num_inputs: int) -> tuple[str, ...]:
    """Return the names of a decision model's inputs."""
    if kind == "hidden":
        return tuple(f"hidden_{index}" for index in range(num_inputs))
    return (*(f"top_{index}" for index in range(num_inputs - 1)), "entropy")


def model_exit(model: StopModel, drafter: Drafter, *, confidence: float) -> Callable[[Layer], Tensor]:
    """Return the early exit: nothing follows nodes below which no child looks likely enough.

    Source: Improving-MCSD, section 3.3. It reads what the children were drawn from, not the children. Raises
    EdgespecError for a model of hidden states and a drafter that keeps none.
    """
    if model.kind == "probabilities":
        return lambda layer: model.predict(distribution_inputs(layer.q, model.num_inputs)) < confidence
    if not isinstance(drafter, HiddenStates):
        what = "the decision model reads hidden states, and this draft keeps none."
        raise EdgespecError("E_SETTING", what, "Use one of kind 'probabilities'.")
    states = cast(HiddenStates, drafter)

    def stops(layer: Layer) -> Tensor:
        hidden = states.hidden(layer.rows)
        if hidden.shape[-1] != model.num_inputs:
            what = f"the decision model reads {model.num_inputs} numbers, the draft's states have {hidden.shape[-1]}."
            raise EdgespecError("E_SHAPE_MISMATCH", what, "Fit it on this draft.")
        return model.predict(hidden.float()) < confidence

    return stops


def _read_network(tensors: dict[str, Tensor], activation: Activation, kind: StopKind, path: Path) -> Network:
    num_layers = sum(name.startswith("weight.") for name in tensors)
    layers = range(num_layers)
    expected = {"mean", "std", *(f"{part}.{index}" for part in ("weight", "bias") for index in layers)}
    for key in sorted(expected ^ tensors.keys()):
        raise bad_file(path, key, "is missing" if key in expected else "is unknown")
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise bad_file(path, key, "has a number that is not finite")
    if num_layers == 0 or tensors["mean"].ndim != 1:
        raise bad_file(path, "mean" if num_layers else "weight.0", "is missing or of the wrong shape")
    width = tensors["mean"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {"std": (width,)}
    for index in layers:
        bias = tensors[f"bias.{index}"]
        next_width = 1 if index == num_layers - 1 else bias.numel()
        shapes |= {f"weight.{index}": (next_width, width), f"bias.{index}": (next_width,)}
        width = next_width
    for key, shape in shapes.items():
        if tensors[key].shape != shape:
            raise bad_file(path, key, f"is not of shape {list(shape)}")
    if not bool((tensors["std"] > 0).all()):
        raise bad_file(path, "std", "has a number that is not above 0")
    return Network(
        inputs=input_names(kind, tensors["mean"].shape[0]),
        mean=tensors["mean"],
        std=tensors["std"],
        activation=activation,
        weights=tuple(tensors[f"weight.{index}"] for index in layers),
        biases=tuple(tensors[f"bias.{index}"] for index in layers),
    )
