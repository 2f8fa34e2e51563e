"""Tiny random models of families that see, with their own processors: pictures decide their texts."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast, set_seed

from edgespec.model.picture_prompt import PictureOfPrompt, PicturePrompt

NEW = 24  # tokens of a text


def tokenizer_with(*special: str, **named: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", extra_special_tokens=named
    )
    found.add_special_tokens({"additional_special_tokens": list(special)})
    return found


def without_videos(processor: type) -> Any:
    """Return a processor's class that takes none for videos: that one alone would need torchvision."""

    class Own(processor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

        @property
        def unused_input_names(self) -> list[str]:  # asks the processor of videos for its names
            return ["num_soft_tokens_per_image"]

    return Own


@dataclass
class Family:
    """A tiny model with its processor."""

    model: Any
    processor: Any
    prompt: str  # with {image}


TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.15,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
BLOCKS = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
          "initializer_range": 0.15}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def ids_of(tokens: PreTrainedTokenizerFast, **named: str) -> dict[str, int]:
    """The ids of tokens by the keys of a configuration."""
    return {key: int(tokens.convert_tokens_to_ids(token)) for key, token in named.items()}


def qwen3_vl() -> Family:
    return _qwen("qwen3_vl", {"rope_parameters": AXES})


def qwen2_5_vl() -> Family:
    return _qwen("qwen2_5_vl", {"rope_parameters": AXES})


def qwen3_5() -> Family:
    text = {
        "rope_parameters": {**AXES, "partial_rotary_factor": 1.0},
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2,
    }  # fmt: skip
    return _qwen("qwen3_5", text)


def _qwen(kind: str, text: dict[str, Any]) -> Family:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokens = tokenizer_with("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    patch = 14 if kind == "qwen2_5_vl" else 16
    images = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2,
                                      size={"shortest_edge": 4 * patch**2, "longest_edge": 96 * patch**2})  # fmt: skip
    if kind == "qwen2_5_vl":
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor as Processor

        vision = {**BLOCKS, "patch_size": patch, "window_size": 56, "fullatt_block_indexes": [1]}
    else:
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Processor

        vision = {**BLOCKS, "patch_size": patch, "num_position_embeddings": 64}
        if kind.startswith("qwen3_vl"):
            vision["deepstack_visual_indexes"] = [0, 1]
    processor = without_videos(Processor)(images, tokens, None)
    config = AutoConfig.for_model(
        kind, text_config={**TEXT, "vocab_size": len(tokens), **text}, vision_config=vision,
        **ids_of(tokens, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>",
                 vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>"),
    )  # fmt: skip
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return _family(config, processor, f"Look: {image} and {image} What?")


def gemma3() -> Family:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokens = tokenizer_with(*named.values(), **named)
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = Gemma3Processor(images, tokens, image_seq_length=16)
    vision = {**TOWER, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 7, "vision_use_head": False}
    text = {**TEXT, "vocab_size": len(tokens), "sliding_window": 24, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False}  # fmt: skip
    config = AutoConfig.for_model(
        "gemma3", tie_word_embeddings=False, text_config=text, vision_config=vision, mm_tokens_per_image=16,
        **ids_of(tokens, image_token_id="<image_soft_token>", image_token_index="<image_soft_token>",
                 boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>"),
    )  # fmt: skip
    return _family(config, processor, "Look: <start_of_image> and <start_of_image> What?")


def gemma4() -> Family:
    return gemma4_of()


def gemma4_of(**text: Any) -> Family:
    """A Gemma 4 of other sizes."""
    return _gemma4({"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", **text})


def gemma4_e() -> Family:
    return _gemma4({"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2})


def _gemma4(text: dict[str, Any]) -> Family:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
             "eoa_token": "<audio|>", "audio_token": "<|audio|>"}  # fmt: skip
    tokens = tokenizer_with(*named.values(), "<|video|>", **named)
    images = Gemma4ImageProcessorPil(max_soft_tokens=70, pooling_kernel_size=3, patch_size=16)
    processor = without_videos(Gemma4Processor)(None, images, tokens, None)
    vision = {**TOWER, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64,
              "initializer_range": 0.15}  # fmt: skip
    text = {**TEXT, "vocab_size": len(tokens), "vocab_size_per_layer_input": len(tokens), "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": tokens.pad_token_id,
            "global_head_dim": 16, "tie_word_embeddings": False, **text}  # fmt: skip
    ids = ids_of(tokens, video_token_id="<|video|>", **{f"{name}_id": value for name, value in named.items()})
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=vision, audio_config=None,
                                  tie_word_embeddings=False, **ids)  # fmt: skip
    return _family(config, processor, "Look: <|image|> and <|image|> What?")


def _idefics(kind: str) -> Family:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
    tokens = tokenizer_with("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    processor = Idefics3Processor(images, tokens, image_seq_len=16)
    vision = {**TOWER, "image_size": 64, "patch_size": 8, "initializer_range": 0.15}
    text = {**TEXT, "model_type": "llama", "vocab_size": len(tokens)}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, scale_factor=2, pad_token_id=tokens.pad_token_id,
        **ids_of(tokens, image_token_id="<image>"),
    )  # fmt: skip
    return _family(config, processor, "Look: <image> and <image> What?")


def idefics3() -> Family:
    return _idefics("idefics3")


def qwen3_vl_moe() -> Family:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _qwen("qwen3_vl_moe", {"rope_parameters": AXES, **experts})


def mistral3() -> Family:
    from transformers.models.pixtral import image_processing_pil_pixtral as of_pillow

    # The processor imports a function from the module for torchvision, which Pillow's has as well.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", of_pillow)
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    tokens = tokenizer_with("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 16, "width": 16})
    processor = PixtralProcessor(images, tokens, patch_size=8, spatial_merge_size=2)
    vision = {**TOWER, "model_type": "pixtral", "image_size": 96, "patch_size": 8, "head_dim": 16}
    images.patch_size = {"height": 8, "width": 8}
    text = {**TEXT, "model_type": "mistral", "vocab_size": len(tokens), "sliding_window": None}
    config = AutoConfig.for_model(
        "mistral3", text_config=text, vision_config=vision, spatial_merge_size=2, tie_word_embeddings=False,
        **ids_of(tokens, image_token_index="[IMG]"),
    )  # fmt: skip
    return _family(config, processor, "Look: [IMG] and [IMG] What?")


def glm46v() -> Family:
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

    keys = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    names = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
             "<|end_of_video|>")  # fmt: skip
    tokens = tokenizer_with(*names)
    images = Glm46VImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 4 * 28**2, "longest_edge": 48 * 28**2}
    )
    processor = without_videos(Glm46VProcessor)(images, tokens, None)
    vision = {**BLOCKS, "patch_size": 14, "image_size": 112}
    axes = {**AXES, "partial_rotary_factor": 1.0}
    text = {**TEXT, "vocab_size": len(tokens), "pad_token_id": 0, "rope_parameters": axes}
    ids = ids_of(tokens, **{f"{key}_token_id": name for key, name in zip(keys, names, strict=True)})
    config = AutoConfig.for_model("glm46v", text_config=text, vision_config=vision, **ids)
    prompt = "Look: <|begin_of_image|><|image|><|end_of_image|> and <|begin_of_image|><|image|><|end_of_image|> What?"
    return _family(config, processor, prompt)


