"""Adapters that PEFT made, through the engine and by PEFT's own unmerged forward: logits and greedy texts.

    PYTHONPATH=FOLDER_WITH_PEFT python -m scripts.check.adapters                  all models and kinds: minutes
    PYTHONPATH=FOLDER_WITH_PEFT python -m scripts.check.adapters --only llama     one type

Tiny random models of several types, and the built-in target, have random adapters of each kind. A row says the largest
difference of logits, as a share of the largest, beside that of the base alone; packed weights are compared with PEFT on
the unpacked numbers. Each model's adapters then share passes, beside texts that have none: their texts are those that
they are alone. Exits 1 where a difference is more than the bound, or a text is another one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import edgespec
from edgespec import Engine, MemoryLimits, TreeSettings
from offload.packed_weight import weight_of
from tests.support.tiny_checkpoints import make_model, save_folder
from tests.support.tiny_configs import tiny_config

NEAR, TIMES_BASE = 2e-6, 6  # of the largest logit; a tiny model multiplies what the base alone is off by
NEW_TOKENS = 16
PROMPT = list(b"def main(arguments):\n    for ")
BUILT_IN = "built in"
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
# Of each type: the linear layers that are adapted, and the embedding
MODULES: dict[str, tuple[list[str], str]] = {
    BUILT_IN: ([*ATTENTION, *MLP], "embed_tokens"),
    "llama": ([*ATTENTION, *MLP], "embed_tokens"),
    "qwen3": ([*ATTENTION, *MLP], "embed_tokens"),
    "gemma3_text": ([*ATTENTION, *MLP], "embed_tokens"),
    "gpt2": (["c_attn", "c_proj", "c_fc"], "wte"),
    "qwen3_moe": (ATTENTION, "embed_tokens"),
    "qwen3_next": ([*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"], "embed_tokens"),
}
QUANTS = {BUILT_IN: ("int8", "int4", "nf4")}  # beside the weights as they are
NORMS = ["layernorm", "model.norm", "q_norm", "ln_f", "ln_1"]
SIZE = {"r": 4, "lora_alpha": 8}


def kinds_of(modules: list[str], table: str) -> dict[str, dict[str, Any]]:
    """The kinds of adapters of a model with these modules."""
    first, last = modules[0], modules[-1]
    return {
        "all linear layers": {**SIZE, "target_modules": modules},
        "rslora, patterns": {
            **SIZE, "target_modules": modules, "use_rslora": True, "rank_pattern": {last: 2, first: 8},
            "alpha_pattern": {rf".*\.1\..*{first}": 3, first: 5},
        },
        "embedding": {**SIZE, "target_modules": [table, first]},
        "lora_bias": {**SIZE, "target_modules": [first], "lora_bias": True},
        "dora": {**SIZE, "target_modules": [first, last], "use_dora": True},
        "norms": {**SIZE, "target_modules": [first], "modules_to_save": NORMS},
        "head": {**SIZE, "target_modules": [first], "modules_to_save": ["lm_head"]},
        "one layer": {**SIZE, "target_modules": modules, "layers_to_transform": [1]},
    }  # fmt: skip


def write(folder: Path, base: nn.Module, options: dict[str, Any], seed: int) -> None:
    """Let PEFT make and save an adapter whose second matrix is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    is_transposed = any(type(module).__name__ == "Conv1D" for module in base.modules())
    config = LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=is_transposed, **options)
    model = get_peft_model(base, config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_magnitude" in name or "modules_to_save" in name:
            parameter.data *= 1 + 0.1 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))


@torch.no_grad()
def peft_says(base: nn.Module, adapter: Path | None) -> tuple[Tensor, list[int]]:
    """The logits after the prompt, and the greedy text, by PEFT's forward; of the base without an adapter."""
    from peft import PeftModel

    model: Any = base if adapter is None else PeftModel.from_pretrained(base, adapter)  # type: ignore[arg-type]
    ids = torch.tensor([PROMPT])
    logits = model.eval()(input_ids=ids, use_cache=False).logits[0, -1]
    text = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                          max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=None)  # fmt: skip
    return logits, text[0, len(PROMPT) :].tolist()


