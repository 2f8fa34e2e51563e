"""Write a mixture of experts for benchmarks: one that computes what a small Llama does, or a random one.

    python -m scripts.make.inflate_experts OUT                     the built-in target as 4 of 128 experts, 1.13 GiB
    python -m scripts.make.inflate_experts OUT --spread 0.9        ... whose rows choose more independently
    python -m scripts.make.inflate_experts OUT --random          a Qwen3-MoE of random weights, 4 of 64 experts, 1.6 GiB

The mixture is a Mixtral. Every expert of a layer is a copy of the source's own network, and a row's weights sum to 1,
so that logits, and the acceptance of drafts, are the source's whatever the router says. The router says what real
ones do. It looks at the hidden state in directions that the source's own held-out text shows: those that change
slowly from token to token weigh more, by a power of their correlation over the next four tokens, until the rows of
such text ask for as many experts as rows^spread independent ones (profiles/experts.py; 0.75 unless told, as published
models are between 0.65 and 0.9). Popular experts come from a normal bias of --skew standard deviations of the logits,
along the mean hidden state. What is stored has a tensor for all experts, as gpt-oss publishes; --separate stores a
tensor for each expert, as Mixtral does.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from edgespec.machine.device import DTYPES
from edgespec.pair.folder import ModelFolder, open_model
from edgespec.pair.pair import DEMO_FOLDER
from offload.skeleton import build_on_meta
from scripts.make.expert_spread import fit_spread
from scripts.make.inflate import COMPANIONS, check_shape, compare, read_tensor
from scripts.make.inflated_parts import NORM_ZEROS, Shape, list_parts, make_tensor, shape_of
from scripts.situations import cut_texts, held_out_halves

Tensors = Iterator[tuple[str, Tensor]]
LAGS = (1, 2, 3, 4)
WINDOWS = (2, 4, 8, 16, 32)  # rows of a text whose experts are counted
MAX_SLOWNESS = 16.0
HALVINGS = 10
FLOOR = 1e-3  # of the largest variance: directions below it are noise
CALIBRATION_TEXTS, CALIBRATION_TOKENS = 32, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of every layer, and how the router chooses."""

    num_experts: int
    chosen: int
    spread: float
    skew: float


@torch.no_grad()
def inner_states(source: ModelFolder, ids: Tensor) -> list[Tensor]:
    """What each layer's network sees of texts [texts, tokens], in float32: a [texts, tokens, hidden] a layer."""
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _module, arguments: found.append(arguments[0].clone()))
    model(input_ids=ids, use_cache=False)
    return found