def internvl() -> Family:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
             "video_token": "<video>"}  # fmt: skip
    tokens = tokenizer_with(*named.values(), **named)
    images = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64}, crop_to_patches=True, min_patches=1,
                                      max_patches=2)  # fmt: skip
    processor = without_videos(InternVLProcessor)(images, tokens, None, image_seq_length=16)
    vision = {**TOWER, "image_size": [64, 64], "patch_size": [8, 8], "initializer_range": 0.15}
    text = {**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)}
    config = AutoConfig.for_model(
        "internvl", text_config=text, vision_config=vision, image_seq_length=16, tie_word_embeddings=False,
        **ids_of(tokens, image_token_id="<IMG_CONTEXT>"),
    )  # fmt: skip
    return _family(config, processor, "Look: <IMG_CONTEXT> and <IMG_CONTEXT> What?")


def llava_onevision() -> Family:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    named = {"image_token": "<image>", "video_token": "<video>"}
    tokens = tokenizer_with(*named.values(), **named)
    points = [[32, 32], [32, 64], [64, 32], [64, 64]]
    images = LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, image_grid_pinpoints=points)
    processor = without_videos(LlavaOnevisionProcessor)(
        images, tokens, None, num_image_tokens=16, vision_feature_select_strategy="full"
    )
    vision = {**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "vision_use_head": False}
    text = {**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)}
    config = AutoConfig.for_model(
        "llava_onevision", text_config=text, vision_config=vision, image_grid_pinpoints=points,
        vision_feature_select_strategy="full", tie_word_embeddings=False,
        **ids_of(tokens, image_token_index="<image>", video_token_index="<video>"),
    )  # fmt: skip
    return _family(config, processor, "Look: <image> and <image> What?")


def smolvlm() -> Family:
    return _idefics("smolvlm")


