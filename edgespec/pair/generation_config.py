"""What the names of a generation config mean here: what is done, what changes no text, and what is left undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.validation import checked_options, shown
from offload.gguf.files import is_gguf


class OwnOptions(TypedDict, total=False):
    """Which tokens may be drawn, and when: a target's own generation config has a say in it, as in its sampling."""

    min_new_tokens: int
    min_length: int
    suppress_tokens: Sequence[int]


SAMPLING = ("do_sample", *(setting.name for setting in fields(SamplingSettings)))
# Names of a transformers GenerationConfig -> ours
_SAME_NAME = (*SAMPLING, "max_new_tokens", "max_length", "seed", "eos_token_id", *OwnOptions.__annotations__)
OPTIONS = {**{name: name for name in _SAME_NAME}, "stop_strings": "stop"}
# Of the others: how a text is computed, ids that are for encoders or for no prompt, what counts for beams alone
_WITHOUT_EFFECT = {
    "transformers_version", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory",
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "length_penalty", "early_stopping", "compile_config",
    "disable_compile", "prefill_chunk_size", "continuous_batching_config", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "speculation_type", "use_mtp",
}  # fmt: skip
_NEUTRAL_ONES = {
    "num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "encoder_repetition_penalty", "guidance_scale",
    "top_h",
}  # fmt: skip
FILE = "generation_config.json"
_IDS = {"forced_bos_token_id", "forced_eos_token_id"}  # 0 is one


def stated_in(model: Path) -> Path:
    """Return the file that says how a model's texts are made: a GGUF file says so itself."""
    return model if is_gguf(model) else model / FILE


def undone(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a generation config asks for and edgespec does not do."""
    return {
        name: value
        for name, value in stated.items()
        if name not in OPTIONS and name not in _WITHOUT_EFFECT and name[:1] != "_" and not _is_neutral(name, value)
    }


def own_options(stated: Mapping[str, Any], folder: Path, *, vocab: int) -> dict[str, Any]:
    """Return what a target's own generation config says of the tokens that may be drawn.

    Raises EdgespecError for ids beyond `vocab`, and for what is no id or number.
    """
    options = {name: stated[name] for name in OwnOptions.__annotations__ if name in stated}
    try:
        found = checked_options(OwnOptions, options)
    except EdgespecError as error:
        raise EdgespecError("E_CONFIG_INVALID", f"'{stated_in(folder)}': {error.what}", "Correct the file.") from error
    odd = next((token for token in found.get("suppress_tokens", ()) if not 0 <= token < vocab), None)
    if odd is not None:
        what = f"'{stated_in(folder)}' suppresses token {odd}, and the model has {vocab} tokens."
        raise EdgespecError("E_CONFIG_INVALID", what, "Correct the file.")
    return found


def undone_note(stated: Mapping[str, Any], folder: Path) -> str | None:
    """Name what a target's own generation config asks for in vain; None where there is nothing."""
    in_vain = undone(stated) | {
        name: stated[name] for name in ("max_new_tokens", "stop_strings") if stated.get(name) is not None
    }
    if not in_vain:
        return None
    named = ", ".join(f"{name}={shown(value)}" for name, value in sorted(in_vain.items()))
    return f"{stated_in(folder).name} asks for {named}, which is not done here"


def _is_neutral(name: str, value: object) -> bool:
    return value is None or (not value and name not in _IDS) or (name in _NEUTRAL_ONES and value == 1)
