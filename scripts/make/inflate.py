"""Write a large checkpoint that computes the same function as a small Llama, or a small Qwen3.5 with recurrent layers.

    python -m scripts.make.inflate OUT --params 1B                    a shape of about that size
    python -m scripts.make.inflate OUT --hidden 1024 --layers 24      a shape of your own
    python -m scripts.make.inflate OUT --check                        only check a folder that is there
    python -m scripts.make.inflate OUT --drafts EAGLE3 DFLASH2        its drafts: OUT-EAGLE3 and OUT-DFLASH2

For benchmarks at real sizes without real checkpoints: real bytes, real arithmetic, the acceptance rates of
the small model. Added layers write nothing: their output projections are zero. Added width repeats the hidden
state, which leaves its root mean square as it is, and the norms hide the repetitions: their added weights are
zero. Added heads and inner units, and what reads added width, are random weights that change nothing. No weight
is rounded, but to --dtype. --check compares logits with the source's in float32, streamed by accelerate; it
exits 1 where they differ. A source may be a GLM-4.5 of dense layers, and have a layer of multi-token prediction.

--drafts are EAGLE-3 heads, DFlash, DSpark and DFlash2 drafters of the source, as scripts.papers.train_published_drafts
makes them: their layers become as wide as the target's, and guess the same.
"""

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
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from edgespec.cli.prompts.read import read_prompts
from edgespec.config import parse_size
from edgespec.machine.device import DTYPES
from edgespec.pair.folder import ModelFolder, open_model
from edgespec.pair.pair import DEMO_FOLDER
from scripts.make.inflated_drafts import Sizes, check_sizes, draft_part, inflated_config, own_layer_parts
from scripts.make.inflated_parts import (
    NORM_ZEROS,
    Part,
    Shape,
    layer_kinds,
    layer_places,
    list_parts,
    make_tensor,
    shape_of,
)
from scripts.situations import exit_with

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


def choose_shape(source: ModelFolder, num_parameters: int) -> Shape:
    """A shape of about `num_parameters`, as deep as real models of that size are.

    The width is the source's times a power of four; the inner size takes up what such a width misses.
    """
    small, config = shape_of(source), source.config
    typical = LAYER_PARAMETERS_PER_SQUARED_HIDDEN
    layers = max(small.layers, round((num_parameters / (typical * TYPICAL_HIDDEN_PER_LAYER**2)) ** (1 / 3)))
    typical_hidden = math.sqrt(num_parameters / layers / typical)
    hidden = small.hidden * nearest_power(4, typical_hidden / small.hidden)
    layer_parameters = (num_parameters - config.vocab_size * hidden) / layers
    group = small.group * nearest_power(2, TYPICAL_GROUP / small.group)
    head_parameters = 2 * hidden * config.head_dim  # a query head has rows and columns, a key head keys and values
    # A quarter of the layer; a power of two, because transformers wants the heads to divide the width.
    factor = nearest_power(2, layer_parameters / 4 / head_parameters / (group + 1) / small.kv_heads)
    shape = Shape(
        hidden=hidden,
        layers=layers,
        heads=group * small.kv_heads * factor,
        kv_heads=small.kv_heads * factor,
        inner=small.inner,
        linear_heads=small.linear_heads * factor,
    )
    missing = (num_parameters - count_parameters(list_parts(source, shape))) / (3 * hidden * layers)
    return replace(shape, inner=max(small.inner, INNER_STEP * round((small.inner + missing) / INNER_STEP)))


def nearest_power(base: int, ratio: float) -> int:
    """The power of the base, 1 or more, that is nearest to a ratio."""
    return int(base ** max(0, round(math.log(max(ratio, 1), base))))


def check_shape(small: Shape, large: Shape) -> None:
    """Raise ValueError where the large shape cannot hold the small one."""
    for name, theirs in asdict(small).items():
        ours = getattr(large, name)
        if ours < theirs:
            raise ValueError(f"--{name.replace('_', '-')} {ours} is below the source's {theirs}")
    if large.hidden % small.hidden:
        raise ValueError(f"--hidden {large.hidden} is no multiple of the source's {small.hidden}")
    if large.heads % large.kv_heads or large.hidden % large.heads:
        raise ValueError(
            f"--kv-heads {large.kv_heads}, --heads {large.heads}, --hidden {large.hidden}: each must divide the next"
        )
    if large.group < small.group:
        raise ValueError(
            f"--heads {large.heads} on --kv-heads {large.kv_heads} are {large.group} a key head; the source's "
            f"{small.group} have to stay together: raise --heads or lower --kv-heads"
        )


def count_parameters(parts: Sequence[Part]) -> int:
    """All values of the parts."""
    return sum(math.prod(part.shape) for part in parts)


