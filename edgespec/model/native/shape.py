"""What the text of a pass is written for: the sizes of a decoder's layers, and what they have."""

from __future__ import annotations

from dataclasses import dataclass

from offload.native.code import LANES
from offload.native.rounded_rows import COLUMNS, row_bytes

LANE_PAIRS = 16  # columns of a head that a rotation takes at once: eight of each half
# Products whose weight may have the rows of others behind its own
FUSED = {"query": ("query", "key", "value"), "gate": ("gate", "up"), "shared_gate": ("shared_gate", "shared_up")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterScores:
    """How a router's logits become scores, the choice of experts, and their shares."""

    is_sigmoid: bool = False  # whether each logit has a score of its own; else a softmax of all
    has_correction: bool = False  # whether a number of each expert's is added to its score for the choice alone
    renormalises: bool = False  # whether the shares of the chosen add up to the scale
    scale: float = 1.0  # of shares

    @property
    def keeps_scores(self) -> bool:
        """Whether scores are kept beside what experts are chosen by."""
        return self.is_sigmoid or self.has_correction


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
    routing: RouterScores
    rounds: bool  # whether experts take rows of 15 bits; else of float32
    gate: Gate
    has_biases: bool  # of each expert's products
    has_router_bias: bool
    is_router_bf16: bool
    shared: int = 0  # columns of an expert that all rows go through
    has_shared_gate: bool = False  # whether that one's share is a sigmoid, whose logit stands behind the router's

    @property
    def router_rows(self) -> int:
        """The logits of a row."""
        return self.experts + self.has_shared_gate

    @property
    def logits(self) -> int:
        """The numbers that a router's row takes: registers of them."""
        return -(-self.router_rows // LANES) * LANES

    @property
    def list_bytes(self) -> int:
        """The bytes of four lists of experts' numbers, and of how many have rows."""
        return 8 * (4 * self.experts + 1)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row that an expert takes."""
        return row_bytes(columns) if self.rounds else 4 * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """The sizes of a layer's gated delta rule, which stands in the place of attention."""

    key_heads: int
    heads: int  # of values
    key_width: int
    value_width: int
    taps: int  # of the convolution
    in_groups: bool  # whether one product has a head of keys with its values and gates side by side
    is_weight_bf16: bool  # of decays and rates
    is_wide: bool  # whether texts keep states of float64; else of float32
    eps: float

    @property
    def heads_each(self) -> int:
        """The heads of values that share a head of keys."""
        return self.heads // self.key_heads

    @property
    def padded_heads(self) -> int:
        """The numbers that a row's decays take: registers of them."""
        return -(-self.heads // LANES) * LANES

    @property
    def key_columns(self) -> int:
        """The columns of all keys."""
        return self.key_heads * self.key_width

    @property
    def value_columns(self) -> int:
        """The columns of all values."""
        return self.heads * self.value_width

    @property
    def channels(self) -> int:
        """The columns that the convolution passes."""
        return 2 * self.key_columns + self.value_columns

    @property
    def group_columns(self) -> int:
        """The columns of a head of keys with its queries, values and gates."""
        return 2 * self.key_width + 2 * self.heads_each * self.value_width

    @property
    def widths(self) -> dict[str, int]:
        """The columns of products."""
        if self.in_groups:
            return {"mixed": self.channels + self.value_columns}
        return {"mixed": self.channels, "gating": self.value_columns}

    def scratch_bytes(self, num_keys: int) -> int:
        """Return the bytes of a thread: doubles of a key and a query, and of what both have in common with keys."""
        return 8 * 2 * (self.key_width + num_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenFeature:
    """How a head's first layer takes an embedding and the feature behind it, both normed, side by side."""

    is_first: bool  # whether the feature's columns come before the embedding's
    is_normed: bool  # whether the stream is the normed feature; else the feature


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
    has_gates: bool = False  # whether a head's queries have as many logits behind them, of shares of what it attends to
    has_norms_after: bool  # of what attention and MLP add to the stream
    is_bf16: bool  # what rows come in and keys are kept in; else float32
    rounds: bool  # whether products take rows of 15 bits, as packed weights' do; else of float32
    biases: frozenset[str] = frozenset()  # names of products
    fused: frozenset[str] = frozenset()  # of FUSED
    mixture: Mixture | None = None
    feature: TakenFeature | None = None  # of a head's first layer
    delta: DeltaShape | None = None  # in the place of attention, whose sizes are then 0
    has_last_norm: bool = True  # of the decoder's
    factor_columns: int = 0  # behind a position's rotation: a factor of its queries

    @property
    def columns(self) -> int:
        """The columns of what queries, keys and values are made of."""
        return self.hidden if self.feature is None else 2 * self.hidden

    def lies_in(self, name: str) -> tuple[str, int]:
        """Return the product in whose rows a product's columns lie, and how many are before them."""
        widths = self._widths
        for whole in self.fused:
            if name in FUSED[whole]:
                return whole, sum(widths[one] for one in FUSED[whole][: FUSED[whole].index(name)])
        return name, 0

    def width(self, name: str) -> int:
        """Return the columns of a product, of all that are fused."""
        widths = self._widths
        return sum(widths[one] for one in (FUSED[name] if name in self.fused else (name,)))

    def part_width(self, name: str) -> int:
        """Return the columns of a product alone."""
        return self._widths[name]

    @property
    def projections(self) -> tuple[str, ...]:
        """The products of the normed stream before attention, or before what stands in its place."""
        if self.delta is not None:
            return tuple(self.delta.widths)
        return ("query",) if "query" in self.fused else ("query", "key", "value")

    @property
    def mixed_columns(self) -> int:
        """The columns that the output's product takes."""
        return self.heads * self.head_dim if self.delta is None else self.delta.value_columns

    @property
    def _widths(self) -> dict[str, int]:
        queries, keys = self.heads * self.query_columns, self.key_heads * self.head_dim
        shared = 0 if self.mixture is None else self.mixture.shared
        return {
            "query": queries, "key": keys, "value": keys, "gate": self.intermediate, "up": self.intermediate,
            "shared_gate": shared, "shared_up": shared, **({} if self.delta is None else self.delta.widths),
        }  # fmt: skip

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row that a product takes."""
        return row_bytes(columns) if self.rounds else 4 * columns

    @property
    def query_columns(self) -> int:
        """The columns of a head's queries, with its gates."""
        return 2 * self.head_dim if self.has_gates else self.head_dim

    @property
    def group(self) -> int:
        """The heads of queries that share a head of keys."""
        return self.heads // self.key_heads

    @property
    def fits(self) -> bool:
        """Whether registers and groups of columns are filled."""
        if self.delta is not None:
            whole = (self.hidden, self.intermediate, self.delta.key_width, self.delta.value_width)
            return all(size % COLUMNS == 0 for size in whole) and self.delta.heads % self.delta.key_heads == 0
        whole = (self.hidden, self.intermediate, self.heads * self.head_dim, self.group * self.head_dim)
        in_pairs = (self.head_dim, self.rotated)
        return (
            all(size % COLUMNS == 0 for size in whole)
            and (self.key_heads * self.head_dim) % COLUMNS == 0
            and all(size % LANE_PAIRS == 0 for size in in_pairs)
            and self.heads % self.key_heads == 0
        )
