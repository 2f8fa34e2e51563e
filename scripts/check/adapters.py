"""More than forty kinds of adapters through the engine, and by PEFT's own unmerged forward: logits and greedy texts.

    pip install --no-deps --target FOLDER peft gguf
    PYTHONPATH=FOLDER python -m scripts.check.adapters                  all models and kinds: minutes
    PYTHONPATH=FOLDER python -m scripts.check.adapters --only llama     one model

Each kind sets a field of an adapter's config, or several; some are written by plain code, most by PEFT. Tiny random
models of several types, and the built-in target, have all of them, resident and streamed: unpacked, quantised at load,
in AWQ's files, and in a GGUF file. A row says the largest difference of logits, as a share of the largest, over the
kinds, and which kind it is. All adapters of a place then share passes, beside a text that has none: their greedy texts
are PEFT's. Exits 1 where a difference is more than the bound, or a text is another one; with --each, says every kind.

Products with packed weights round the rows that they are given, in steps that one bit of a sum may shift: that is what
the base alone is off by from PEFT's model of the unpacked numbers. Beside packed weights PEFT's layers therefore have
the unpacked numbers, and each adds what the engine's layer lost of its own rows in that pass, and nothing else: what is
left is the adapter's part. Texts are those of the unpacked numbers alone.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import edgespec
from edgespec import Engine, MemoryLimits, TreeSettings
from offload.adapters.use import AdapterUse, rows_under_way
from offload.packed_weight import weight_of
from scripts.bench.llama_cpp import write_gguf
from scripts.make.awq import write_awq
from tests.support.adapters import write_adapter
from tests.support.tiny_checkpoints import make_model, save_folder
from tests.support.tiny_configs import tiny_config

NEAR = 2e-6  # of the largest logit
NEW_TOKENS = 12
PROMPT = list(b"def main(arguments):\n    for ")
BUILT_IN, PACKED = "built in", "built in, packed"
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
QUANTS = ("int8", "int4", "nf4", "awq", "gguf q8_0", "gguf q4_0")
Lost = tuple[Tensor, Tensor]  # of a layer's rows [n, o], and the numbers that its weight means
WHOLE_NORMS = ["layernorm", "model.norm", "q_norm", "ln_f", "ln_1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """What adapters of a type are of."""

    linear: list[str]
    table: str = "embed_tokens"
    layers: str = "layers"
    config: dict[str, Any] = field(default_factory=dict)  # that the type's tiny model has beside the usual
    has_experts: bool = False  # of all linear layers PEFT adapts their joined weights, which is refused by name


MODELS: dict[str, Modules] = {
    BUILT_IN: Modules(linear=[*ATTENTION, *MLP]),
    PACKED: Modules(linear=[*ATTENTION, *MLP]),
    "llama": Modules(linear=[*ATTENTION, *MLP], config={"attention_bias": True, "mlp_bias": True}),
    "qwen3": Modules(linear=[*ATTENTION, *MLP]),
    "gemma3_text": Modules(linear=[*ATTENTION, *MLP]),
    "gpt2": Modules(linear=["c_attn", "c_proj", "c_fc"], table="wte", layers="h"),
    "qwen3_moe": Modules(linear=ATTENTION, has_experts=True),
    "qwen3_next": Modules(linear=[*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"], has_experts=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How an adapter is made."""

    config: dict[str, Any]
    is_plain: bool = False  # written by plain code
    dtype: torch.dtype = torch.float32  # that it is stored in


