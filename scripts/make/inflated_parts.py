"""The tensors of an inflated model: which there are, and what of the small model stands where in each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from edgespec.pair.folder import ModelFolder

NORM_ZEROS = {"llama": 0, "glm4_moe": 0, "qwen3_5_text": -1}  # the weight with which a family's norm gives zero

# What a tensor does with the hidden state: nothing, where it is "aside"; "kept" ones have their old shape. Of a draft's
# convolutions one has a number a channel, which "repeats", and one makes numbers of groups of them, which it "mixes"; a
# norm of what was normed before, "renorm", finds zeros in the added width.
Role = Literal["embeds", "reads", "writes", "norm", "renorm", "aside", "kept", "repeats", "mixes"]
OfLayer = tuple[str, Role, tuple[int, ...], Tensor]  # name in the layer, role, shape, places


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that inflating can change."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    linear_heads: int = 0  # key heads of the gated delta rule

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor to be written, and where its values come from."""

    name: str
    old_name: str | None  # the source's tensor; None in a layer that is added
    role: Role
    shape: tuple[int, ...]
    places: Tensor  # where the old columns ("writes"), or else rows or values go; which old row a row "mixes"
    segments: int = 1  # hidden states side by side that it reads


def shape_of(model: ModelFolder) -> Shape:
    """The shape that a folder's config names."""
    config = model.config
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        inner=config.intermediate_size,
        linear_heads=getattr(config, "linear_num_key_heads", 0),
    )


def query_places(small: Shape, large: Shape, head_dim: int) -> Tensor:
    """Rows for the source's query rows: each group stands at the start of its larger group."""
    heads = torch.arange(small.heads)
    places = heads // small.group * large.group + heads % small.group
    return (places[:, None] * head_dim + torch.arange(head_dim)).flatten()


def layer_kinds(source: ModelFolder, large: Shape) -> list[str]:
    """The kinds of the large model's layers: the source's pattern goes on."""
    kinds, period = _pattern(source)
    return (kinds[:period] * large.layers)[: large.layers]


def _pattern(source: ModelFolder) -> tuple[list[str], int]:
    """The kinds of the source's layers, and after how many of them they repeat."""
    num_layers = source.config.num_hidden_layers
    kinds = getattr(source.config, "layer_types", None) or ["full_attention"] * num_layers
    return kinds, next(n for n in range(1, num_layers + 1) if kinds == (kinds[:n] * num_layers)[:num_layers])


