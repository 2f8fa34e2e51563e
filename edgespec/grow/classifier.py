"""C2T's classifier says how sure to be of a candidate token.

It is a two-layer feed-forward net with ReLU and a sigmoid, hidden width 48. It reads the joint probability along
the path, the entropy of the distribution that the token stands in, and the token's depth. Source:
C2T, section 4.1 and appendix B.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict
from torch import Tensor

from edgespec.grow.network import Network, NetworkData, bad_file, read_content, read_document, write_document

SCHEMA = "edgespec.classifier/1"
DEFAULT_FILE = Path(__file__).parents[1] / "demo" / "classifier.json"
INPUTS = ("path_probability", "entropy", "depth")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassifierDocument:
    """The content of a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema: str
    network: NetworkData


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classifier:
    """Predicts the confidence that a token will be accepted."""

    network: Network

    def confidence(self, *, path_probability: Tensor, entropy: Tensor, depth: int) -> Tensor:
        """Return the confidence [k, c] in tokens with `path_probability` [k, c], their own q included.

        `entropy` [k] is in nats.
        """
        parts = [path_probability, entropy[:, None], path_probability.new_full((1, 1), depth)]
        return self.network(torch.stack(torch.broadcast_tensors(*parts), -1))

    def save(self, path: Path) -> None:
        """Write a JSON file; raises EdgespecError."""
        write_document(path, {"schema": SCHEMA, "network": self.network.to_data()})

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Read what `save` wrote; raises EdgespecError."""
        document = read_content(read_document(path, SCHEMA), path, _ClassifierDocument)
        network = Network.from_data(document.network, path=path, key="network")
        if network.inputs != INPUTS:
            raise bad_file(path, "network.inputs", f"is not {', '.join(INPUTS)}")
        return cls(network=network)


@functools.cache
def default_classifier() -> Classifier:
    """Return the classifier that was fitted on the built-in pair."""
    return Classifier.load(DEFAULT_FILE)