def kinds_of(of: Modules) -> dict[str, Kind]:
    """The kinds of adapters of a model with these modules."""
    linear, first, last, table = of.linear, of.linear[0], of.linear[-1], of.table
    second = rf".*\.1\..*{first}"
    by_peft: dict[str, dict[str, Any]] = {
        "all linear layers": {},
        "target_modules: all-linear": {} if of.has_experts else {"target_modules": "all-linear"},
        "target_modules: an expression": {"target_modules": rf".*\.[02]\..*({first}|{last})"},
        "exclude_modules": {"exclude_modules": r".*\.1\..*"},
        "r 1": {"r": 1},
        "r 16, lora_alpha 3": {"r": 16, "lora_alpha": 3},
        "r 5": {"r": 5, "lora_alpha": 7},
        "use_rslora": {"use_rslora": True},
        "rank_pattern": {"rank_pattern": {last: 2, first: 8}},
        "alpha_pattern": {"alpha_pattern": {last: 2, first: 16}},
        "patterns that both fit": {"rank_pattern": {second: 2, first: 8}, "alpha_pattern": {second: 3, first: 5}},
        "alpha_pattern, of two that fit": {"alpha_pattern": {first: 5, second: 3}},  # PEFT sorts them as it saves
        "use_rslora, patterns": {"use_rslora": True, "rank_pattern": {first: 8}, "alpha_pattern": {second: 3}},
        "layers_to_transform": {"layers_to_transform": [1]},
        "layers_pattern": {"layers_to_transform": [0, 2], "layers_pattern": of.layers},
        "embedding": {"target_modules": [table, first]},
        "embedding alone": {"target_modules": [table]},
        "embedding, use_rslora": {"target_modules": [table, last], "use_rslora": True},
        "embedding, patterns": {"target_modules": [table], "rank_pattern": {table: 2}, "alpha_pattern": {table: 7}},
        "head": {"target_modules": [first, "lm_head"]},
        "lora_bias": {"lora_bias": True},
        "lora_bias, use_rslora": {"lora_bias": True, "use_rslora": True},
        "use_dora": {"use_dora": True},
        "use_dora, use_rslora": {"use_dora": True, "use_rslora": True, "target_modules": [first]},
        "use_dora, patterns": {"use_dora": True, "rank_pattern": {first: 2}, "alpha_pattern": {last: 3}},
        "use_dora, embedding": {"use_dora": True, "target_modules": [table, last]},
        "use_dora, head": {"use_dora": True, "target_modules": [first, "lm_head"]},
        "modules_to_save: norms": {"target_modules": [first], "modules_to_save": WHOLE_NORMS},
        "modules_to_save: head": {"target_modules": [first], "modules_to_save": ["lm_head"]},
        "modules_to_save: table": {"target_modules": [first], "modules_to_save": [table]},
        "modules_to_save: a layer": {"target_modules": [first], "modules_to_save": [last]},
        "bias: all": {"bias": "all"},
        "bias: lora_only": {"bias": "lora_only", "target_modules": [first]},
        "init_lora_weights: gaussian": {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        "init_lora_weights: false": {"init_lora_weights": False, "inference_mode": True, "revision": "v1"},
        "ensure_weight_tying, no table": {"ensure_weight_tying": True},
    }
    plain: dict[str, dict[str, Any]] = {
        "plain code: all": {},
        "plain code: rslora, patterns": {"use_rslora": True, "rank_pattern": {last: 2}, "alpha_pattern": {first: 5}},
        "plain code: embedding": {"target_modules": [table, first]},
        "plain code: lora_bias": {"lora_bias": True},
        "plain code: dora": {"use_dora": True, "target_modules": [table, first]},
    }
    size = {"r": 4, "lora_alpha": 8, "target_modules": linear}
    return {
        **{name: Kind(config={**size, **config}) for name, config in by_peft.items()},
        "stored in bfloat16": Kind(config=size, dtype=torch.bfloat16),
        "stored in float16": Kind(config={**size, "use_rslora": True}, dtype=torch.float16),
        **{name: Kind(config={**size, **config}, is_plain=True) for name, config in plain.items()},
    }


def write(folder: Path, base: nn.Module, kind: Kind, seed: int) -> None:
    """Let PEFT or plain code make and save an adapter whose second matrix is not zero."""
    is_transposed = any(type(module).__name__ == "Conv1D" for module in base.modules())
    if kind.is_plain:
        ends = kind.config["target_modules"]
        config = {**kind.config, "fan_in_fan_out": is_transposed, "task_type": "CAUSAL_LM"}
        write_adapter(folder, base, ends, seed=seed, size=0.05, **config)
        return
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=is_transposed, **kind.config)
    model = get_peft_model(copy.deepcopy(base), config)  # type: ignore[arg-type]
    has_biases = kind.config.get("bias", "none") != "none"
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_magnitude" in name or "modules_to_save" in name:
            parameter.data *= 1 + 0.1 * torch.randn_like(parameter)
        elif has_biases and name.endswith(".bias") and parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    path = folder / "adapter_model.safetensors"
    if kind.dtype != torch.float32:
        save_file({name: tensor.to(kind.dtype) for name, tensor in load_file(path).items()}, path)


