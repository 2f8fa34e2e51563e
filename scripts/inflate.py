"""Write a large checkpoint that computes the same function as a small Llama.

    python scripts/inflate.py OUT --params 1B                    a shape of about that size
    python scripts/inflate.py OUT --hidden 1024 --layers 24      a shape of your own
    python scripts/inflate.py OUT --check                        only check a folder that is there

For benchmarks at real sizes without real checkpoints: real bytes, real arithmetic, the acceptance rates of
the small model. Added layers write nothing: their output projections are zero. Added width carries zeros.
Added heads and inner units compute on random weights, and nobody reads them. Zeros make the root mean
square of RMSNorm smaller by sqrt(small / large width): norm weights shrink by that, eps by its square.
bf16 holds the factor exactly where it is a power of two, which --params sees to. --check compares logits
with the source's in float32, streamed by accelerate; it exits 1 where exact weights differ in them.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from edgespec import EdgespecError
from edgespec.cli.prompts.read import read_prompts
from edgespec.config import parse_size
from edgespec.model.device import DTYPES
from edgespec.pair.folder import ModelFolder, open_model
from edgespec.pair.pair import DEMO_FOLDER

COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
TYPICAL_GROUP = 4  # query heads that share a key head, as in Llama 3
TYPICAL_HIDDEN_PER_LAYER = 128  # hidden size over number of layers, from 1B to 70B
LAYER_PARAMETERS_PER_SQUARED_HIDDEN = 12  # of a typical layer
COUNT_TOLERANCE = 0.05  # of what --params asks for
INNER_STEP = 64  # inner sizes that --params chooses are multiples of it
CHECK_TOKENS = 48  # of each sample prompt
CHECK_TOLERANCE = 1e-3  # of logits, where the inflated weights are exact
COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")
RESIDENT = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")

Role = Literal["reads", "writes", "norm"]  # what a tensor does with the hidden state


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama that inflating can change."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

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
    places: Tensor  # where the old rows ("reads"), columns ("writes") or values ("norm") go


def shape_of(model: ModelFolder) -> Shape:
    """The shape that a folder's config names."""
    config = model.config
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        inner=config.intermediate_size,
    )


def choose_shape(small: Shape, num_parameters: int, *, vocab: int, head_dim: int) -> Shape:
    """A shape of about `num_parameters`, as deep as real models of that size are.

    The width is the source's times a power of four, so that the norms' factor is a power of two; the
    inner size takes up what such a width misses.
    """
    typical = LAYER_PARAMETERS_PER_SQUARED_HIDDEN
    layers = max(small.layers, round((num_parameters / (typical * TYPICAL_HIDDEN_PER_LAYER**2)) ** (1 / 3)))
    typical_hidden = math.sqrt(num_parameters / layers / typical)
    hidden = small.hidden * nearest_power(4, typical_hidden / small.hidden)
    layer_parameters = (num_parameters - vocab * hidden) / layers
    group = small.group * nearest_power(2, TYPICAL_GROUP / small.group)
    head_parameters = 2 * hidden * head_dim  # a query head has rows and columns, a key head keys and values
    # A quarter of the layer; a power of two, because transformers wants the heads to divide the width.
    kv_heads = small.kv_heads * nearest_power(2, layer_parameters / 4 / head_parameters / (group + 1) / small.kv_heads)
    inner = (layer_parameters - kv_heads * (group + 1) * head_parameters) / (3 * hidden)
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        inner=max(small.inner, INNER_STEP * round(inner / INNER_STEP)),
    )


def nearest_power(base: int, ratio: float) -> int:
    """The power of the base, 1 or more, that is nearest to a ratio."""
    return int(base ** max(0, round(math.log(max(ratio, 1), base))))


def check_shape(small: Shape, large: Shape) -> None:
    """Raise ValueError where the large shape cannot hold the small one."""
    for name, theirs in asdict(small).items():
        ours = getattr(large, name)
        if ours < theirs:
            raise ValueError(f"--{name.replace('_', '-')} {ours} is below the source's {theirs}")
    if large.heads % large.kv_heads or large.hidden % large.heads:
        raise ValueError(
            f"--kv-heads {large.kv_heads}, --heads {large.heads}, --hidden {large.hidden}: each must divide the next"
        )
    if large.group < small.group:
        raise ValueError(
            f"--heads {large.heads} on --kv-heads {large.kv_heads} are {large.group} a key head; the source's "
            f"{small.group} have to stay together: raise --heads or lower --kv-heads"
        )


def norm_factor(small: Shape, large: Shape) -> float:
    """What zeros in the added width make of a root mean square."""
    return math.sqrt(small.hidden / large.hidden)


def query_places(small: Shape, large: Shape, head_dim: int) -> Tensor:
    """Rows for the source's query rows: each group stands at the start of its larger group."""
    heads = torch.arange(small.heads)
    places = heads // small.group * large.group + heads % small.group
    return (places[:, None] * head_dim + torch.arange(head_dim)).flatten()


