"""Models that are no decoders, and those that cannot read token trees, as far as the configuration shows it.

The self-check tries the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from edgespec.errors import EdgespecError
from edgespec.model.mechanisms.known import MECHANISMS

_PLACES = "adds biases that go by places in the cache, where siblings have different ones"
_IMAGE = "reads no words without an image"
# What no field of a configuration shows: reasons to refuse a type, and reasons to decode it without trees
_REFUSED = {
    "blip": _IMAGE,
    "gemma4_assistant": "reads its target's keys and values, and is no model by itself",
    "gemma4_unified_assistant": "reads its target's keys and values, and is no model by itself",
    "idefics": _IMAGE,
    "pi0": "writes a robot's movements, and no words",
    "prophetnet": "gives a token other logits where more tokens follow it, in transformers' code",
    "shieldgemma2": "is a classifier of images",
    "xlm": "reads none of the tokens that it writes: transformers' cache has a mask in their place",
}
_PLAINLY = {
    "bloom": _PLACES,
    "blt": "reads bytes in patches of unequal length, and the whole text in each pass",
    "doge": "adds to scores what its layers make of values, in a mask of their own",
    "dory": "passes some of its layers several times, each with keys of their own",
    "gpt_neo": "cuts the window of its local layers by places in the cache",
    "hrm_text": "passes its two stacks of layers in turn, several times, each with keys of their own",
    "inkling2_loop_text": _PLACES,
    "inkling2_text": _PLACES,
    "kosmos_2_5_text_model": "counts a row's place in the cache for its position",
    "kosmos_2_text_model": "counts a row's place in the cache for its position",
    "inkling_text": _PLACES,
    "longcat_flash": "has two attentions in each of its layers",
    "minimax": "takes no cache but its own, which cannot be rolled back",
    "mpt": _PLACES,
    "openai-gpt": "keeps no cache, and reads the whole text in each pass",
    "recurrent_gemma": "keeps a state in its modules, which cannot be rolled back to a node of a tree",
    "zamba": "has layers that share one block of attention, which cannot be followed through a token tree",
}
FIX = "Use a decoder-only model such as Llama, Qwen, Mistral, Gemma, Phi-3 or GPT-NeoX."


def check_supported(config: PretrainedConfig) -> None:
    """Raise EdgespecError, with the reason, for a model whose text part is no decoder."""
    with understanding(config):
        reason = _reason_of_the_whole(config) or _refusal(config.get_text_config(decoder=True))
    if reason is not None:
        raise EdgespecError("E_UNSUPPORTED_ARCHITECTURE", f"model type '{config.model_type}' {reason}.", FIX)


def no_tree_reason(config: PretrainedConfig) -> str | None:
    """Return why a model is decoded without trees, as the rest of a sentence; None where nothing is known."""
    with understanding(config):
        return _reason(config.get_text_config(decoder=True))


@contextmanager
def understanding(config: PretrainedConfig) -> Iterator[None]:
    """Within this block, a missing or unknown part of a configuration becomes an EdgespecError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"the configuration of model type '{config.model_type}' is not understood "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}).",
            "Use a model of another family.",
        ) from error


def _reason_of_the_whole(config: PretrainedConfig) -> str | None:
    if config.model_type in _REFUSED:
        return _REFUSED[config.model_type]
    if "lsh" in (getattr(config, "attn_layers", None) or []):  # Reformer's
        if config.hash_seed is None:
            return "sorts keys by random numbers, so that its texts differ from run to run"
        return "sorts keys by hashes, and gives a token other logits alone than with its text, in transformers' code"
    if config.is_encoder_decoder and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "is an encoder with a decoder: it reads the whole prompt before the first token"
    return None


def _refusal(text: PretrainedConfig) -> str | None:
    """Return why a text part is no decoder, as the rest of a sentence."""
    is_encoder = text.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not text.is_encoder_decoder
    if is_encoder and getattr(text, "is_decoder", None) is False:
        return "reads a text in both directions: is_decoder is false in its config.json"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "reads a text in both directions: use_bidirectional_attention is set in its config.json"
    return None


def _reason(text: PretrainedConfig) -> str | None:
    """Return why a text part cannot read trees, as the rest of a sentence; None where nothing is known."""
    if text.model_type in _PLAINLY:
        return _PLAINLY[text.model_type]
    named = set(getattr(text, "layer_types", None) or [])
    unread = dict.fromkeys(named.difference(*(record.kinds for record in MECHANISMS)), "are unknown here")
    for record in MECHANISMS:
        unread |= {kind: why for kind, why in record.unread_kinds(text).items() if kind in named}
    if unread:
        why = dict.fromkeys(unread[kind] for kind in sorted(unread))
        return f"has {', '.join(sorted(unread))} layers, which {'; or '.join(why)}"
    return next((reason for record in MECHANISMS if (reason := record.reason(text)) is not None), None)
