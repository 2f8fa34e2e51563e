"""A model as a folder: its small files and its tensors' headers are checked before any weight is read."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from edgespec.draft.head_network import FORMAT, HEAD_KEY, OWN_MODULES, HeadFacts, attach_head_parts
from edgespec.draft.own_parts import OwnParts
from edgespec.errors import EdgespecError, offload_errors
from edgespec.hub.names import short_name
from edgespec.model.context_limit import context_of
from edgespec.model.supported import check_supported
from edgespec.pair.adapters import GivenAdapter, adapter_notes, default_use, use_digest
from edgespec.pair.config_bounds import check_bounds, check_layers
from edgespec.pair.fingerprint import weights_digest
from edgespec.validation import first_line, parse_json, shown
from offload.adapters.use import AdapterUse
from offload.architecture import architecture_checkpoint
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.file_names import INDEX_NAME, SINGLE_NAME
from offload.formats.stated import check_readable, format_stated, quantises_activations, stated_packing
from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.files import is_gguf
from offload.gguf.header import read_gguf
from offload.gguf.kinds import check_is_model
from offload.gguf.settings import config_fields, generation_fields
from offload.lfs_pointer import is_pointer, pointer_error
from offload.skeleton import Skeleton, build_skeleton, match_again

PROCESSOR_FILES = ("chat_template.json", "processor_config.json")  # of models that also see or hear
GIB = 1 << 30
MAX_OPEN = 8  # models whose fingerprint is remembered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFolder:
    """One model, known from its small files and its tensors' headers."""

    folder: Path
    config: PretrainedConfig
    checkpoint: Checkpoint
    generation_config: dict[str, Any]
    head: HeadFacts | None = None  # of a feature head that was trained here
    parts: OwnParts | None = None  # of a draft that reads its target's hidden states, and borrows from it
    own_notes: tuple[str, ...] = ()  # what is to be said of a published draft
    word: Path | None = None  # that names a draft which is made of its target's own files
    stated: Mapping[str, Any] = field(default_factory=dict)  # the config as the model's own files state it
    missing_bytes: int = 0  # of a GGUF file whose header alone is read
    adapters: tuple[GivenAdapter, ...] = ()
    is_tried: bool = True  # whether trials say how it is decoded; else what its configuration shows does
    # Skeletons that were only looked at, by their numbers: a large model's takes a while to build
    spare: dict[torch.dtype, Skeleton] = field(init=False, default_factory=dict)

    def skeleton(self, checkpoint: Checkpoint, *, dtype: torch.dtype) -> Skeleton:
        """Return the model without weights, matched with its own checkpoint or another form of it."""
        spare = self.spare.pop(dtype, None)
        if spare is not None:
            return self.match_again(spare, checkpoint)
        if self.parts is None:
            return build_skeleton(self.config, checkpoint, dtype=dtype)
        attach, own_modules = self.parts.attach, self.parts.modules
        return build_skeleton(self.config, checkpoint, dtype=dtype, attach=attach, own_modules=own_modules)

    def match_again(self, skeleton: Skeleton, checkpoint: Checkpoint) -> Skeleton:
        """Match the modules of a skeleton with another form of the checkpoint; the skeleton is not used any more."""
        own_modules = None if self.parts is None else self.parts.modules
        return match_again(skeleton, self.config, checkpoint, own_modules=own_modules)

    @property
    def named(self) -> Path:
        """What names the model on a command line."""
        return self.folder if self.word is None else self.word

    @property
    def default_adapters(self) -> AdapterUse:
        """The adapters of texts that choose none."""
        return default_use(self.adapters)

    @property
    def is_language_model(self) -> bool:
        """Return whether it has tokens of its own: no draft that reads a target's hidden states does."""
        return self.parts is None

    @property
    def max_context(self) -> int | None:
        """The number of tokens that fit the model's positions; None where the family sets no limit."""
        return context_of(self.config.get_text_config(decoder=True))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of the model, behind its name: what it is read from, and how others run it."""
        notes = [*self.own_notes]
        if self.checkpoint.is_index_unused:
            notes.append(f"is read from {SINGLE_NAME}, as transformers does; {INDEX_NAME} and its shards are not used")
        if self.missing_bytes:
            notes.append(f"lacks its last {self.missing_bytes / GIB:.3f} GiB, and is planned from its header")
        stated = stated_packing(self.config)
        if quantises_activations(stated):
            notes.append(
                f"is {format_stated(stated)}: other programs quantise its activations too; here they stay as they are, "
                "so texts may differ from theirs"
            )
        return (*notes, *adapter_notes(self.adapters, short_name(self.folder)))


def open_model(folder: Path) -> ModelFolder:
    """Read and check one folder's config and headers, or a GGUF file's."""
    with offload_errors():
        return _gguf_model(folder) if is_gguf(folder) else _model_folder(folder, read_checkpoint(folder))


def _gguf_model(path: Path, *, is_whole: bool = True) -> ModelFolder:
    header = read_gguf(path, is_whole=is_whole)
    check_is_model(header)
    fields = config_fields(header)
    check_bounds(fields, path)
    try:
        config = AutoConfig.for_model(**fields, quantization_config={"quant_method": "gguf"})
    except Exception as error:  # transformers raises many kinds for a field that is wrong
        what = f"transformers cannot use the settings of '{path}' ({first_line(error)})."
        raise EdgespecError("E_CONFIG_INVALID", what, "Download the file again.") from error
    check_supported(config)
    checkpoint = gguf_checkpoint(header, fields)
    check_layers(config, len(checkpoint.tensors), path)
    return ModelFolder(
        folder=header.path,
        config=config,
        checkpoint=checkpoint,
        generation_config=generation_fields(header),
        stated=fields,
        missing_bytes=header.missing_bytes,
    )


def open_head(folder: Path, target: ModelFolder) -> ModelFolder:
    """Read and check a feature head's folder; raises EdgespecError for a head of another target."""
    facts = read_head_facts(folder)
    head = open_model(folder)
    if facts.target_fingerprint != fingerprint(target):
        raise EdgespecError(
            "E_HEAD_TARGET",
            f"'{folder}' is a head of '{facts.target}' ({facts.target_fingerprint}), and the target is "
            f"'{target.folder.name}' ({fingerprint(target)}).",
            "Name its own target with `target`, or train a head for this one: edgespec train head.",
        )
    parts = OwnParts(attach=functools.partial(attach_head_parts, facts=facts), modules=OWN_MODULES)
    return replace(head, head=facts, parts=parts)