def list_parts(source: ModelFolder, large: Shape) -> list[Part]:
    """All tensors of the large model, in the order of a pass; the source's layers are spread evenly."""
    small, vocab, head_dim = shape_of(source), source.config.vocab_size, source.config.head_dim
    width, inner = torch.arange(small.hidden), torch.arange(small.inner)
    queries, keys = query_places(small, large, head_dim), torch.arange(small.kv_heads * head_dim)
    num_queries, num_keys = large.heads * head_dim, large.kv_heads * head_dim
    of_layer: tuple[tuple[str, Role, tuple[int, ...], Tensor], ...] = (
        ("input_layernorm", "norm", (large.hidden,), width),
        ("self_attn.q_proj", "reads", (num_queries, large.hidden), queries),
        ("self_attn.k_proj", "reads", (num_keys, large.hidden), keys),
        ("self_attn.v_proj", "reads", (num_keys, large.hidden), keys),
        ("self_attn.o_proj", "writes", (large.hidden, num_queries), queries),
        ("post_attention_layernorm", "norm", (large.hidden,), width),
        ("mlp.gate_proj", "reads", (large.inner, large.hidden), inner),
        ("mlp.up_proj", "reads", (large.inner, large.hidden), inner),
        ("mlp.down_proj", "writes", (large.hidden, large.inner), inner),
    )
    # Rows of the embedding become hidden states; as a tied head, it meets zeros in the added width.
    parts = [Part("model.embed_tokens.weight", "model.embed_tokens.weight", "writes", (vocab, large.hidden), width)]
    source_layer = {index * large.layers // small.layers: index for index in range(small.layers)}
    for layer in range(large.layers):
        old = f"model.layers.{source_layer[layer]}." if layer in source_layer else None
        parts += [
            Part(f"model.layers.{layer}.{name}.weight", old and f"{old}{name}.weight", role, shape, places)
            for name, role, shape, places in of_layer
        ]
    parts.append(Part("model.norm.weight", "model.norm.weight", "norm", (large.hidden,), width))
    if not source.config.tie_word_embeddings:
        parts.append(Part("lm_head.weight", "lm_head.weight", "reads", (vocab, large.hidden), torch.arange(vocab)))
    return parts


def make_tensor(part: Part, old: Tensor | None, *, factor: float, generator: torch.Generator) -> Tensor:
    """The part in float32: the old values in their places, around them what changes nothing."""
    if part.role == "norm":
        wide = 1 + 0.1 * torch.randn(part.shape, generator=generator)
        if old is not None:
            wide[part.places] = old.float() * factor
    elif part.role == "reads":  # all that it would read in the added width is zero
        wide = torch.randn(part.shape, generator=generator) * part.shape[1] ** -0.5
        if old is not None:
            wide[part.places, : old.shape[1]] = old.float()
    else:
        wide = torch.zeros(part.shape)
        if old is not None:
            wide[: old.shape[0], part.places] = old.float()
    return wide


def count_parameters(parts: Sequence[Part]) -> int:
    """All values of the parts."""
    return sum(math.prod(part.shape) for part in parts)


def into_shards(parts: Sequence[Part], *, shard_values: int) -> list[list[Part]]:
    """The parts in order, as many a shard as fit; a part larger than a shard has one of its own."""
    shards: list[list[Part]] = []
    room = 0
    for part in parts:
        num_values = math.prod(part.shape)
        if not shards or num_values > room:
            shards.append([])
            room = shard_values
        shards[-1].append(part)
        room -= num_values
    return shards


def write_companions(source: ModelFolder, folder: Path, large: Shape, *, dtype: torch.dtype) -> None:
    """Config, tokenizer and generation config of the large model."""
    for path in [path for pattern in COMPANIONS for path in source.folder.glob(pattern)]:
        shutil.copy(path, folder)
    config = copy.deepcopy(source.config)
    config.hidden_size, config.intermediate_size = large.hidden, large.inner
    config.num_hidden_layers = large.layers
    config.num_attention_heads, config.num_key_value_heads = large.heads, large.kv_heads
    config.rms_norm_eps *= norm_factor(shape_of(source), large) ** 2
    config.dtype = dtype
    config.save_pretrained(folder)


def inflate(
    source: ModelFolder, folder: Path, large: Shape, *, dtype: torch.dtype, shard_bytes: int = 1 << 29, seed: int = 0
) -> int:
    """Write the folder, a shard at a time; it takes its name when it is whole. Returns its parameters."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_companions(source, partial, large, dtype=dtype)
    factor = norm_factor(shape_of(source), large)
    generator = torch.Generator().manual_seed(seed)
    parts = list_parts(source, large)
    shards = into_shards(parts, shard_values=shard_bytes // dtype.itemsize)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for part in shard:
            old = read_tensor(source, part.old_name) if part.old_name else None
            tensors[part.name] = make_tensor(part, old, factor=factor, generator=generator).to(dtype)
        save_file(tensors, partial / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        print(f"shard {number} of {len(shards)}", file=sys.stderr)
    num_parameters = count_parameters(parts)
    index = {"metadata": {"total_size": num_parameters * dtype.itemsize}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return num_parameters


def read_tensor(source: ModelFolder, name: str) -> Tensor:
    """One tensor of the source."""
    with safe_open(source.checkpoint.tensors[name].file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@torch.no_grad()
def logits_of(folder: Path, ids: Tensor) -> Tensor:
    """Logits of ids [prompts, tokens] in float32, one matrix in memory at a time: [prompts, tokens, vocab]."""
    with tempfile.TemporaryDirectory() as unused:  # asked for, though safetensors are read where they are
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map={**dict.fromkeys(RESIDENT, "cpu"), "model.layers": "disk"},
            offload_folder=unused,
        )
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def compare(source: ModelFolder, folder: Path) -> tuple[float, float]:
    """Over sample prompts: the largest difference of logits, and the share of equal argmaxes."""
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    prompts = [tokenizer.encode(row.prompt) for row in read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)]
    length = min(CHECK_TOKENS, *map(len, prompts))
    ids = torch.tensor([prompt[:length] for prompt in prompts])
    ours, theirs = logits_of(folder, ids), logits_of(source.folder, ids)
    return float((ours - theirs).abs().max()), float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())


def check(source: ModelFolder, folder: Path) -> int:
    """Print the comparison; 1 when weights that are exact give other logits."""
    difference, equal_share = compare(source, folder)
    print(f"largest logit difference {difference:.2e} in float32, {equal_share:.1%} of argmaxes equal")
    inflated = open_model(folder)
    mantissa, _ = math.frexp(norm_factor(shape_of(source), shape_of(inflated)))
    stored, wanted = inflated.config.dtype, source.config.dtype
    if stored == torch.float32 or (stored == wanted and mantissa == 0.5):
        return int(difference > CHECK_TOLERANCE)
    print(f"the weights are rounded to {stored}: no exact copy to expect")
    return 0


def parse_count(text: str) -> int:
    """Parameters of '1B', '350M' or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no count like 1B or 350M")
    return int(float(match[1]) * COUNTS[match[2]])


def wanted_shape(source: ModelFolder, arguments: argparse.Namespace) -> Shape:
    """The shape that the options ask for; raises ValueError where it or its place is impossible."""
    folder, small, config = arguments.folder, shape_of(source), source.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"'{source.folder}' is no Llama without biases: its parts are not known here")
    given = {name: value for name in asdict(small) if (value := getattr(arguments, name)) is not None}
    if (arguments.params is None) == (not given):
        raise ValueError("give either --params or sizes such as --hidden and --layers")
    large = replace(small, **given)
    if arguments.params is not None:
        large = choose_shape(small, arguments.params, vocab=config.vocab_size, head_dim=config.head_dim)
        num_parameters = count_parameters(list_parts(source, large))
        if abs(num_parameters / arguments.params - 1) > COUNT_TOLERANCE:
            raise ValueError(f"no shape of --params {arguments.params} holds the source; {num_parameters} would")
    check_shape(small, large)
    if folder.exists() and not arguments.overwrite:
        raise ValueError(f"'{folder}' exists: --overwrite replaces it, --check alone checks it")
    if folder.exists() and (folder.samefile(source.folder) or not (folder / "config.json").exists()):
        raise ValueError(f"'{folder}' is the source, or no checkpoint: it is not replaced")
    return large


