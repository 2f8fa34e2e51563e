"""Experts of real sizes that come on demand give what they give on the card: gpt-oss' in MXFP4, Qwen3-30B's in bf16.

The card has room for half of them; the others are brought, or computed by the processor where they lie.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from edgespec import Engine, MemoryLimits
from edgespec.model.pass_rows import next_rows
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from scripts.gpu.card import DEVICE, half_dtype, relative_difference, seconds
from scripts.gpu.finding import Finding, judged

COMMON: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 2048, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
                "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
                "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3-30b": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 8},
}  # fmt: skip
ROWS = (1, 64, 700)
MOST_DIFFERENCE = 0.03  # of 16-bit formats


def check(*, is_full: bool) -> Finding:
    """Compare passes of one row, of a tree's and of a prompt's with those where all experts stay."""
    report = {name: compared(name) for name in SIZES}
    ok = all(
        row["difference"] <= MOST_DIFFERENCE  # not so for NaN
        for found in report.values()
        for row in found["table"]
    )
    came = all(found["asked"] > found["hits"] for found in report.values())
    return judged(ok and came, report, "hidden states differ" if came else "no expert had to come")


def compared(name: str) -> dict[str, Any]:
    """Return the differences and seconds of a mixture's passes, and the experts that were asked for."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        os.environ["EDGESPEC_CACHE"] = work
        expert_bytes = write_mixture(Path(work) / name, name)
        pair = open_pair(Path(work) / name, None)
        resident, planned_bytes, _ = passes(pair, MemoryLimits(), "resident")
        limits = MemoryLimits(max_gpu_bytes=planned_bytes - expert_bytes // 2, max_resident_layers=1)
        on_demand, _, counts = passes(pair, limits, "auto")
    table = [
        {
            "rows": rows,
            "difference": relative_difference(found, expected),
            "on_demand_ms": 1e3 * took_s,
            "resident_ms": 1e3 * resident_s,
        }
        for rows, (expected, resident_s), (found, took_s) in zip(ROWS, resident, on_demand, strict=True)
    ]
    return {"table": table, **counts}


def passes(
    pair: ModelPair, limits: MemoryLimits, experts: str
) -> tuple[list[tuple[Tensor, float]], int, dict[str, int]]:
    """Return hidden states and seconds by the number of rows, the bytes of the plan, and the experts' counts."""
    found = []
    with Engine.from_pair(
        pair, limits=limits, device="cuda", dtype=half_dtype(), experts=experts, context_tokens=max(ROWS) + 1
    ) as engine:
        model = engine.target_model
        for rows in ROWS:
            ids = torch.arange(rows, device=DEVICE) % 2000

            def one_pass(ids: Tensor = ids) -> Tensor:
                (hidden,) = model.read([next_rows(model.new_text(), ids)])
                return hidden

            found.append((one_pass().cpu(), seconds(one_pass, repeats=3)))
        return found, engine.placement.planned_bytes, dataclasses.asdict(engine._loaded.expert_counts)


def write_mixture(folder: Path, name: str) -> int:
    """Write a random mixture with the built-in tokenizer; return the bytes of its experts."""
    config = config_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Tensor] = {}
    expert_bytes = 0
    generator = torch.Generator().manual_seed(0)
    for parameter, like in model.named_parameters():
        made = stored(parameter, tuple(like.shape), name, generator)
        expert_bytes += sum(part.nbytes for part in made.values()) if ".experts." in parameter else 0
        tensors |= made
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    if name == "gpt-oss":
        path = folder / "config.json"
        stated = json.loads(path.read_text(encoding="utf-8"))
        stated["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        path.write_text(json.dumps(stated), encoding="utf-8")
    for path in (DEMO_FOLDER / "target").glob("tokenizer*"):
        shutil.copy(path, folder)
    return expert_bytes


def config_of(name: str) -> PretrainedConfig:
    """Return a mixture's configuration, in bf16."""
    kind = GptOssConfig if name == "gpt-oss" else Qwen3MoeConfig
    config = kind(**COMMON, **SIZES[name])
    config.dtype = torch.bfloat16
    return config


def stored(parameter: str, shape: tuple[int, ...], name: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random tensors of a parameter as checkpoints of the mixture hold it."""
    if name == "gpt-oss" and parameter.endswith(("gate_up_proj", "down_proj")):
        experts, columns, rows = shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.full((experts, rows, columns // 32), 120, dtype=torch.uint8)  # 2^-7
        return {f"{parameter}_blocks": blocks, f"{parameter}_scales": scales}
    if len(shape) == 1 and "norm" in parameter:
        return {parameter: torch.ones(shape, dtype=torch.bfloat16)}
    weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5, generator=generator)
    if not parameter.endswith(("gate_up_proj", "down_proj")) or ".experts." not in parameter:
        return {parameter: weight}
    owner, _, leaf = parameter.rpartition(".")  # each expert's matrices by themselves
    halves = {"gate_proj": 0, "up_proj": 1} if leaf == "gate_up_proj" else {"down_proj": 0}
    return {
        f"{owner}.{expert}.{part}.weight": matrix.chunk(len(halves))[half].contiguous()
        for expert, matrix in enumerate(weight)
        for part, half in halves.items()
    }