def base_of(folder: Path, unpacked: dict[str, Tensor]) -> Any:
    """A model as transformers loads it, with the numbers that packed weights mean."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in unpacked.items():
        module: Any = model.get_submodule(name)
        module.weight.data = weight.clone()
    return model


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(name: str, room: Path) -> Iterator[bool]:
    """Print a row for each kind and place of a model; yields whether it is right."""
    modules, table = MODULES[name]
    folder = Path(edgespec.__file__).parent / "demo" / "target"
    if name != BUILT_IN:
        folder = save_folder(room / "model", make_model(tiny_config(name), is_image_text=False, seed=0))
    kinds = kinds_of(modules, table)
    for number, options in enumerate(kinds.values()):
        write(room / str(number), base_of(folder, {}), options, number)
    for quant in (None, *QUANTS.get(name, ())):
        unpacked: dict[str, Tensor] = {}
        for is_streamed in (False, True):
            place = f"{quant or 'float32'}, {'streamed' if is_streamed else 'resident'}"
            limits = MemoryLimits(max_resident_layers=0) if is_streamed else MemoryLimits()
            with Engine.from_pretrained(
                folder, draft="none", device="cpu", dtype="float32", quant=quant, limits=limits, context_tokens=128,
                parallel=len(kinds) + 1, self_check=False, tree=TreeSettings(policy="none"),
                adapters=[f"{room / str(number)}:0" for number in range(len(kinds))],
            ) as engine:  # fmt: skip
                unpacked = unpacked or _unpacked(engine)  # while the layers are there
                bases = [base_of(folder, unpacked) for _ in range(len(kinds) + 1)]
                yield from _rows(engine, bases, room, list(kinds), f"{name} | {place}")


def _unpacked(engine: Engine) -> dict[str, Tensor]:
    """The numbers that packed weights of layers mean, by module."""
    modules = engine.target_model.model.named_modules()
    return {name: weight_of(module).float() for name, module in modules if "weight_packed" in module._modules}


def _rows(engine: Engine, bases: list[Any], room: Path, kinds: list[str], label: str) -> Iterator[bool]:
    target = engine.target_model
    ids, options = torch.tensor(PROMPT), {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "eos_token_id": []}
    wanted, text = peft_says(bases[-1], None)
    of_base = off(target.read_text(target.new_text(()), ids), wanted)
    allowed, texts = max(NEAR, TIMES_BASE * of_base), [text]
    print(f"| {label} | none | {of_base:.0e} | |")
    for number, kind in enumerate(kinds):
        adapted, text = peft_says(bases[number], room / str(number))
        texts.append(text)
        found = off(target.read_text(target.new_text(((str(number), 1.0),)), ids), adapted)
        print(f"| {label} | {kind} | {found:.0e} (without it {off(wanted, adapted):.0e}) |", end=" ")
        is_right = found <= allowed
        print("|" if is_right else f"more than {allowed:.0e} |")
        yield is_right
    choices: list[Any] = [[], *([str(number)] for number in range(len(kinds)))]
    requests = [engine.request(PROMPT, adapters=choice, **options) for choice in choices]  # type: ignore[arg-type]
    results = dict(engine.generate_many(requests))
    is_equal = [list(getattr(results[number], "token_ids", ())) == text for number, text in enumerate(texts)]
    print(f"| {label} | all in one pass: {sum(is_equal)} of {len(texts)} texts equal | | |")
    yield all(is_equal)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODULES, default=list(MODULES))
    only = parser.parse_args().only
    try:
        import peft
    except ImportError:
        sys.exit("peft is needed: pip install --no-deps --target FOLDER peft, and PYTHONPATH=FOLDER.")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"peft {peft.__version__}, torch {torch.__version__}\n")
    print("| model | place | adapter | logits off by | |\n| --- | --- | --- | --- | --- |")
    found = []
    for name in only:
        with tempfile.TemporaryDirectory() as room:
            found += list(check(name, Path(room)))
    print(f"\n{sum(found)} of {len(found)} are right")
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