def main(given: Sequence[str] | None = None) -> int:
    """Write, check, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--params", type=parse_count, help="choose a shape of about 1B, 350M, ... parameters")
    for name in Shape.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="the source's unless told")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--shard-size", type=parse_size, default="512MiB")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights that nobody reads")
    parser.add_argument("--source", type=Path, default=DEMO_FOLDER / "target", help="a Llama; the built-in target")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare logits with the source's")
    arguments = parser.parse_args(given)
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of every layer on disk

    source = open_model(arguments.source)
    sizes = [getattr(arguments, name) for name in ("params", *Shape.__dataclass_fields__)]
    if not (arguments.check and arguments.folder.exists() and sizes == [None] * len(sizes)):
        try:
            large = wanted_shape(source, arguments)
        except ValueError as error:
            parser.error(str(error))
        dtype = DTYPES[arguments.dtype]
        num_parameters = inflate(
            source, arguments.folder, large, dtype=dtype, shard_bytes=arguments.shard_size, seed=arguments.seed
        )
        size = f"{num_parameters / 1e9:.3f} B parameters, {num_parameters * dtype.itemsize / 2**30:.2f} GiB"
        print(f"{arguments.folder}: {large}, {size}")
    return check(source, arguments.folder) if arguments.check else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EdgespecError as error:
        sys.exit(f"Error: {error.what}\nTry: {error.fix}")
