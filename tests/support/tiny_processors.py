"""The files of families that see, without weights: tiny processors with their tokenizers, written as folders."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.support.tiny_pictures import tokenizer_with

# Messages whose parts may be text and pictures, as most families' templates write them
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class SeeingFiles:
    """What a family's folder has for pictures."""

    kind: str  # the model's type
    images: str  # the image processor's class
    settings: dict[str, Any]  # its
    place: str  # of a picture, as the family's chat template writes it
    row: str  # the token of a row of a picture
    special: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)  # settings of the whole processor
    config: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return its tokenizer, with a template."""
        found = tokenizer_with(*self.named.values(), self.row, *self.special, **self.named)
        found.chat_template = TEMPLATE.replace("PLACE", self.place)
        return found

    def save(self, folder: Path) -> SimpleNamespace:
        """Write the files; return what stands for the model's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        stated = {"image_processor_type": self.images, **self.settings}
        (folder / "preprocessor_config.json").write_text(json.dumps(stated))
        (folder / "processor_config.json").write_text(json.dumps(self.own))
        config = AutoConfig.for_model(
            self.kind, image_token_id=tokenizer.convert_tokens_to_ids(self.row), **self.config
        )
        if hasattr(config, "image_token_index"):
            config.image_token_index = tokenizer.convert_tokens_to_ids(self.row)
        config.save_pretrained(folder)
        return SimpleNamespace(folder=folder, config=config)


QWEN = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * 16**2, "longest_edge": 96 * 16**2}}  # fmt: skip
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
GLM_TOKENS = ("<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
GLM_PLACE = "<|begin_of_image|><|image|><|end_of_image|>"
IDEFICS_TOKENS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
                  *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))  # fmt: skip
IDEFICS = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
LLAVA = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
INTERN_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                 "video_token": "<video>"}  # fmt: skip


def _qwen(kind: str, patch: int = 16) -> SeeingFiles:
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 96 * patch**2}
    return SeeingFiles(
        kind=kind, images="Qwen2VLImageProcessor", settings={**QWEN, "patch_size": patch, "size": size},
        place=QWEN_PLACE, row="<|image_pad|>", special=QWEN_TOKENS,
    )  # fmt: skip


def _glm(kind: str, images: str) -> SeeingFiles:
    size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 96}
    return SeeingFiles(
        kind=kind, images=images, settings={"size": size}, place=GLM_PLACE, row="<|image|>", special=GLM_TOKENS
    )


FAMILIES: dict[str, SeeingFiles] = {
    "qwen2_5_vl": _qwen("qwen2_5_vl", 14),
    "qwen3_vl": _qwen("qwen3_vl"),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe"),
    "qwen3_5": _qwen("qwen3_5"),
    "gemma3": SeeingFiles(
        kind="gemma3", images="Gemma3ImageProcessor", settings={"size": {"height": 56, "width": 56}},
        place="<start_of_image>", row="<image_soft_token>", own={"image_seq_length": 16},
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "gemma4": SeeingFiles(
        kind="gemma4", images="Gemma4ImageProcessor",
        settings={"max_soft_tokens": 70, "pooling_kernel_size": 3, "patch_size": 16}, place="<|image|>",
        row="<|image|>",
        named={"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
               "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
        config={"vision_config": {"hidden_size": 32}},
    ),
    "idefics3": SeeingFiles(
        kind="idefics3", images="Idefics3ImageProcessor", settings=IDEFICS, place="<image>", row="<image>",
        special=IDEFICS_TOKENS, own={"image_seq_len": 16},
    ),
    "smolvlm": SeeingFiles(
        kind="smolvlm", images="SmolVLMImageProcessor", settings=IDEFICS, place="<image>", row="<image>",
        special=IDEFICS_TOKENS, own={"image_seq_len": 16},
    ),
    "mistral3": SeeingFiles(
        kind="mistral3", images="PixtralImageProcessor", settings={"size": {"longest_edge": 112}, "patch_size": 14},
        place="[IMG]", row="[IMG]", special=("[IMG_BREAK]", "[IMG_END]"),
        own={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "glm4v": _glm("glm4v", "Glm4vImageProcessor"),
    "glm46v": _glm("glm46v", "Glm46VImageProcessor"),
    "internvl": SeeingFiles(
        kind="internvl", images="GotOcr2ImageProcessor",
        settings={"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 4}, place="<IMG_CONTEXT>",
        row="<IMG_CONTEXT>", named=INTERN_TOKENS, own={"image_seq_length": 4},
    ),
    "llava_onevision": SeeingFiles(
        kind="llava_onevision", images="LlavaOnevisionImageProcessor", settings=LLAVA, place="<image>", row="<image>",
        special=("<video>",), own={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
}  # fmt: skip
