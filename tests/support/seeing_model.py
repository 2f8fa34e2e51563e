"""A tiny model that sees, as a folder with processor and chat template, and what transformers says to prompts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from edgespec import Engine
from edgespec.model.picture_prompt import PicturePrompt
from tests.support.tiny_pictures import SEEING, Family, generated, picture
from tests.support.tiny_processors import FAMILIES, TEMPLATE

KIND = "qwen3_vl"
PLACE = FAMILIES[KIND].place
MADE = 8  # tokens of a text
CAT, DOG = picture(1, 96, 64), picture(2, 80, 80)


@dataclass(frozen=True)
class SeeingModel:
    """The model in memory, and its folder."""

    family: Family
    folder: Path

    def said(self, text: str, *images: Image.Image) -> str:
        """What transformers says to a prompt of this text, whose pictures stand at their places."""
        made = dict(self.family.processor(text=[text], images=[list(images)], return_tensors="pt"))
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask")
        tokens = generated(self.family, PicturePrompt(ids=ids, inputs=made, image_rows=[]), count=MADE)
        return str(self.family.processor.tokenizer.decode(tokens, skip_special_tokens=True))


def seeing_model(folder: Path, kind: str = KIND) -> SeeingModel:
    """Make a model of this family, and write it."""
    family = SEEING[kind]()
    save_family(family, folder, kind)
    return SeeingModel(family, folder)


def save_family(family: Family, folder: Path, kind: str) -> None:
    """Write a family's model with its processor."""
    family.model.save_pretrained(folder)
    tokenizer = family.processor.tokenizer
    tokenizer.chat_template = TEMPLATE.replace("PLACE", FAMILIES[kind].place)
    tokenizer.save_pretrained(folder)
    family.processor.image_processor.save_pretrained(folder)
    own = {name: getattr(family.processor, name) for name in FAMILIES[kind].own}
    (folder / "processor_config.json").write_text(json.dumps(own))


def engine_of(seeing: SeeingModel, **options: Any) -> Engine:
    """Open an engine of the model, which is known to be read rightly."""
    return Engine.from_pretrained(
        seeing.folder, device="cpu", dtype="float32", context_tokens=512, self_check=False, **options
    )
