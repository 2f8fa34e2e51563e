"""What a GGUF file says of how texts are made: under the names of a generation_config.json."""

import struct
from typing import Any

from offload.gguf.header import GgufHeader
from offload.gguf.vocabulary import START, end_tokens

SAMPLING = "general.sampling."
NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # others have the same
DRAWS = {"temperature", "top_k", "top_p", "min_p"}  # where one is stated, tokens are drawn
WHOLE_CONTEXT = -1  # of `penalty_last_n`: as many tokens as there are, as a repetition penalty has it
WITH_MIROSTAT = ("mirostat_tau", "mirostat_eta")  # which say nothing without it
WITH_XTC = ("xtc_threshold",)


def generation_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields; a sampler that only llama.cpp has keeps its name."""
    found = {
        NAMES.get(name := key.removeprefix(SAMPLING), name): _short(value)
        for key, value in header.settings.items()
        if key.startswith(SAMPLING)
    }
    if found.get("penalty_last_n") == WHOLE_CONTEXT or found.get("repetition_penalty", 1.0) == 1.0:
        found.pop("penalty_last_n", None)
    for sampler, names in (("mirostat", WITH_MIROSTAT), ("xtc_probability", WITH_XTC)):
        if not found.get(sampler):
            found = {name: value for name, value in found.items() if name not in {sampler, *names}}
    if found.keys() & DRAWS:
        found["do_sample"] = found.get("temperature") != 0
    ends, suppressed = end_tokens(header), header.settings.get(f"{START}suppress_tokens")
    lists = {"eos_token_id": ends, "suppress_tokens": suppressed}
    return {**found, **{name: tokens for name, tokens in lists.items() if tokens}}


def _short(value: Any) -> Any:
    """Return a number as somebody wrote it: 0.6 in float32 is another one in float64."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.6g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value
