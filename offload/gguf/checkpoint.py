"""A GGUF file's tensors under the names and in the pieces in which the model is published as safetensors."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from offload.checkpoint import Checkpoint, Pieces, TensorEntry
from offload.errors import CheckpointError
from offload.gguf.entries import experts, matrices_of, matrix, of_one_type, packed, unpacked
from offload.gguf.family import EXPERTS, IN_LAYER, OUTSIDE, Family
from offload.gguf.header import GgufHeader, GgufTensor, read_gguf
from offload.gguf.refusal import not_read
from offload.gguf.rotation import READ_AS_SETTINGS
from offload.gguf.settings import family_of

GGUF = "gguf"  # `quant_method` of such a model
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
SHARED = {"attn_k", "attn_v", "attn_k_norm"}  # by the last layers, of families whose layers share
IN_MODEL = re.compile(r"\b(?:layers|blk)\.(\d+)\.")
TABLE_OF_LAYERS = "per_layer_token_embd"  # of Gemma 3n and 4, many times as large as the other one
# What a layer for a further token has beside a decoder layer; of the model's own table and head it has copies
NEXTN = {
    "nextn.eh_proj.weight": "eh_proj", "nextn.enorm.weight": "enorm", "nextn.hnorm.weight": "hnorm",
    "nextn.shared_head_norm.weight": "shared_head.norm",
}  # fmt: skip
COPIES = {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight"}
PART = re.compile(r"blk\.(\d+)\.(.+)")
NUM_MATRIX_DIMENSIONS, NUM_EXPERT_DIMENSIONS = 2, 3


def gguf_checkpoint(header: GgufHeader, fields: dict[str, Any]) -> Checkpoint:
    """Return the tensors; `fields` are those of config.json. Raises CheckpointError for one that is not understood."""
    family = family_of(header)
    tensors: dict[str, TensorEntry] = {}
    for tensor in header.tensors.values():
        if tensor.name not in READ_AS_SETTINGS:
            tensors |= {entry.name: entry for entry in _entries(header, family, tensor, fields)}
    return Checkpoint(folder=header.path, tensors=of_one_type(tensors))


def check_all_read(
    checkpoint: Checkpoint, stored: Mapping[str, Pieces], read: Collection[str], num_layers: int
) -> None:
    """Raise CheckpointError for a tensor that is not `read`, but of layers beyond the last: for further tokens."""
    taken = {piece.name for name in read for piece in stored.get(name, ())}
    for name, entry in checkpoint.tensors.items():
        layer = IN_MODEL.search(name)
        if entry.name not in taken and (layer is None or int(layer[1]) < num_layers):
            header = read_gguf(checkpoint.folder, is_whole=False)
            found = next(
                (
                    tensor.name
                    for tensor in header.tensors.values()
                    if tensor.file == entry.file and 0 <= entry.offset - tensor.offset < tensor.num_bytes
                ),
                None,
            )
            if found is not None:  # else it is of a file in which the weights were packed anew
                raise not_read(header, f"has a tensor '{found}'{' in a layer that lacks it' if layer else ''}")


def _entries(header: GgufHeader, family: Family, tensor: GgufTensor, fields: dict[str, Any]) -> Iterator[TensorEntry]:
    layer, part = found.groups() if (found := PART.fullmatch(tensor.name)) else (None, tensor.name)
    start = "" if layer is None else f"{family.layers}.{layer}."
    num_layers = fields["num_hidden_layers"]
    if layer is None or int(layer) < num_layers:
        yield from _of_model(header, family, tensor, fields)
    elif int(layer) >= num_layers + fields.get("num_nextn_predict_layers", 0):
        raise not_read(header, f"has a tensor '{tensor.name}'")
    elif part in NEXTN:
        plus_one = family.norms_plus_one and part.endswith("norm.weight")
        is_norm = len(tensor.shape) < NUM_MATRIX_DIMENSIONS
        name = start + NEXTN[part]
        yield unpacked(f"{name}.weight", tensor, added=-float(plus_one)) if is_norm else matrix(name, tensor)
    elif part not in COPIES:
        try:
            yield from list(_of_model(header, family, tensor, fields))
        except CheckpointError:
            yield unpacked(tensor.name, tensor)  # which is no part of the model: what reads the layer names it


def _of_model(header: GgufHeader, family: Family, tensor: GgufTensor, fields: dict[str, Any]) -> Iterator[TensorEntry]:
    layer, part = found.groups() if (found := PART.fullmatch(tensor.name)) else (None, tensor.name)
    start = "" if layer is None else f"{family.layers}.{layer}."
    if part in family.parts:
        try:
            yield from list(family.parts[part](start, tensor, fields))
        except (IndexError, KeyError, ValueError) as error:
            raise not_read(header, f"has '{tensor.name}' of the shape {list(tensor.shape)}") from error
        return
    in_layer = LAYER.fullmatch(tensor.name)
    if in_layer is None:
        path, _, leaf = tensor.name.rpartition(".")
        outside = {**OUTSIDE, **family.outside}
        if path not in outside or leaf != "weight":
            raise not_read(header, f"has a tensor '{tensor.name}'")
        if "{}" in outside[path]:
            for index, one in enumerate(matrices_of(tensor)):
                yield unpacked(f"{outside[path].format(index)}.{leaf}", one)
            return
        is_matrix = len(tensor.shape) == NUM_MATRIX_DIMENSIONS
        if is_matrix and path in {*OUTSIDE, TABLE_OF_LAYERS} and not tensor.block.is_unpacked:
            yield packed(outside[path], tensor)
            return
        is_norm = path == "output_norm"
        yield unpacked(f"{outside[path]}.{leaf}", tensor, added=-1.0 if is_norm and family.norms_plus_one else 0.0)
        return
    number, path, leaf = in_layer.groups()
    names = {**IN_LAYER, **family.names}
    is_bias_of_another = leaf == "bias" and path in IN_LAYER and path not in family.biases
    if path not in names or path in family.lacks or is_bias_of_another:
        raise not_read(header, f"has a tensor '{tensor.name}'")
    if path in SHARED and 0 < fields["num_hidden_layers"] - int(number) <= fields.get("num_kv_shared_layers", 0):
        return  # of a layer that takes them from another; such weights are published and never used
    module = start + names[path]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    num_heads = fields[heads[path]] if family.rotates_neighbours and path in heads else 0
    if num_heads and tensor.shape[0] % (2 * num_heads):
        raise not_read(header, f"has '{tensor.name}' with {tensor.shape[0]} rows for {num_heads} heads")
    if path in EXPERTS and len(tensor.shape) == NUM_EXPERT_DIMENSIONS:
        yield from experts(f"{start}mlp.experts", EXPERTS[path], tensor)
    elif len(tensor.shape) == NUM_MATRIX_DIMENSIONS and (num_heads or not tensor.block.is_unpacked):
        yield packed(module, tensor, num_heads=num_heads)
    else:
        is_norm = path.endswith("norm") and family.norms_plus_one
        name = module if path in family.bare else f"{module}.{leaf}"
        yield unpacked(name, tensor, added=-1.0 if is_norm else 0.0, num_heads=num_heads)
