"""What the text of a pass is written for: the sizes of a decoder's layers, and what they have."""

from __future__ import annotations

from dataclasses import dataclass

from offload.native.code import LANES
from offload.native.rounded_rows import COLUMNS, row_bytes

LANE_PAIRS = 16  # columns of a head that a rotation takes at once: eight of each half


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What an expert's activation makes of a row of gates and ups."""

    activation: str = ""  # of gates, which ups are multiplied by; empty: as below
    in_pairs: bool = False  # whether gates and ups stand in turn; else in halves
    # (up + 1) * gate / (1 + exp(-slope * gate)), both numbers within the limit
    slope: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a layer whose MLP is a mixture."""

    experts: int
    each: int  # that a row goes through
    renormalises: bool  # whether the shares of these add up to 1; else those of all experts
    rounds: bool  # whether experts take rows of 15 bits; else of float32
    gate: Gate
    has_biases: bool  # of each expert's products
    has_router_bias: bool

    @property
    def logits(self) -> int:
        """The numbers that a router's row takes: registers of them."""
        return -(-self.experts // LANES) * LANES

    @property
    def list_bytes(self) -> int:
        """The bytes of four lists of experts' numbers, and of how many have rows."""
        return 8 * (4 * self.experts + 1)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row that an expert takes."""
        return row_bytes(columns) if self.rounds else 4 * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder's layers."""

    hidden: int
    intermediate: int  # of an expert, where the MLP is a mixture
    heads: int
    key_heads: int
    head_dim: int
    rotated: int  # columns of a head that positions rotate: the first ones
    eps: float
    scale: float  # of scores
    softcap: float  # of scores; 0: none
    activation: str  # of an MLP that is no mixture
    has_sinks: bool  # whether a number of each head's takes a share of its rows' weights
    has_head_norms: bool  # of queries and keys
    has_norms_after: bool  # of what attention and MLP add to the stream
    biases: frozenset[str]  # names of products
    is_bf16: bool  # what rows come in and keys are kept in; else float32
    rounds: bool  # whether products take rows of 15 bits, as packed weights' do; else of float32
    mixture: Mixture | None = None

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row that a product takes."""
        return row_bytes(columns) if self.rounds else 4 * columns

    @property
    def group(self) -> int:
        """The heads of queries that share a head of keys."""
        return self.heads // self.key_heads

    @property
    def fits(self) -> bool:
        """Whether registers and groups of columns are filled."""
        whole = (self.hidden, self.intermediate, self.heads * self.head_dim, self.group * self.head_dim)
        in_pairs = (self.head_dim, self.rotated)
        return (
            all(size % COLUMNS == 0 for size in whole)
            and (self.key_heads * self.head_dim) % COLUMNS == 0
            and all(size % LANE_PAIRS == 0 for size in in_pairs)
            and self.heads % self.key_heads == 0
        )