def slow_directions(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Directions of unit variance [hidden, directions], their correlations over the next tokens, and the mean."""
    flat = states.flatten(0, 1).double()
    mean = flat.mean(0)
    variances, axes = torch.linalg.eigh(torch.cov(flat.T))
    kept = variances > FLOOR * variances.max()
    white = axes[:, kept] / variances[kept].sqrt()
    seen = (states.double() - mean) @ white  # [texts, tokens, directions]
    products = [torch.einsum("btd,bte->de", seen[:, :-lag], seen[:, lag:]) / seen[:, lag:, 0].numel() for lag in LAGS]
    lagged = torch.stack(products).mean(0)
    correlations, turned = torch.linalg.eigh((lagged + lagged.T) / 2)
    return white @ turned, correlations, mean


def make_router(states: Tensor, mixture: Mixture, *, slowness: float, seed: int) -> Tensor:
    """The router's weights [experts, hidden] for what a layer's network sees."""
    generator = torch.Generator().manual_seed(seed)
    directions, correlations, mean = slow_directions(states)
    weights = correlations.clamp(min=1e-6) ** slowness
    mix = torch.randn(mixture.num_experts, len(weights), generator=generator, dtype=torch.float64)
    router = (mix * weights / weights.square().sum().sqrt()) @ directions.T  # logits of standard deviation 1
    bias = mixture.skew * torch.randn(mixture.num_experts, generator=generator, dtype=torch.float64)
    # The vector that is constant over states, as nearly as there is one: it turns the bias into weights.
    steady = directions @ (directions.T @ mean)
    steady /= steady @ mean
    return router + torch.outer(bias - router @ mean, steady)


def spread_of(router: Tensor, states: Tensor, mixture: Mixture) -> float:
    """How the rows of each text spread over the experts."""
    experts = (states.double() @ router.T).topk(mixture.chosen, dim=-1).indices  # [texts, tokens, chosen]
    asked = torch.zeros(*experts.shape[:2], mixture.num_experts, dtype=torch.bool).scatter_(-1, experts, value=True)
    counts = []
    for rows in WINDOWS:
        windows = asked.unfold(1, rows, rows).any(-1)  # [texts, windows, experts]
        counts.append((float(rows), float(windows.sum(-1).double().mean())))
    return fit_spread(counts, num_experts=mixture.num_experts, chosen=mixture.chosen)


def routed(states: Tensor, mixture: Mixture, *, seed: int) -> tuple[Tensor, float]:
    """The router of the wanted spread, or of the nearest that these states allow; with its spread."""
    low, high = 0.0, MAX_SLOWNESS  # the slower the directions, the less rows spread
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        spread = spread_of(make_router(states, mixture, slowness=middle, seed=seed), states, mixture)
        low, high = (middle, high) if spread > mixture.spread else (low, middle)
    router = make_router(states, mixture, slowness=(low + high) / 2, seed=seed)
    return router, spread_of(router, states, mixture)


def mixtral_config(source: ModelFolder, large: Shape, mixture: Mixture, *, dtype: torch.dtype) -> MixtralConfig:
    """A Mixtral around the source's attention."""
    config = source.config
    found = MixtralConfig(
        **{name: getattr(config, name) for name in (
            "vocab_size", "head_dim", "hidden_act", "max_position_embeddings", "rope_parameters",
            "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
        )},
        hidden_size=large.hidden, intermediate_size=large.inner, num_hidden_layers=large.layers,
        num_attention_heads=large.heads, num_key_value_heads=large.kv_heads,
        rms_norm_eps=config.rms_norm_eps,
        num_local_experts=mixture.num_experts, num_experts_per_tok=mixture.chosen,
    )  # fmt: skip
    found.dtype, found.architectures = dtype, ["MixtralForCausalLM"]
    return found


def mixture_tensors(source: ModelFolder, large: Shape, mixture: Mixture, *, seed: int, separate: bool) -> Tensors:
    """The tensors in the order of a pass: the source's, its networks copied into every expert, and the routers."""
    generator = torch.Generator().manual_seed(seed)
    states = inner_states(source, calibration_ids(source))
    spreads = []
    networks: dict[str, Tensor] = {}
    for part in list_parts(source, large):
        layer, _, name = part.name.removeprefix("model.layers.").partition(".mlp.")
        old = read_tensor(source, part.old_name) if part.old_name else None
        tensor = make_tensor(part, old, norm_zero=NORM_ZEROS["llama"], generator=generator)
        if not name:
            yield part.name, tensor
            continue
        networks[name.removesuffix("_proj.weight")] = tensor
        if name != "down_proj.weight":  # the last of three
            continue
        router, spread = routed(states[int(layer)], mixture, seed=seed + int(layer))
        spreads.append(spread)
        wide = torch.zeros(mixture.num_experts, large.hidden)
        wide[:, : router.shape[1]] = router.float()
        yield from layer_tensors(f"model.layers.{layer}", networks, wide, separate=separate)
        networks = {}
    print(f"spread of the rows of held-out text: {', '.join(f'{one:.2f}' for one in spreads)}", file=sys.stderr)


def layer_tensors(prefix: str, networks: dict[str, Tensor], router: Tensor, *, separate: bool) -> Tensors:
    """A layer's router and its experts, all of them the same network."""
    num_experts = len(router)
    if separate:
        yield f"{prefix}.block_sparse_moe.gate.weight", router
        for expert in range(num_experts):
            for name, network in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                yield f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight", networks[network]
        return
    yield f"{prefix}.mlp.gate.weight", router
    both = torch.cat([networks["gate"], networks["up"]])
    yield f"{prefix}.mlp.experts.gate_up_proj", both.expand(num_experts, *both.shape)
    yield f"{prefix}.mlp.experts.down_proj", networks["down"].expand(num_experts, *networks["down"].shape)


def calibration_ids(source: ModelFolder) -> Tensor:
    """Held-out text of the standard library, as the source reads it [texts, tokens]."""
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    texts = cut_texts(held_out_halves()[0], count=CALIBRATION_TEXTS, tokens=CALIBRATION_TOKENS, seed=11)
    rows = [tokenizer.encode(text) for text in texts]
    length = min(CALIBRATION_TOKENS, *map(len, rows))
    return torch.tensor([row[:length] for row in rows])


def random_config(source: ModelFolder, arguments: argparse.Namespace) -> Qwen3MoeConfig:
    """A Qwen3-MoE with the source's vocabulary."""
    config = Qwen3MoeConfig(
        vocab_size=source.config.vocab_size, hidden_size=arguments.hidden or 1024,
        moe_intermediate_size=arguments.inner or 512, intermediate_size=arguments.inner or 512, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=arguments.experts or 64,
        num_experts_per_tok=arguments.chosen, norm_topk_prob=True, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=source.config.eos_token_id, pad_token_id=source.config.pad_token_id,
    )  # fmt: skip
    config.dtype, config.architectures = DTYPES[arguments.dtype], ["Qwen3MoeForCausalLM"]
    return config


def random_tensors(config: PretrainedConfig, *, seed: int) -> Tensors:
    """Random weights of such a size that hidden states stay as large as they are; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in build_on_meta(config, "random", dtype=torch.float32).named_parameters():
        if parameter.dim() == 1:
            yield name, torch.ones(parameter.shape)
        else:
            yield name, torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5


def write(folder: Path, config: PretrainedConfig, tensors: Tensors, *, source: ModelFolder, dtype: torch.dtype) -> int:
    """Write the folder, a file for about 512 MiB; it takes its name when it is whole. Returns its bytes."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in [path for pattern in COMPANIONS for path in source.folder.glob(pattern)]:
        shutil.copy(path, partial)
    config.save_pretrained(partial)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = num_shards = 0

    def flush() -> None:
        nonlocal num_shards, shard
        num_shards += 1
        save_file(shard, partial / f"model-{num_shards:05d}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, f"model-{num_shards:05d}.safetensors"))
        shard = {}

    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.numel() * dtype.itemsize > 1 << 29:
            flush()
        shard[name] = tensor.to(dtype).contiguous().clone()
        total += shard[name].nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return total


def main(given: Sequence[str] | None = None) -> int:
    """Write one, and say how it compares with its source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--random", action="store_true", help="a Qwen3-MoE of random weights")
    parser.add_argument("--experts", type=int, help="of a layer; 128, or 64 random ones")
    parser.add_argument("--chosen", type=int, default=4, help="by a row")
    parser.add_argument("--spread", type=float, default=0.75, help="of a text's rows over experts; 1 is independent")
    parser.add_argument("--skew", type=float, default=0.3, help="of the popularity of experts")
    for name in ("--hidden", "--inner"):
        parser.add_argument(name, type=int, help="width of hidden states, or inside an expert")
    parser.add_argument("--separate", action="store_true", help="a tensor for each expert")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", type=Path, default=DEMO_FOLDER / "target", help="a Llama; the built-in target")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare logits with the source's")
    arguments = parser.parse_args(given)
    transformers_logging.disable_progress_bar()
    folder, dtype = arguments.folder, DTYPES[arguments.dtype]
    if folder.exists() and not (arguments.overwrite and (folder / "config.json").exists()):
        parser.error(f"'{folder}' exists, or is no checkpoint: --overwrite replaces one")
    source = open_model(arguments.source)
    if arguments.random:
        config: PretrainedConfig = random_config(source, arguments)
        tensors = random_tensors(config, seed=arguments.seed)
    else:
        small = shape_of(source)
        large = replace(small, hidden=arguments.hidden or small.hidden, inner=arguments.inner or small.inner)
        mixture = Mixture(num_experts=arguments.experts or 128, chosen=arguments.chosen, spread=arguments.spread,
                          skew=arguments.skew)  # fmt: skip
        try:
            check_shape(small, large)
        except ValueError as error:
            parser.error(str(error))
        config = mixtral_config(source, large, mixture, dtype=dtype)
        tensors = mixture_tensors(source, large, mixture, seed=arguments.seed, separate=arguments.separate)
    num_bytes = write(folder, config, tensors, source=source, dtype=dtype)
    print(f"{folder}: {config.model_type}, {num_bytes / 2**30:.2f} GiB")
    if arguments.check and not arguments.random:
        difference, equal_share = compare(source, folder)
        print(f"largest logit difference {difference:.2e} in float32, {equal_share:.1%} of argmaxes equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