def _family(config: Any, processor: Any, prompt: str) -> Family:
    config.get_text_config().eos_token_id = None
    with torch.random.fork_rng():
        set_seed(1)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and parameter.abs().max() == 0:
                nn.init.normal_(parameter, std=0.15)
            if "mm_input_projection" in name:  # Gemma 3 leaves it at zero: the image would say nothing
                nn.init.normal_(parameter, std=0.15)
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    return Family(model=model, processor=processor, prompt=prompt)


SEEING: dict[str, Callable[[], Family]] = {
    make.__name__: make
    for make in (
        qwen3_vl, qwen2_5_vl, qwen3_5, gemma3, gemma4, gemma4_e, idefics3, smolvlm, qwen3_vl_moe, mistral3, glm46v,
        internvl, llava_onevision,
    )
}  # fmt: skip


def add_predicting_layer(folder: Path, family: Family) -> None:
    """Add a random layer that predicts several tokens to the files of Qwen 3.5 with pictures."""
    (path,) = folder.glob("*.safetensors")
    tensors, size = load_file(path), family.model.config.text_config.hidden_size
    generator = torch.Generator().manual_seed(2)
    layer = family.model.model.language_model.layers[1].state_dict()  # of full attention
    own = {f"mtp.layers.0.{name}": value.clone() for name, value in layer.items()}
    own |= {f"mtp.{name}.weight": torch.rand(size, generator=generator) for name in
            ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}  # fmt: skip
    own["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    save_file({**tensors, **own}, path, metadata={"format": "pt"})


def picture(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """Return a picture that a seed decides."""
    generator = torch.Generator().manual_seed(seed)
    found = Image.new("RGB", (width, height), tuple(torch.randint(0, 256, (3,), generator=generator).tolist()))
    draw = ImageDraw.Draw(found)
    for _ in range(8):
        x, y = (torch.rand(2, generator=generator) * torch.tensor([width, height])).tolist()
        draw.ellipse([x, y, x + 20, y + 20], fill=tuple(torch.randint(0, 256, (3,), generator=generator).tolist()))
    return found


def seeing_prompt(family: Family, seeds: tuple[int, ...], *, words: str | None = None) -> PicturePrompt:
    """The family's prompt with a picture for each seed, as its processor makes it."""
    images = [picture(seed, 96 - 16 * (number % 3), 64 + 16 * (number % 3)) for number, seed in enumerate(seeds)]
    text = family.prompt if words is None else words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's, of what GLM's processor does
        made = dict(family.processor(text=[text], images=[images], return_tensors="pt"))
    ids = made.pop("input_ids")[0].tolist()
    runs = picture_rows(family, ids, seeds)
    rows = Counter[str]()
    for first, end, digest in runs:
        rows[digest] += end - first
    pictures = [PictureOfPrompt(sha256=digest, digest=digest, num_rows=count) for digest, count in rows.items()]
    return PicturePrompt(ids=ids, inputs=made, image_rows=runs, pictures=pictures)


def picture_rows(family: Family, ids: list[int], seeds: tuple[int, ...]) -> list[tuple[int, int, str]]:
    """The runs of placeholders; most tokens stand between the runs of two pictures.

    A picture's size is that of its place, and in some families it has other rows where it is alone.
    """
    digests = [f"picture {seed} {number % 3} {len(seeds) == 1}" for number, seed in enumerate(seeds)]
    image, count = image_token_id(family.model.config), len(ids)
    is_image = [token == image for token in ids]
    edges = [row for row in range(count + 1) if (row < count and is_image[row]) != (row > 0 and is_image[row - 1])]
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    gaps = sorted(range(1, len(runs)), key=lambda number: runs[number - 1][1] - runs[number][0])
    firsts = gaps[: len(seeds) - 1]
    return [(first, end, digests[sum(number >= at for at in firsts)]) for number, (first, end) in enumerate(runs)]


def image_token_id(config: Any) -> int:
    """The id that stands for rows of a picture."""
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


@torch.no_grad()
def generated(
    family: Family, prompt: PicturePrompt, *, count: int = NEW, inputs: dict[str, Tensor] | None = None
) -> list[int]:
    """The tokens that transformers' own greedy decoding adds."""
    for part in family.model.modules():  # which keep the shift of the last prompt, also for one without pictures
        if hasattr(part, "rope_deltas"):
            part.rope_deltas = None
    ids = torch.tensor([prompt.ids])
    given = dict(prompt.inputs) if inputs is None else inputs
    found = family.model.generate(input_ids=ids, **given, do_sample=False, max_new_tokens=count)
    return found[0, ids.shape[1] :].tolist()