def is_head(folder: Path) -> bool:
    """Return whether a folder's config.json says that it is a feature head."""
    return HEAD_KEY in read_json(folder / "config.json")


def read_head_facts(folder: Path) -> HeadFacts:
    """Return what makes a folder a feature head; raises EdgespecError where it is none of this version."""
    path = folder / "config.json"
    content = read_json(path).get(HEAD_KEY)
    try:
        facts = HeadFacts(**content) if isinstance(content, dict) else None
    except TypeError:  # a name too many, or one missing
        facts = None
    if facts is None or facts.format != FORMAT or not _is_sound(facts):
        what = f"'{path}' does not describe a feature head of format {FORMAT}."
        raise EdgespecError("E_CONFIG_INVALID", what, "Train the head again.")
    return facts


def _is_sound(facts: HeadFacts) -> bool:
    texts = (facts.target, facts.target_fingerprint, facts.method)
    groups = 1 if facts.router_groups is None else facts.router_groups
    numbers = (groups, facts.top_groups)
    return all(isinstance(text, str) for text in texts) and all(type(n) is int and n > 0 for n in numbers)


def open_architecture(folder: Path) -> ModelFolder:
    """Read a folder that may hold a config.json alone, or a GGUF file's header: sizes then come from those."""
    if is_gguf(folder):
        with offload_errors():
            return _gguf_model(folder, is_whole=False)
    if folder.is_dir() and (folder / "config.json").exists() and not any(folder.glob("*.safetensors*")):
        config = _read_config(folder)
        check_supported(config)
        with offload_errors():
            check_readable(stated_packing(config), folder)
            return _model_folder(folder, architecture_checkpoint(config, folder))
    return open_model(folder)


