"""Small networks that predict a probability, and the JSON files that they are kept in.

Files are read strictly: what is unknown, missing, of the wrong shape or not a number is refused by its
key. Numbers are rounded, so that a file can be read and compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.files import written_whole
from edgespec.inputs import is_finite, parse_json, shown

Activation = Literal["relu", "tanh"]
DIGITS = 5  # significant ones in files

_Layers = list[tuple[Tensor, Tensor]]  # weight transposed [i, o], bias [o]


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
    def from_data(cls, data: object, *, path: Path, key: str) -> Network:
        """Make a network of a file's content below `key`; raises EdgespecError."""
        found = read_keys(data, {"inputs", "mean", "std", "activation", "layers"}, path=path, key=key)
        inputs = found["inputs"]
        if not isinstance(inputs, list) or not inputs or not all(isinstance(name, str) for name in inputs):
            raise bad_file(path, f"{key}.inputs", "is no list of names")
        if found["activation"] not in ("relu", "tanh"):
            raise bad_file(path, f"{key}.activation", "is neither 'relu' nor 'tanh'")
        std = read_tensor(found["std"], (len(inputs),), path=path, key=f"{key}.std")
        if not bool((std > 0).all()):
            raise bad_file(path, f"{key}.std", "has a number that is not above 0")
        if not isinstance(found["layers"], list) or not found["layers"]:
            raise bad_file(path, f"{key}.layers", "is no list of layers")
        weights, biases = [], []
        width = len(inputs)
        for index, layer in enumerate(found["layers"]):
            at = f"{key}.layers.{index}"
            parts = read_keys(layer, {"weight", "bias"}, path=path, key=at)
            is_last = index == len(found["layers"]) - 1
            next_width = 1 if is_last else len(parts["bias"]) if isinstance(parts["bias"], list) else 0
            weights.append(read_tensor(parts["weight"], (next_width, width), path=path, key=f"{at}.weight"))
            biases.append(read_tensor(parts["bias"], (next_width,), path=path, key=f"{at}.bias"))
            width = next_width
        return cls(
            inputs=tuple(inputs),
            mean=read_tensor(found["mean"], (len(inputs),), path=path, key=f"{key}.mean"),
            std=std,
            activation=found["activation"],
            weights=tuple(weights),
            biases=tuple(biases),
        )


def bad_file(path: Path, key: str, problem: str) -> EdgespecError:
    """Return the error for a file that is not what it should be."""
    return EdgespecError("E_MODEL_FILE", f"'{path}': {key} {problem}.", "Fit it again, or name another file.")


def read_document(path: Path, schema: str, keys: set[str]) -> dict[str, Any]:
    """Read a JSON file, which must have exactly `keys` and "schema"; raises EdgespecError."""
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
    return read_keys(content, keys | {"schema"}, path=path, key="")


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


def read_keys(data: object, keys: set[str], *, path: Path, key: str) -> dict[str, Any]:
    """Return a JSON object that has exactly these keys; raises EdgespecError naming the first that is amiss."""
    if not isinstance(data, dict):
        raise bad_file(path, key or "the file", "is no object")
    for name in sorted(keys ^ data.keys()):
        raise bad_file(path, f"{key}.{name}".lstrip("."), "is missing" if name in keys else "is unknown")
    return data


def read_number(value: object, *, path: Path, key: str) -> float:
    """Return a finite number; raises EdgespecError."""
    if not is_finite(value):
        raise bad_file(path, key, "is no finite number")
    return float(value)


def read_tensor(value: object, shape: tuple[int, ...], *, path: Path, key: str) -> Tensor:
    """Return nested lists of finite numbers as float64 of that shape; raises EdgespecError."""

    def flat(part: object, sizes: tuple[int, ...]) -> list[float]:
        if not sizes:
            return [read_number(part, path=path, key=key)]
        if not isinstance(part, list) or len(part) != sizes[0]:
            raise bad_file(path, key, f"is not of shape {list(shape)}")
        return [number for row in part for number in flat(row, sizes[1:])]

    return torch.tensor(flat(value, shape), dtype=torch.float64).view(shape)


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
