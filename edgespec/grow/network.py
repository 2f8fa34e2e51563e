"""Small networks that predict a probability, and the JSON files that they are kept in.

Files are read strictly: a part that is unknown, missing, of the wrong shape or not a number is refused by its
key. Numbers are rounded, so that a file can be read and compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.user_paths import written_whole
from edgespec.validation import parse_json, read_as, shown

Activation = Literal["relu", "tanh"]
DIGITS = 5  # significant ones in files

Number = Annotated[float, Field(allow_inf_nan=False)]
T = TypeVar("T")
_Layers = list[tuple[Tensor, Tensor]]  # weight transposed [i, o], bias [o]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerData:
    """A layer as it stands in a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    weight: tuple[tuple[Number, ...], ...]
    bias: tuple[Number, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkData:
    """A network as it stands in a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    inputs: Annotated[tuple[str, ...], Field(min_length=1)]
    mean: tuple[Number, ...]
    std: tuple[Annotated[Number, Field(gt=0)], ...]
    activation: Activation
    layers: Annotated[tuple[LayerData, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A feed-forward net with one output, a log odds: inputs are standardised first."""

    inputs: tuple[str, ...]  # names of the i inputs
    mean: Tensor  # [i], float64 like all numbers here
    std: Tensor  # [i]
    activation: Activation
    weights: tuple[Tensor, ...]  # [h, i], ..., [1, h]
    biases: tuple[Tensor, ...]  # [h], ..., [1]
    _placed: dict[tuple[torch.device, torch.dtype], _Layers] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, features: Tensor) -> Tensor:
        """Return probabilities [...] of features [..., i], in their dtype and on their device."""
        return self.logits(features).sigmoid()

    def logits(self, features: Tensor) -> Tensor:
        """Return log odds [...] of features [..., i], in their dtype and on their device."""
        layers = self._on(features.device, features.dtype)
        activate = torch.relu if self.activation == "relu" else torch.tanh
        hidden = features.flatten(0, -2)
        for weight, bias in layers[:-1]:
            hidden = activate(torch.addmm(bias, hidden, weight))
        weight, bias = layers[-1]
        return torch.addmm(bias, hidden, weight).view(features.shape[:-1])

    def _on(self, device: torch.device, dtype: torch.dtype) -> _Layers:
        """Return the layers in this dtype on this device, the standardisation folded into the first; placed once."""
        if (device, dtype) not in self._placed:
            first = self.weights[0] / self.std
            weights = (first, *self.weights[1:])
            biases = (self.biases[0] - first @ self.mean, *self.biases[1:])
            self._placed[device, dtype] = [
                (weight.T.to(device, dtype), bias.to(device, dtype))
                for weight, bias in zip(weights, biases, strict=True)
            ]
        return self._placed[device, dtype]

    def shifted(self, shift: float) -> Network:
        """Return the network whose log odds are larger by `shift`."""
        return replace(self, biases=(*self.biases[:-1], self.biases[-1] + shift))

    def to_data(self) -> dict[str, Any]:
        """Return the network as it stands in a file."""
        layers = zip(self.weights, self.biases, strict=True)
        return {
            "inputs": list(self.inputs),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "activation": self.activation,
            "layers": [{"weight": weight.tolist(), "bias": bias.tolist()} for weight, bias in layers],
        }

    @classmethod
    def from_data(cls, data: NetworkData, *, path: Path, key: str) -> Network:
        """Make a network of a file's content below `key`; raises EdgespecError."""
        widths = [len(data.inputs), *(len(layer.bias) for layer in data.layers[:-1]), 1]
        layers = list(zip(data.layers, itertools.pairwise(widths), strict=True))
        return cls(
            inputs=data.inputs,
            mean=_tensor(data.mean, tuple(widths[:1]), path=path, key=f"{key}.mean"),
            std=_tensor(data.std, tuple(widths[:1]), path=path, key=f"{key}.std"),
            activation=data.activation,
            weights=tuple(
                _tensor(layer.weight, shape[::-1], path=path, key=f"{key}.layers.{index}.weight")
                for index, (layer, shape) in enumerate(layers)
            ),
            biases=tuple(
                _tensor(layer.bias, shape[1:], path=path, key=f"{key}.layers.{index}.bias")
                for index, (layer, shape) in enumerate(layers)
            ),
        )


def bad_file(path: Path, key: str, problem: str) -> EdgespecError:
    """Return the error for a file that is not what it should be."""
    return EdgespecError("E_MODEL_FILE", f"'{path}': {key} {problem}.", "Fit it again, or name another file.")


def read_document(path: Path, schema: str) -> Any:
    """Return the content of a JSON file of this schema; raises EdgespecError."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EdgespecError("E_FILE_NOT_FOUND", f"'{path}' does not exist.", "Check the path.") from error
    except (OSError, ValueError) as error:
        raise bad_file(path, "the file", f"cannot be read as JSON ({error})") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        what = schema.removeprefix("edgespec.").partition("/")[0]
        raise EdgespecError(
            "E_MODEL_FILE",
            f"'{path}' has schema {shown(found)}, not '{schema}'.",
            f"Fit it with this version: edgespec train {what}.",
        )
    return content


def read_content(content: object, path: Path, kind: type[T]) -> T:
    """Return the content of a file as a record; raises EdgespecError."""
    return read_as(kind, content, lambda key, problem: bad_file(path, key or "the file", problem))


def rounded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with the digits that files keep."""
    found: dict[str, Any] = _rounded(content)
    return found


def write_document(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; raises EdgespecError."""
    try:
        with written_whole(path, is_private=False) as partial:
            partial.write_text(_format(rounded(content)) + "\n", encoding="utf-8")
    except OSError as error:
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written ({error}).", "Choose another place.") from error


def _tensor(values: Sequence[Any], shape: tuple[int, ...], *, path: Path, key: str) -> Tensor:
    """Return numbers, or rows of them, as float64; raises EdgespecError for another shape."""
    rows = values if len(shape) > 1 else [values]
    if len(values) != shape[0] or any(len(row) != shape[-1] for row in rows):
        raise bad_file(path, key, f"is not of shape {list(shape)}")
    return torch.tensor(values, dtype=torch.float64)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _format(value: Any, indent: str = "") -> str:
    """Return the value as JSON, with one line for what holds no further lists or objects."""
    inner = indent + "  "
    if isinstance(value, dict) and any(isinstance(part, dict | list) for part in value.values()):
        lines = [f"{inner}{json.dumps(name)}: {_format(part, inner)}" for name, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return "[\n" + ",\n".join(inner + _format(part, inner) for part in value) + f"\n{indent}]"
    return json.dumps(value)
