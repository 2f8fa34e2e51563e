"""Stream a checkpoint under a memory limit: is it exact, and within the limit? (scripts.bench.offload: how fast?)

    python -m scripts.check.stream --gib 1.1 --max-cpu-mem 512MiB

Writes a random Llama of the built-in pair's vocabulary (bf16, sharded) into --work unless it is there.
Exactness: greedy tokens against transformers' generate, both in float32. Memory: the peak of a fresh
process that decodes under the limit, less the peak of one that only imports edgespec, torch and
transformers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.generate.records import peak_resident_bytes
from edgespec.config import parse_size
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from profiles.measure import machine_facts
from scripts.situations import GIB, MIB, idle_peak_bytes, run_python

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 1536, 4096, 24, 4, 64
LAYERS_PER_SHARD = 4
PROMPT = "def read_lines(path):\n    "


def make_checkpoint(folder: Path, *, num_bytes: int) -> None:
    """A random Llama of at least `num_bytes`, written shard by shard so that it need not fit memory."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    layer_bytes = 2 * sum(rows * columns for rows, columns in shapes.values())
    num_layers = -(-num_bytes // layer_bytes)
    complete, folder = folder, folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = open_pair(None, None)
    for path in source.target.folder.glob("tokenizer*"):
        shutil.copy(path, folder)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=source.target.config.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def weights(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    shards = [
        range(first, min(first + LAYERS_PER_SHARD, num_layers)) for first in range(0, num_layers, LAYERS_PER_SHARD)
    ]
    weight_map: dict[str, str] = {}
    for number, layers in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for layer in layers:
            prefix = f"model.layers.{layer}."
            tensors |= {f"{prefix}{part}.weight": weights(*shape) for part, shape in shapes.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        if number == 1:
            tensors["model.embed_tokens.weight"] = weights(config.vocab_size, HIDDEN) * HIDDEN**0.5
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    folder.rename(complete)


def decode_and_report(arguments: argparse.Namespace) -> None:
    """In a fresh process: decode under the limit, print the tokens and the peak as JSON."""
    torch.set_num_threads(arguments.threads)
    pair = open_pair(arguments.model, arguments.draft_model)
    prompt = pair.tokenizer.encode(PROMPT)
    texts = {}
    planned = 0
    for size in (0, *arguments.sizes):
        tree = TreeSettings(policy="none") if size == 0 else TreeSettings(size=size)
        with Engine.from_pair(
            pair,
            tree=tree,
            limits=MemoryLimits(max_cpu_bytes=arguments.max_cpu_mem),
            device="cpu",
            dtype=arguments.dtype,
            context_tokens=len(prompt) + arguments.max_new_tokens,
        ) as engine:
            result = engine.generate(
                prompt, max_new_tokens=arguments.max_new_tokens, sampling=SamplingSettings(), seed=0
            )
            planned = max(planned, engine.placement.planned_bytes)
            streamed = engine.placement.num_layers - engine.placement.num_resident
        texts[size] = {"tokens": list(result.token_ids), "layers_streamed": streamed}
    print(json.dumps({"texts": texts, "peak_bytes": peak_resident_bytes(), "planned_bytes": planned}))


def greedy_tokens(arguments: argparse.Namespace) -> list[int]:
    """Transformers' own greedy decoding, resident."""
    from transformers import AutoModelForCausalLM

    pair = open_pair(arguments.model, None)
    ids = torch.tensor([pair.tokenizer.encode(PROMPT)])
    dtype = torch.float32 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=arguments.max_new_tokens,
        eos_token_id=sorted(pair.stop_tokens),
        pad_token_id=0,
    )
    return found[0, ids.shape[1] :].tolist()


def main() -> int:
    """Run both checks and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="an existing folder instead of a random one")
    parser.add_argument("-md", "--draft-model", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--gib", type=float, default=1.1, help="size of the random checkpoint")
    parser.add_argument("--work", type=Path, default=Path("random-checkpoint"))
    parser.add_argument("--max-cpu-mem", type=parse_size, default=parse_size("512MiB"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("-n", "--max-new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--decode-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model = arguments.model or arguments.work
    if arguments.decode_only:
        decode_and_report(arguments)
        return 0
    torch.set_num_threads(arguments.threads)
    if not arguments.model.exists():
        make_checkpoint(arguments.model, num_bytes=int(arguments.gib * GIB))
    files = sorted(arguments.model.glob("*.safetensors"))
    size_bytes = sum(path.stat().st_size for path in files)

    expected = greedy_tokens(arguments)
    idle_bytes = idle_peak_bytes()
    report = json.loads(run_python("-m", "scripts.check.stream", *sys.argv[1:], "--decode-only"))
    used_bytes = report["peak_bytes"] - idle_bytes
    within = used_bytes <= 1.1 * arguments.max_cpu_mem

    limit = f"limit {arguments.max_cpu_mem / MIB:.0f} MiB"
    print(f"checkpoint {size_bytes / GIB:.2f} GiB in {len(files)} files, {limit}, dtype {arguments.dtype}")
    equal = True
    for size, text in report["texts"].items():
        same = text["tokens"] == expected
        equal &= same
        name = "plain" if size == "0" else f"tree {size}"
        verdict = "equal" if same else "DIFFER"
        print(f"  {name:<9} {text['layers_streamed']} layers streamed, {len(expected)} greedy tokens {verdict}")
    print(
        f"  peak memory {used_bytes / MIB:.0f} MiB above an idle process ({idle_bytes / MIB:.0f} MiB), "
        f"planned {report['planned_bytes'] / MIB:.0f} MiB: {'within' if within else 'ABOVE'} limit + 10 %"
    )
    machine = dataclasses.asdict(machine_facts())
    print(json.dumps({"peak_above_idle_bytes": used_bytes, "equal": equal, "machine": machine}))
    return 0 if equal and within else 1


if __name__ == "__main__":
    sys.exit(main())