def by_peft(base: nn.Module, adapter: Path | None) -> Any:
    """A copy of the base with an adapter, as PEFT computes it."""
    from peft import PeftModel

    model: Any = copy.deepcopy(base)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


@torch.no_grad()
def text_of(model: Any) -> list[int]:
    """The greedy text after the prompt."""
    ids = torch.tensor([PROMPT])
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=None,
        max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    return list(found[0, len(PROMPT) :].tolist())


@torch.no_grad()
def logits_of(model: Any, lost: Mapping[str, Lost]) -> Tensor:
    """The logits after the prompt, to which layers of the base add what they lost of its last rows, by name."""
    with ExitStack() as undo:
        for name, module in model.named_modules():
            of_base = lost.get(name.removeprefix("base_model.model.").removesuffix(".base_layer"))
            # An adapter's file may have a layer's whole weight
            if of_base is not None and isinstance(module, nn.Linear) and torch.equal(module.weight, of_base[1]):
                undo.callback(module.register_forward_hook(_adding(of_base[0])).remove)
        found: Tensor = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    return found


def _adding(lost: Tensor) -> Any:
    def hook(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:  # [..., n or more, o]
        first = output.shape[-2] - lost.shape[-2]
        return torch.cat([output[..., :first, :], output[..., first:, :] + lost], -2)

    return hook


def read(engine: Engine, use: AdapterUse, unpacked: nn.Module | None) -> tuple[Tensor, dict[str, Lost]]:
    """The engine's logits after the prompt, and what each layer's products lack of those with unpacked numbers."""
    target, own, lost = engine.target_model, dict((unpacked or nn.Module()).named_modules()), {}

    def note(name: str, module: Any, rows: Tensor) -> None:
        context = copy_context()
        context.run(rows_under_way.set, ())
        lost[name] = context.run(module.forward, rows) - own[name](rows), own[name].weight  # without adapters

    with ExitStack() as undo, torch.no_grad():
        for name, module in target.model.named_modules():
            if isinstance(module, nn.Linear) and name in own:
                before = functools.partial(note, name)
                undo.callback(module.register_forward_pre_hook(lambda of, given, to=before: to(of, *given)).remove)
        return target.read_text(target.new_text(use), torch.tensor(PROMPT)), lost


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def unpacked_base(base: nn.Module, engine: Engine) -> Any:
    """The model with the numbers that the engine's packed weights mean, also of a table and a head."""
    found = copy.deepcopy(base)
    for name, module in engine.target_model.model.named_modules():
        own: Any = dict(found.named_modules()).get(name)
        if "weight_packed" in module._modules and isinstance(module, nn.Embedding):
            own.weight = nn.Parameter(module(torch.arange(module.num_embeddings)).float().clone())
        elif "weight_packed" in module._modules:
            own.weight = nn.Parameter(weight_of(module).float().clone())
        elif own is not None and not module._modules:
            for attribute, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    setattr(own, attribute, nn.Parameter(parameter.detach().float().clone()))
    found.tie_weights()  # type: ignore[operator]
    return found


def folders_of(name: str, room: Path) -> Iterator[tuple[str, Path, str | None]]:
    """The bases of a model: what they are called, where they lie, and how they are quantised at load."""
    demo = Path(edgespec.__file__).parent / "demo" / "target"
    if name == BUILT_IN:
        yield "float32", demo, None
    elif name == PACKED:
        for quant in QUANTS:
            kind, _, of_gguf = quant.partition(" ")
            if kind == "awq":
                write_awq(demo, room / "awq")
                yield quant, room / "awq", None
            elif kind == "gguf":
                write_gguf(demo, room / f"{of_gguf}.gguf", of_gguf)
                yield quant, room / f"{of_gguf}.gguf", None
            else:
                yield quant, demo, quant
    else:
        config = tiny_config(name)
        for setting, value in MODELS[name].config.items():
            setattr(config, setting, value)
        yield "float32", save_folder(room / "model", make_model(config, is_image_text=False, seed=0)), None


def check(name: str, room: Path, *, says_each: bool) -> Iterator[bool]:
    """Print a row for each place of a model; yields whether each of its kinds is right."""
    kinds = kinds_of(MODELS[name])
    base = None
    for called, folder, quant in folders_of(name, room):
        source = Path(edgespec.__file__).parent / "demo" / "target" if name == PACKED else folder
        if base is None:
            base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            for number, kind in enumerate(kinds.values()):
                write(room / str(number), base, kind, number)
        models: list[Any] = []
        own: Any = None  # what packed layers mean
        for is_streamed in (False, True):
            limits = MemoryLimits(max_resident_layers=0) if is_streamed else MemoryLimits()
            with Engine.from_pretrained(
                folder, draft="none", device="cpu", dtype="float32", quant=quant, limits=limits, context_tokens=128,
                parallel=len(kinds) + 1, self_check=False, tree=TreeSettings(policy="none"),
                adapters=[f"{room / str(number)}:0" for number in range(len(kinds))],
            ) as engine:  # fmt: skip
                if not models:  # while packed layers are there
                    own = unpacked_base(base, engine) if name == PACKED else None
                    models = [
                        by_peft(own or base, None if n is None else room / str(n)) for n in (None, *range(len(kinds)))
                    ]
                    texts = [text_of(model) for model in models]
                label = f"{name}, {called}, {'streamed' if is_streamed else 'resident'}"
                names = {str(number): kind for number, kind in enumerate(kinds)}
                wanted = list(zip(models, texts, strict=True))
                yield from _compare(engine, wanted, names, own, label=label, each=says_each)


def _compare(
    engine: Engine, wanted: Sequence[tuple[Any, list[int]]], kinds: Mapping[str, str], own: Any,
    *, label: str, each: bool,
) -> Iterator[bool]:  # fmt: skip
    without, nothing = logits_of(wanted[0][0], {}), read(engine, (), None)[0]
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "eos_token_id": []}
    requests = [engine.request(PROMPT, adapters=choice, **options) for choice in ([], *([name] for name in kinds))]
    results = dict(engine.generate_many(requests))
    found: dict[str, float] = {}
    for place, (name, kind) in enumerate(kinds.items(), 1):
        model, text = wanted[place]
        logits, lost = read(engine, ((name, 1.0),), own)
        meant = logits_of(model, lost)
        found[kind] = off(logits, meant)
        is_equal = list(getattr(results[place], "token_ids", ())) == text
        is_right = found[kind] <= NEAR and is_equal
        if each or not is_right:
            said = "" if is_equal else f", another text: {results[place]}"[:200]
            from_unpacked = (
                "" if own is None else f", from the unpacked numbers {off(logits, logits_of(model, {})):.0e}"
            )
            print(
                f"    {kind}: {found[kind]:.0e}{from_unpacked}, without it {off(without, meant):.0e}{said}", flush=True
            )
        yield is_right
    most = max(found, key=lambda kind: found[kind])
    num_equal = sum(list(getattr(results[number], "token_ids", ())) == text for number, (_, text) in enumerate(wanted))
    of_base = off(nothing, without)
    print(f"| {label} | {of_base:.0e} | {found[most]:.0e} ({most}) | {num_equal} of {len(wanted)} |", flush=True)
    yield num_equal == len(wanted)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--each", action="store_true", help="say the difference of every kind")
    arguments = parser.parse_args()
    try:
        import gguf  # noqa: F401 -- a base is written as such a file
        import peft
    except ImportError:
        sys.exit("peft and gguf are needed: pip install --no-deps --target FOLDER peft gguf, and PYTHONPATH=FOLDER.")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"peft {peft.__version__}, torch {torch.__version__}, {len(kinds_of(MODELS[BUILT_IN]))} kinds\n")
    print("| place | base off by | adapters off by, at most | texts equal |\n| --- | --- | --- | --- |", flush=True)
    found = []
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as room:
            found += list(check(name, Path(room), says_each=arguments.each))
    print(f"\n{sum(found)} of {len(found)} are right")
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
