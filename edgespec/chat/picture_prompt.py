"""A prompt's words and pictures become token ids and pixels: by the processor of the target's own family.

Pillow is enough. Processors that take videos, too, would need torchvision for those alone; a class of ours leaves the
parts for videos and sounds out, and everything else is the family's: sizes, places, and how many tokens a picture has.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from edgespec.chat.chat_template import Messages, written_by_template
from edgespec.chat.continued import goes_on
from edgespec.chat.picture_parts import sources_of, with_sources
from edgespec.chat.pictures import Picture, PictureSource, check_count, check_pillow
from edgespec.chat.prompt_ids import are_messages, prompt_ids
from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PictureOfPrompt, PicturePrompt
from edgespec.text.token_ids import Prompt, encoded
from edgespec.validation import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

    from edgespec.pair.folder import ModelFolder
    from edgespec.pair.pair import ModelPair

Encoded: TypeAlias = list[int] | PicturePrompt
MAX_OPEN = 2  # processors that are kept
NO_PICTURES_FIX = "Leave the pictures out, or use a model that sees."


def ids_of(prompt: Encoded) -> list[int]:
    """Return the token ids of a prompt with or without pictures."""
    return prompt.ids if isinstance(prompt, PicturePrompt) else prompt


def read_prompt(
    pair: ModelPair,
    prompt: Prompt,
    *,
    values: Mapping[str, Any] | None = None,
    continues: bool | None = None,
    max_tokens: int | None = None,
    folder: Path | None = None,
) -> Encoded:
    """Return a prompt of any form as the model reads it; pictures of messages may be files of a `folder`.

    A chat template reads `values` beside messages. Raises EdgespecError.
    """
    if isinstance(prompt, PicturePrompt):
        return prompt
    if are_messages(prompt):
        prompt = with_sources(prompt, folder=folder)
        if sources_of(prompt):
            goes = goes_on(prompt, continues)
            return messages_prompt(pair, prompt, values=values, continues=goes, max_tokens=max_tokens)
    return prompt_ids(pair.tokenizer, prompt, values=values, max_tokens=max_tokens, continues=continues)


def messages_prompt(
    pair: ModelPair,
    messages: Messages,
    *,
    values: Mapping[str, Any] | None = None,
    first: int = 1,
    continues: bool = False,
    max_tokens: int | None = None,
) -> PicturePrompt:
    """Return messages with sources of pictures as the model reads them; raises EdgespecError as `rendered` does."""
    reader = picture_reader(pair.target, pair.tokenizer.name_or_path)
    text = written_by_template(
        pair.tokenizer, messages, values=values, first=first, continues=continues, placeholder=reader.placeholder
    )
    return reader.read(text, sources_of(messages), max_tokens=max_tokens)


def text_prompt(
    pair: ModelPair, text: str, sources: Sequence[PictureSource], *, max_tokens: int | None = None
) -> PicturePrompt:
    """Return a plain text with pictures as the model reads it: each has a placeholder in the text.

    Raises EdgespecError.
    """
    reader = picture_reader(pair.target, pair.tokenizer.name_or_path)
    if (count := text.count(reader.placeholder)) != len(sources):
        what = f"the prompt has {len(sources)} pictures, and '{reader.placeholder}' {count} times in its text."
        fix = f"Write '{reader.placeholder}' where each picture belongs, or let the chat template place them."
        raise EdgespecError("E_PICTURE", what, fix)
    return reader.read(text, sources, max_tokens=max_tokens, is_plain=True)


class PictureReader:
    """The processor of a model's family, for pictures alone."""

    def __init__(self, processor: Any, config: PretrainedConfig) -> None:
        """Read as `processor` does; `config` says which token stands for a row of a picture."""
        self.placeholder = str(processor.image_token)  # in a text, of a whole picture
        self._processor, self._lock = processor, threading.Lock()
        self._row_id = int(getattr(config, "image_token_id", None) or config.image_token_index)
        self._row_token = str(processor.tokenizer.convert_ids_to_tokens(self._row_id))
        own = {name: value for name, value in vars(processor).items() if isinstance(value, str | int | float | bool)}
        settings = [type(processor).__name__, own, processor.image_processor.to_dict()]
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()

    def read(
        self, text: str, sources: Sequence[PictureSource], *, max_tokens: int | None = None, is_plain: bool = False
    ) -> PicturePrompt:
        """Return a text with a placeholder for each picture as the model reads it; raises EdgespecError.

        A plain text gets the tokenizer's own special tokens.
        """
        check_count(sources)
        tokenizer = self._processor.tokenizer
        encoded(tokenizer, text, add_special_tokens=False, max_tokens=max_tokens)  # is a text, and not far too long
        pictures = [source.read() for source in sources]
        try:
            with self._lock:
                made = dict(self._made(text, pictures, add_special_tokens=is_plain))
                written = list(self._processor.written)
        except Exception as error:  # processors raise many kinds
            what = f"the model's processor cannot take the pictures ({first_line(error)})."
            raise EdgespecError("E_PICTURE", what, "Make them of another size, or leave them out.") from error
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)
        of_prompt = [self._of_prompt(*one) for one in zip(pictures, written, strict=True)]
        return PicturePrompt(ids=ids, inputs=made, image_rows=list(self._runs(ids, of_prompt)), pictures=of_prompt)

    def _made(self, text: str, pictures: Sequence[Picture], *, add_special_tokens: bool) -> Mapping[str, Any]:
        images = [picture.image for picture in pictures]
        made: Mapping[str, Any] = self._processor(
            text=[text], images=[images], return_tensors="pt", add_special_tokens=add_special_tokens,
            return_mm_token_type_ids=True,
        )  # fmt: skip
        return made

    def _of_prompt(self, picture: Picture, written: str) -> PictureOfPrompt:
        """Return a picture of a prompt; what is written for it depends in some families on whether it has company."""
        content = b"\0".join([picture.digest.encode(), self._settings, written.encode()])
        digest = hashlib.sha256(content).hexdigest()
        return PictureOfPrompt(sha256=picture.digest, digest=digest, num_rows=written.count(self._row_token))

    def _runs(self, ids: Sequence[int], pictures: Sequence[PictureOfPrompt]) -> Iterator[tuple[int, int, str]]:
        """Yield the runs of a prompt's placeholders, with the digest of the picture that each belongs to."""
        owners = [picture.digest for picture in pictures for _ in range(picture.num_rows)]
        places = [place for place, token in enumerate(ids) if token == self._row_id]
        if len(places) != len(owners):
            what = f"the model's processor made {len(places)} rows of pictures, and wrote {len(owners)}."
            raise EdgespecError("E_PICTURE", what, NO_PICTURES_FIX)
        numbered = enumerate(zip(places, owners, strict=True))
        for (_, digest), run in groupby(numbered, lambda one: (one[1][0] - one[0], one[1][1])):
            places_of_run = [place for _, (place, _) in run]
            yield places_of_run[0], places_of_run[-1] + 1, digest