def _model_folder(folder: Path, checkpoint: Checkpoint) -> ModelFolder:
    config = _read_config(folder)
    check_supported(config)
    check_layers(config, len(checkpoint.tensors), folder)
    check_readable(stated_packing(config), folder)
    return ModelFolder(
        folder=folder,
        config=config,
        checkpoint=checkpoint,
        generation_config=read_generation_config(folder),
        stated=read_json(folder / "config.json"),
    )


def check_no_pointer(*paths: Path) -> None:
    """Raise EdgespecError for a file that Git LFS did not bring."""
    with offload_errors():
        for path in filter(is_pointer, paths):
            raise pointer_error(path)


def processor_template(folder: Path) -> str | dict[str, str] | None:
    """Return the template that a processor's files hold, where the tokenizer has none; raises EdgespecError."""
    for name in PROCESSOR_FILES:
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list) and all(isinstance(each, dict) for each in found):
            found = {each.get("name"): each.get("template") for each in found}
        texts = list(found.items()) if isinstance(found, dict) else [("default", found)]
        if not all(isinstance(text, str) for pair in texts for text in pair) and found is not None:
            what = f"'{folder / name}' has a chat template that is no text."
            raise EdgespecError("E_CONFIG_INVALID", what, "Download the file again.")
        if found:
            return found  # type: ignore[no-any-return]
    return None


def read_generation_config(model: Path) -> dict[str, Any]:
    """Return how a model's texts are made, as its own files say: a folder's, or a GGUF file's header."""
    if is_gguf(model):
        with offload_errors():
            return generation_fields(read_gguf(model))
    return read_json(model / "generation_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return the file's object, which is empty where there is no file."""
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        check_no_pointer(path)
        raise EdgespecError(
            "E_CONFIG_INVALID", f"'{path}' is not readable JSON ({error}).", "Download the file again."
        ) from error
    if not isinstance(content, dict):
        raise EdgespecError("E_CONFIG_INVALID", f"'{path}' is not a JSON object.", "Download the file again.")
    return content


def _read_config(folder: Path) -> PretrainedConfig:
    if not (folder / "config.json").exists():
        raise EdgespecError("E_CONFIG_MISSING", f"'{folder}' has no config.json.", "Download the whole model folder.")
    fields = read_json(folder / "config.json")
    check_bounds(fields, folder / "config.json")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or not _is_language_model(model_type):
        what = f"'{folder}' has model type {shown(model_type)}, which "
        fix = "Use a decoder-only model such as Llama, Qwen, Mistral, Gemma, Phi-3 or GPT-NeoX"
        if not isinstance(model_type, str):
            what += "is no word."
        elif model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            what += "is an encoder with a decoder: it reads the whole prompt before the first token."
        elif model_type in CONFIG_MAPPING:
            what += "transformers knows, and not as a language model."
        else:
            what += "the installed transformers does not know."
            fix += ", or update transformers"
        raise EdgespecError("E_UNSUPPORTED_ARCHITECTURE", what, f"{fix}.")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a field that is wrong
        raise EdgespecError(
            "E_CONFIG_INVALID",
            f"transformers cannot use '{folder / 'config.json'}' ({first_line(error)}).",
            "Download the file again.",
        ) from error
    return config


def _is_language_model(model_type: str) -> bool:
    """Return whether transformers has a model of a type that writes words, or somebody registered one with it."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return True
    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING


@functools.lru_cache(maxsize=MAX_OPEN)
def fingerprint(model: ModelFolder) -> str:
    """Return a digest of the config, the tensors' names, shapes and types, and the weights: of this model when opened.

    Adapters of texts that choose none are a part of it. It is made once for each.
    """
    facts = {name: [str(entry.dtype), list(entry.shape)] for name, entry in sorted(model.checkpoint.tensors.items())}
    # The file's own keys: a config as an object also holds the folder's place and the installed version's defaults.
    config = {
        name: value for name, value in model.stated.items() if name not in {"transformers_version", "_name_or_path"}
    }
    adapters = use_digest(model.adapters, model.default_adapters)
    whole = json.dumps([config, facts, weights_digest(model.checkpoint), *adapters], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
