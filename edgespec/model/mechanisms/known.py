"""All that layers may keep of a text between passes. A new mechanism is a line here, and a file beside this one."""

from transformers import PretrainedConfig

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.block_index import BlockIndex
from edgespec.model.mechanisms.by_depth import ByDepth
from edgespec.model.mechanisms.compressed_keys import Compression
from edgespec.model.mechanisms.delta_rule import GatedDeltaRule
from edgespec.model.mechanisms.indexed import KeyIndex
from edgespec.model.mechanisms.keys_values import KeysValues
from edgespec.model.mechanisms.latents import Latents
from edgespec.model.mechanisms.mamba import MambaScan
from edgespec.model.mechanisms.mechanism import KeyShape, Mechanism
from edgespec.model.mechanisms.ngrams import Ngrams
from edgespec.model.mechanisms.short_convolution import ShortConvolution
from edgespec.model.mechanisms.windows import Windows, key_sources

_FUNCTIONS = (ShortConvolution(), GatedDeltaRule(), MambaScan())
# Those that change the shape of keys come before keys and values as they are.
MECHANISMS: tuple[Mechanism, ...] = (
    BlockIndex(), Compression(), KeyIndex(), Latents(), Windows(), KeysValues(), Ngrams(), *_FUNCTIONS,
    ByDepth(_FUNCTIONS),
)  # fmt: skip


def mechanisms_of(config: PretrainedConfig) -> list[Mechanism]:
    """Return the records that have layers of this configuration, whether or not they can be read."""
    return [record for record in MECHANISMS if record.has_layers(config)]


def read_by(config: PretrainedConfig) -> list[Mechanism]:
    """Return the records that read layers of this configuration."""
    found = [record for record in MECHANISMS if record.is_read(config)]
    return [record for record in found if not any(other.replaces(record) for other in found)]


def keeps_states(config: PretrainedConfig) -> bool:
    """Return whether some layers keep states, which cannot be cut to any length of a text."""
    return any(record.keeps_states for record in mechanisms_of(config))


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the layers that keep keys and values: all but the kinds that are known to keep none."""
    keyless = frozenset[str]().union(*(record.keyless_kinds for record in MECHANISMS))
    return [layer for layer, kind in enumerate(kinds_of(config)) if kind not in keyless]


def key_shape(config: PretrainedConfig, layer: int) -> KeyShape:
    """Return the shape of what a layer keeps as keys and values."""
    return next(shape for record in MECHANISMS if (shape := record.key_shape(config, layer)) is not None)


def row_numbers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of a row in each tensor that grows with the text: of keys, of values, or of others."""
    rows = [numbers for of_layer in layer_numbers(config).values() for numbers in of_layer]
    return rows + [numbers for record in MECHANISMS for numbers in record.row_numbers(config)]


def layer_numbers(config: PretrainedConfig) -> dict[int, tuple[int, int]]:
    """Return the numbers of a row's keys, and of its values, in each layer that keeps some of its own."""
    sources = key_sources(config)
    own = {layer: key_shape(config, layer) for layer in attention_layers(config) if sources[layer] == layer}
    return {layer: (of.heads * of.key_width, of.heads * of.value_width) for layer, of in own.items()}
