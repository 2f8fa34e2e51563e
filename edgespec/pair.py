"""A target and its draft as folders: found, read and checked before any weight is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from edgespec.causal_model import check_can_roll_back
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.target import offload_errors
from offload.architecture import architecture_checkpoint
from offload.checkpoint import Checkpoint, read_checkpoint

DEMO_FOLDER = Path(__file__).parent / "demo"
NUM_DIFFERENCES_SHOWN = 3
READABLE_QUANTIZATIONS = {"bitsandbytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """One model, known from its small files and its tensors' headers."""

    folder: Path
    config: PretrainedConfig
    checkpoint: Checkpoint
    generation_config: dict[str, Any]

    @property
    def max_context(self) -> int | None:
        """Tokens that fit the model's positions; None where the family sets no limit."""
        limit = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(limit) if limit else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A target, perhaps a draft with the same token ids, and their tokenizer."""

    target: ModelFolder
    draft: ModelFolder | None
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: frozenset[int]  # ids that end a text

    @property
    def max_context(self) -> int | None:
        """Tokens that fit both models."""
        limits = [model.max_context for model in (self.target, self.draft) if model is not None]
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    def default_sampling(self) -> SamplingSettings:
        """What the target's generation config asks for; greedy where it does not ask for sampling."""
        wanted = self.target.generation_config
        if not wanted.get("do_sample"):
            return SamplingSettings()
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        chosen = {name: neutral[name] if wanted.get(name) is None else wanted[name] for name in neutral}
        try:
            return SamplingSettings(**chosen)  # type: ignore[arg-type]
        except (TypeError, EdgespecError) as error:
            raise EdgespecError(
                "E_CONFIG_INVALID",
                f"'{self.target.folder / 'generation_config.json'}' asks for sampling that makes no sense: {chosen}.",
                "Correct the file.",
            ) from error


def open_pair(target: Path | None, draft: Path | None) -> ModelPair:
    """Check both folders against themselves and each other; None for the target is the built-in pair.

    Raises EdgespecError for whatever would fail later: a missing or damaged file, an architecture
    that is unknown or cannot roll back, different token ids.
    """
    if target is None:
        target, draft = DEMO_FOLDER / "target", draft or DEMO_FOLDER / "draft"
    target_model = open_model(target)
    draft_model = open_model(draft) if draft is not None else None
    tokenizer = open_tokenizer(target)
    if draft is not None:
        _check_same_tokens(tokenizer, open_tokenizer(draft))
    return ModelPair(
        target=target_model,
        draft=draft_model,
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(target_model, tokenizer),
    )


def open_model(folder: Path) -> ModelFolder:
    """One folder's config and headers, checked."""
    with offload_errors():
        return _model_folder(folder, read_checkpoint(folder))


def open_architecture(folder: Path) -> ModelFolder:
    """A folder that may hold a config.json alone: sizes then come from the architecture."""
    if folder.is_dir() and (folder / "config.json").exists() and not any(folder.glob("*.safetensors*")):
        config = _read_config(folder)
        if getattr(config, "quantization_config", None):
            raise EdgespecError(
                "E_QUANTIZED",
                f"'{folder / 'config.json'}' is of a quantised model, and does not say how large its weights are.",
                "Give the folder with its weights, or the original's config.json with --quant.",
            )
        check_can_roll_back(config.get_text_config(decoder=True))
        with offload_errors():
            return _model_folder(folder, architecture_checkpoint(config, folder))
    return open_model(folder)


def _model_folder(folder: Path, checkpoint: Checkpoint) -> ModelFolder:
    config = _read_config(folder)
    check_can_roll_back(config.get_text_config(decoder=True))
    quantization: Any = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if quantization and str(method) not in READABLE_QUANTIZATIONS:
        raise EdgespecError(
            "E_QUANTIZED",
            f"'{folder}' is quantised with {method}, which edgespec does not read.",
            "Use the model's bf16 or fp16 safetensors with --quant nf4 or int8, or a bitsandbytes checkpoint.",
        )
    return ModelFolder(
        folder=folder,
        config=config,
        checkpoint=checkpoint,
        generation_config=_read_json(folder / "generation_config.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise EdgespecError(
            "E_CONFIG_INVALID", f"'{path}' is not readable JSON ({error}).", "Download the file again."
        ) from error
    if not isinstance(content, dict):
        raise EdgespecError("E_CONFIG_INVALID", f"'{path}' is not a JSON object.", "Download the file again.")
    return content


def _read_config(folder: Path) -> PretrainedConfig:
    if not (folder / "config.json").exists():
        raise EdgespecError("E_CONFIG_MISSING", f"'{folder}' has no config.json.", "Download the whole model folder.")
    fields = _read_json(folder / "config.json")
    model_type = fields.get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"'{folder}' has model type '{model_type}', which the installed transformers does not know "
            "as a causal language model.",
            "Use a decoder-only model such as Llama, Qwen, Mistral, Gemma, Phi-3 or GPT-NeoX, or update transformers.",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a field that is wrong
        raise EdgespecError(
            "E_CONFIG_INVALID",
            f"transformers cannot use '{folder / 'config.json'}' ({_first_line(error)}).",
            "Download the file again.",
        ) from error
    return config


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer in its fast form; raises EdgespecError where there is none, or it takes code to be run."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # missing files, damaged JSON and missing backends all look different
        raise EdgespecError(
            "E_TOKENIZER",
            f"'{folder}' has no usable tokenizer ({_first_line(error)}).",
            "Put the model's tokenizer.json and tokenizer_config.json into the folder; code in it is never run.",
        ) from error
    if not tokenizer.is_fast:
        raise EdgespecError(
            "E_TOKENIZER",
            f"the tokenizer of '{folder}' ({type(tokenizer).__name__}) has no tokenizer.json form.",
            "Convert it with transformers, and save it into the folder.",
        )
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _stop_tokens(model: ModelFolder, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The generation config's, else the config's, and the tokenizer's own."""
    text_config = model.config.get_text_config(decoder=True)
    stops: set[int] = set()
    for value in (
        model.generation_config.get("eos_token_id", getattr(text_config, "eos_token_id", None)),
        tokenizer.eos_token_id,
    ):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in ids):
            raise EdgespecError(
                "E_CONFIG_INVALID",
                f"eos_token_id {value!r} of '{model.folder}' is no token id.",
                "Correct generation_config.json or config.json.",
            )
        stops.update(ids)
    return frozenset(stops)


def _check_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise EdgespecError naming the first ids that mean different tokens."""
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    different = sorted(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))
    if not different:
        return
    shown = "; ".join(
        f"id {index} is {ours.get(index)!r} in the target and {theirs.get(index)!r} in the draft"
        for index in different[:NUM_DIFFERENCES_SHOWN]
    )
    raise EdgespecError(
        "E_TOKENIZER_MISMATCH",
        f"the draft's token ids differ from the target's in {len(different)} of {len(ours)}: {shown}.",
        "Use a draft of the same model family, or --policy none without a draft.",
    )