def into_shards(parts: Sequence[Part], *, shard_values: int) -> list[list[Part]]:
    """The parts in order, as many a shard as fit; a part larger than a shard has one of its own."""
    shards: list[list[Part]] = []
    largest_tree = 0
    for part in parts:
        num_values = math.prod(part.shape)
        if not shards or num_values > largest_tree:
            shards.append([])
            largest_tree = shard_values
        shards[-1].append(part)
        largest_tree -= num_values
    return shards


def write_companions(source: ModelFolder, folder: Path, large: Shape, *, dtype: torch.dtype) -> None:
    """Config, tokenizer and generation config of the large model."""
    for path in [path for pattern in COMPANIONS for path in source.folder.glob(pattern)]:
        shutil.copy(path, folder)
    config = copy.deepcopy(source.config)
    config.hidden_size, config.intermediate_size = large.hidden, large.inner
    config.num_hidden_layers = large.layers
    config.num_attention_heads, config.num_key_value_heads = large.heads, large.kv_heads
    if large.linear_heads:
        config.layer_types = layer_kinds(source, large)
        values_a_key = config.linear_num_value_heads // config.linear_num_key_heads
        config.linear_num_key_heads = large.linear_heads
        config.linear_num_value_heads = values_a_key * large.linear_heads
    if dense := getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = dense + large.layers - source.config.num_hidden_layers
        config.moe_intermediate_size = config.moe_intermediate_size * large.inner // source.config.intermediate_size
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
    norm_zero = NORM_ZEROS[source.config.model_type]
    generator = torch.Generator().manual_seed(seed)
    parts = [*list_parts(source, large), *own_layer_parts(source, large)]
    shards = into_shards(parts, shard_values=shard_bytes // dtype.itemsize)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for part in shard:
            old = read_tensor(source, part.old_name) if part.old_name else None
            tensors[part.name] = stored_as(make_tensor(part, old, norm_zero=norm_zero, generator=generator), dtype)
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


def stored_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as files have it: numbers in this dtype, ids as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def inflate_draft(
    draft: Path, source: ModelFolder, large: Shape, folder: Path, *, dtype: torch.dtype, seed: int = 0
) -> int:
    """Write the folder of a draft of the large model; returns its parameters. Raises ValueError for other drafts."""
    stated = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    small = shape_of(source)
    check_sizes(stated, small)
    config = inflated_config(stated, large, layer_places(source, large))
    group = stated.get("dflash_config", {}).get("conv_group_size", small.hidden)
    sizes = Sizes(small=small, large=large, head_dim=stated["head_dim"], num_groups=small.hidden // group)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, old in load_file(draft / "model.safetensors").items():
        part = draft_part(name, name, old.shape, sizes)
        made = make_tensor(part, old, norm_zero=NORM_ZEROS["llama"], generator=generator)
        tensors[name] = stored_as(made, dtype)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())


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
    stored, wanted = open_model(folder).config.dtype, source.config.dtype
    if stored in (torch.float32, wanted):
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
    if config.model_type not in NORM_ZEROS or config.attention_bias or getattr(config, "mlp_bias", False):
        raise ValueError(f"'{source.folder}' is no Llama or Qwen3.5 without biases: its parts are not known here")
    given = {name: value for name in asdict(small) if (value := getattr(arguments, name)) is not None}
    if (arguments.params is None) == (not given):
        raise ValueError("give either --params or sizes such as --hidden and --layers")
    large = replace(small, **given)
    if arguments.params is not None:
        large = choose_shape(source, arguments.params)
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
    parser.add_argument(
        "--source", type=Path, default=DEMO_FOLDER / "target", help="a Llama or Qwen3.5; the built-in target"
    )
    parser.add_argument("--drafts", type=Path, nargs="+", default=[], help="of the source, to be written beside OUT")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare logits with the source's")
    arguments = parser.parse_args(given)
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of every layer on disk

    source = open_model(arguments.source)
    sizes = [getattr(arguments, name) for name in ("params", *Shape.__dataclass_fields__)]
    dtype = DTYPES[arguments.dtype]
    adds = arguments.check or arguments.drafts
    if not (adds and arguments.folder.exists() and sizes == [None] * len(sizes)):
        try:
            large = wanted_shape(source, arguments)
        except ValueError as error:
            parser.error(str(error))
        num_parameters = inflate(
            source, arguments.folder, large, dtype=dtype, shard_bytes=arguments.shard_size, seed=arguments.seed
        )
        size = f"{num_parameters / 1e9:.3f} B parameters, {num_parameters * dtype.itemsize / 2**30:.2f} GiB"
        print(f"{arguments.folder}: {large}, {size}")
    for draft in arguments.drafts:
        folder = arguments.folder.with_name(f"{arguments.folder.name}-{draft.name}")
        try:
            num_parameters = inflate_draft(draft, source, shape_of(open_model(arguments.folder)), folder, dtype=dtype)
        except ValueError as error:
            parser.error(f"{draft}: {error}")
        print(f"{folder}: {num_parameters / 1e6:.1f} M parameters")
    return check(source, arguments.folder) if arguments.check else 0


if __name__ == "__main__":
    exit_with(main)