def layer_places(source: ModelFolder, large: Shape) -> dict[int, int]:
    """Layer of the large model -> the source's layer that it holds: spread evenly, each on one of its kind."""
    kinds, period = _pattern(source)
    num_old, num_new = max(1, len(kinds) // period), large.layers // period  # repetitions of the pattern
    places = {}
    for index in range(len(kinds)):
        repetition, kind = divmod(index, period)
        start, end = repetition * num_new // num_old, (repetition + 1) * num_new // num_old
        places[(start + kind * (end - start) // period) * period + kind] = index
    return places


def list_parts(source: ModelFolder, large: Shape) -> list[Part]:
    """All tensors of the large model, in the order of a pass."""
    small, config = shape_of(source), source.config
    width = torch.arange(small.hidden)
    # Rows of the embedding become hidden states; as a tied head, it meets the norm's zeros in the added width.
    embedding = "model.embed_tokens.weight"
    parts = [Part(embedding, embedding, "embeds", (config.vocab_size, large.hidden), width)]
    source_layer = layer_places(source, large)
    for layer, kind in enumerate(layer_kinds(source, large)):
        old = f"model.layers.{source_layer[layer]}." if layer in source_layer else None
        parts += [
            Part(f"model.layers.{layer}.{name}", old and f"{old}{name}", role, shape, places)
            for name, role, shape, places in _of_layer(config, kind, small, large)
        ]
    parts.append(Part("model.norm.weight", "model.norm.weight", "norm", (large.hidden,), width))
    if not config.tie_word_embeddings:
        rows = torch.arange(config.vocab_size)
        parts.append(Part("lm_head.weight", "lm_head.weight", "reads", (config.vocab_size, large.hidden), rows))
    return parts


def _of_layer(config: Any, kind: str, small: Shape, large: Shape) -> Iterator[OfLayer]:
    """A layer's tensors, in the order of a pass."""
    width, inner = torch.arange(small.hidden), torch.arange(small.inner)
    yield "input_layernorm.weight", "norm", (large.hidden,), width
    mixer = _gated_delta_rule if kind == "linear_attention" else _attention
    yield from mixer(config, small, large)
    yield "post_attention_layernorm.weight", "norm", (large.hidden,), width
    yield "mlp.gate_proj.weight", "reads", (large.inner, large.hidden), inner
    yield "mlp.up_proj.weight", "reads", (large.inner, large.hidden), inner
    yield "mlp.down_proj.weight", "writes", (large.hidden, large.inner), inner


def _attention(config: Any, small: Shape, large: Shape) -> Iterator[OfLayer]:
    size = config.head_dim
    is_gated = bool(small.linear_heads)  # Qwen3.5: a query head's rows are followed by its gate's, and heads are normed
    rows_each = 2 * size if is_gated else size
    keys, num_keys = torch.arange(small.kv_heads * size), large.kv_heads * size
    yield (
        "self_attn.q_proj.weight",
        "reads",
        (large.heads * rows_each, large.hidden),
        query_places(small, large, rows_each),
    )
    yield "self_attn.k_proj.weight", "reads", (num_keys, large.hidden), keys
    yield "self_attn.v_proj.weight", "reads", (num_keys, large.hidden), keys
    if is_gated:
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", "aside", (size,), torch.arange(size)
    yield "self_attn.o_proj.weight", "writes", (large.hidden, large.heads * size), query_places(small, large, size)


def _gated_delta_rule(config: Any, small: Shape, large: Shape) -> Iterator[OfLayer]:
    """Added heads stand behind the source's, among queries, keys and values alike."""
    values_a_key = config.linear_num_value_heads // config.linear_num_key_heads
    size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    old_keys, new_keys = small.linear_heads * size, large.linear_heads * size
    old_heads, new_heads = small.linear_heads * values_a_key, large.linear_heads * values_a_key
    heads, values = torch.arange(old_heads), torch.arange(old_heads * value_size)
    keys = torch.arange(old_keys)
    mixed, num_mixed = torch.cat((keys, new_keys + keys, 2 * new_keys + values)), 2 * new_keys + new_heads * value_size
    yield "linear_attn.in_proj_qkv.weight", "reads", (num_mixed, large.hidden), mixed
    yield "linear_attn.conv1d.weight", "reads", (num_mixed, 1, config.linear_conv_kernel_dim), mixed
    yield "linear_attn.in_proj_z.weight", "reads", (new_heads * value_size, large.hidden), values
    yield "linear_attn.in_proj_b.weight", "reads", (new_heads, large.hidden), heads
    yield "linear_attn.in_proj_a.weight", "reads", (new_heads, large.hidden), heads
    yield "linear_attn.dt_bias", "aside", (new_heads,), heads
    yield "linear_attn.A_log", "aside", (new_heads,), heads
    yield "linear_attn.norm.weight", "aside", (value_size,), torch.arange(value_size)
    yield "linear_attn.out_proj.weight", "writes", (large.hidden, new_heads * value_size), values


def make_tensor(part: Part, old: Tensor | None, *, norm_zero: int, generator: torch.Generator) -> Tensor:
    """The part in float32: the old values in their places, around them what changes nothing."""
    if part.role == "kept":
        assert old is not None
        return old
    if old is not None:
        old = old.float()
    if part.role in {"embeds", "repeats"}:
        assert old is not None
        wide = torch.cat([old] * (part.shape[-1] // old.shape[-1]), -1)
    elif part.role == "writes":
        wide = torch.zeros(part.shape)
        if old is not None:
            wide[:, part.places] = old.repeat(part.shape[0] // old.shape[0], 1)
    elif part.role in {"reads", "mixes"}:  # all that it reads in the added width is zero
        wide = torch.randn(part.shape, generator=generator) * part.shape[1] ** -0.5
        if old is not None:
            rows, old = (slice(None), old[part.places]) if part.role == "mixes" else (part.places, old)
            width = old.shape[1] // part.segments
            for segment, read in enumerate(old.split(width, 1)):
                start = segment * part.shape[1] // part.segments
                wide[rows, start : start + width] = read
    else:
        wide = 1 + 0.1 * torch.randn(part.shape, generator=generator)
        if old is not None:
            if part.role != "aside":
                wide.fill_(norm_zero)
            # A root mean square with zeros is smaller
            scale = (old.shape[0] / part.shape[0]) ** 0.5 if part.role == "renorm" else 1
            wide[part.places] = (old - norm_zero) * scale + norm_zero
    return wide