def picture_reader(target: ModelFolder, tokenizer_folder: str) -> PictureReader:
    """Return what reads pictures for a target; raises EdgespecError for one that does not see."""
    check_pillow()
    if target.folder.is_file():
        what = f"'{target.folder.name}' is a GGUF file, whose pictures are not read."
        raise EdgespecError("E_PICTURE", what, "Use the folder of the same model with safetensors for pictures.")
    kind = target.config.model_type
    if getattr(target.config, "vision_config", None) is None or _processor_named(kind) is None:
        what = f"'{target.folder.name}' (model type '{kind}') does not see: it has no tower for pictures."
        raise EdgespecError("E_PICTURE", what, NO_PICTURES_FIX)
    return _opened(target.folder, Path(tokenizer_folder), kind)


@functools.lru_cache(maxsize=MAX_OPEN)
def _opened(folder: Path, tokenizer_folder: Path, kind: str) -> PictureReader:
    import transformers

    from edgespec.pair.pair import open_tokenizer

    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        what = f"'{folder}' has neither preprocessor_config.json nor processor_config.json, which pictures need."
        raise EdgespecError("E_PICTURE", what, "Put the model's own into the folder.")
    tokenizer = open_tokenizer(tokenizer_folder)  # a processor adds tokens to its own
    try:
        own_class = _for_pictures(str(_processor_named(kind)))
        images = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        parts = {"image_processor": images, "tokenizer": tokenizer}
        stated, _ = own_class.get_processor_dict(folder, local_files_only=True)
        arguments = [parts.get(name) for name in own_class.get_attributes()]
        processor = own_class.from_args_and_dict(arguments, stated)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return PictureReader(processor, config)
    except Exception as error:  # damaged files, and libraries that a family asks for
        what = f"the processor of '{folder}' cannot be used ({first_line(error)})."
        raise EdgespecError("E_PICTURE", what, "Put the model's own files into the folder again.") from error


def _processor_named(kind: str) -> str | None:
    """Return the class of a model type's processor, by name."""
    from transformers.models.auto import processing_auto

    names: Mapping[str, str | None] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    return names.get(kind)


def _for_pictures(name: str) -> Any:
    """Return a family's processor that has nothing for videos and sounds, and keeps what it wrote for pictures."""
    import transformers

    # Its own module: transformers itself has something else in the place of what it thinks needs torchvision
    module = _module_without_torchvision(getattr(transformers, name).__module__)
    family: type[ProcessorMixin] = getattr(module, name)
    if getattr(module, "num2words", True) is None:  # a library for videos alone, without which the class refuses
        vars(module)["num2words"] = str

    class PictureProcessor(family):  # type: ignore[misc, valid-type]
        written: tuple[str, ...] = ()  # of each picture of the last prompt

        def check_argument_for_proper_class(self, _name: str, argument: Any) -> type:
            return type(argument)

        def _process_images(self, images: Any, **named: Any) -> tuple[Any, list[str]]:
            found, written = super()._process_images(images, **named)
            self.written = tuple(written)
            return found, written

    return PictureProcessor


def _module_without_torchvision(name: str) -> ModuleType:
    """Return a module of transformers, which may import another for torchvision: Pillow's stands in for that."""
    other = name.replace(".processing_", ".image_processing_")
    own = name.replace(".processing_", ".image_processing_pil_")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    sys.modules[other] = importlib.import_module(own)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[other]
