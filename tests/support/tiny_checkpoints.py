"""Tiny random checkpoints of any type, with logits that are spread and a tokenizer of bytes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


def make_model(config: PretrainedConfig, *, is_image_text: bool, seed: int) -> PreTrainedModel:
    """A random model whose logits are spread enough for argmaxes to be clear."""
    torch.manual_seed(seed)
    family = AutoModelForImageTextToText if is_image_text else AutoModelForCausalLM
    model = family.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.normal_(std=0.1)  # equal numbers would hide what they do
            elif parameter.ndim > 1:
                parameter.mul_(4)
    return model


def save_folder(folder: Path, model: PreTrainedModel) -> Path:
    """A Hugging Face folder of the model, with a tokenizer of bytes."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
