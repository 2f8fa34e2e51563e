"""What OpenAI's protocols have in common: fields of sampling, usage, timings, errors."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from annotated_types import MaxLen, MinLen
from pydantic import AfterValidator, BeforeValidator, Field

from edgespec.config import MAX_LOGPROBS
from edgespec.sampling.grammar import ANY_OBJECT, choice_grammar, regex_grammar
from edgespec.serve.body import Fields, Items
from edgespec.serve.refusal import BAD_REQUEST, FORBIDDEN, NOT_FOUND, TOO_MANY, UNAUTHORIZED, RefusalError
from edgespec.serve.served_model import LoraScale
from edgespec.text.bias import token_named
from edgespec.text.request import TextOptions
from edgespec.text.results import GenerationResult

MAX_SAMPLES = 128  # of one request, as OpenAI has it
NO_BOUND = -1  # of an answer's tokens, as llama.cpp has it
MAX_STOPS, MAX_BIASES, MAX_CHOICES = 64, 1 << 14, 1 << 14
_KINDS = {
    BAD_REQUEST: "invalid_request_error", UNAUTHORIZED: "authentication_error", FORBIDDEN: "permission_error",
    NOT_FOUND: "not_found_error", TOO_MANY: "rate_limit_error",
}  # fmt: skip
_CODES = {"E_CONTEXT": "context_length_exceeded", "E_MODEL_NOT_FOUND": "model_not_found"}


def _length(count: int) -> int:
    if count < 1 and count != NO_BOUND:
        raise ValueError(f"1 or more, or {NO_BOUND} for all that the context holds")
    return count


def _length_or_none(count: int) -> int:
    return count if count == 0 else _length(count)


LengthOrNone = Annotated[int, AfterValidator(_length_or_none)]  # 0: nothing is written
Length = Annotated[int, AfterValidator(_length)]
Budget = Annotated[int, Field(ge=-1)]  # tokens of thought; -1 is any number


def _of_few_tokens(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_BIASES:
        raise ValueError(f"it has {len(bias)} tokens, and {MAX_BIASES} may be")
    return bias


Choices = Annotated[Items[Annotated[str, MinLen(1)]], MaxLen(MAX_CHOICES)]


class StreamOptions(Fields):
    """What a stream says beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # of the text so far in each chunk, as vLLM has it
    include_obfuscation: bool = False  # nothing is encrypted on the way, so there is nothing to hide


class StructuredOutputs(Fields):
    """vLLM's form of what a text has to match; how that is compiled is nobody's affair."""

    EMPTY_COUNTS = frozenset({"json"})

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_fallback: bool = False
    backend: str | None = None


class SamplingFields(Fields):
    """The fields that say how texts are drawn, with those of llama.cpp and vLLM."""

    EMPTY_COUNTS = frozenset({"json_schema", "lora"})

    model: str = ""  # read before the others: `served_model.asked_model`
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    max_tokens: Length | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_of_few_tokens)] = None
    seed: int | None = None
    stop: str | Annotated[Items[str], MaxLen(MAX_STOPS)] | None = None
    stop_token_ids: Items[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    lora: Items[LoraScale] | None = None

    def text_options(self) -> TextOptions:
        """Return the options of the texts; raises RefusalError where several forms of a text are given."""
        bias = None if self.logit_bias is None else {token_named(key): value for key, value in self.logit_bias.items()}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        options = {
            "max_new_tokens": self.max_tokens, "min_new_tokens": self.min_tokens, "temperature": self.temperature,
            "top_p": self.top_p, "top_k": 0 if self.top_k == -1 else self.top_k, "min_p": self.min_p,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty, "logit_bias": bias, "seed": self.seed,
            "stop": [stop for stop in stops or () if stop] or None, "ignore_eos": self.ignore_eos,
            "cache_prompt": self.cache_prompt, **self._constraint(),
        }  # fmt: skip
        return cast(TextOptions, {name: value for name, value in options.items() if value is not None})

    def _constraint(self) -> dict[str, Any]:
        """Return the option that says what a text has to match, if there is one."""
        nested = self.structured_outputs
        options = {
            "response_format": (
                "response_format",
                None if _is_any_text(self.response_format) else self.response_format,
            ),
            "json_schema": ("json_schema", self.json_schema),
            "grammar": ("grammar", self.grammar),
            "guided_regex": ("grammar", self.guided_regex and regex_grammar(self.guided_regex)),
            "guided_choice": ("grammar", self.guided_choice and choice_grammar(self.guided_choice)),
            "structured_outputs.json": ("json_schema", nested.json_),
            "structured_outputs.json_object": ("json_schema", ANY_OBJECT if nested.json_object else None),
            "structured_outputs.regex": ("grammar", nested.regex and regex_grammar(nested.regex)),
            "structured_outputs.choice": ("grammar", nested.choice and choice_grammar(nested.choice)),
            "structured_outputs.grammar": ("grammar", nested.grammar),
        }
        found = {name: option for name, option in options.items() if option[1] is not None}
        if len(found) > 1:
            what = f"{' and '.join(map(repr, found))} each say what the text has to match. Leave in one of them."
            raise RefusalError(BAD_REQUEST, what, code="invalid_value", field=list(found)[1])
        return dict(found.values())


def _is_any_text(response_format: Mapping[str, Any] | None) -> bool:
    return response_format is None or response_format.get("type") == "text"


LogprobCount = Field(default=None, ge=0, le=MAX_LOGPROBS)


def new_id(kind: str) -> str:
    """Return the id of an answer."""
    return f"{kind}-{secrets.token_hex(12)}"


def now_s() -> int:
    """Return the seconds since 1970 at which an answer begins."""
    return int(time.time())


def finish_reason(result: GenerationResult) -> str:
    """Return why a text ended: 'length' also at the context's end, and where it was interrupted."""
    return "stop" if result.finish_reason == "stop" else "length"


def usage(results: Sequence[GenerationResult], num_prompts: int = 1, *, num_thought: int = 0) -> dict[str, Any]:
    """Return the numbers of tokens of texts, whose prompts are counted once; `num_thought` of them are thoughts."""
    samples = max(1, len(results) // num_prompts)
    first = results[::samples]
    read = sum(result.prompt_tokens for result in first)
    made = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.cached_tokens for result in first),
            **image_tokens(sum(result.image_tokens for result in first)),
        },
        "completion_tokens_details": {"reasoning_tokens": num_thought},
    }


def image_tokens(count: int) -> dict[str, int]:
    """Return the number of a prompt's tokens that are rows of pictures, where it has some."""
    return {"image_tokens": count} if count else {}


def usage_so_far(num_prompt: int, num_written: int) -> dict[str, int]:
    """Return the numbers of tokens of one text that is being written."""
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_written, "total_tokens": num_prompt + num_written,
    }  # fmt: skip


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return seconds and drafted tokens of texts, by llama.cpp's names."""
    read = sum(result.prompt_tokens - result.cached_tokens for result in results)
    made = sum(len(result.token_ids) for result in results)
    read_s = sum(result.prefill_s for result in results)
    made_s = sum(result.total_s - result.time_to_first_token_s for result in results)
    passes = [step for result in results for step in result.passes]
    return {
        "cache_n": sum(result.cached_tokens for result in results),
        "prompt_n": read,
        "prompt_ms": 1000 * read_s,
        "prompt_per_second": read / read_s if read_s else None,
        "predicted_n": made,
        "predicted_ms": 1000 * made_s,
        "predicted_per_second": (made - len(results)) / made_s if made_s > 0 and made > len(results) else None,
        "draft_n": sum(step.num_drafted for step in passes),
        "draft_n_accepted": sum(step.num_accepted for step in passes),
        "tokens_per_pass": sum(len(step.tokens) for step in passes) / len(passes) if passes else None,
    }


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {
        "error": {
            "message": refusal.message,
            "type": _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error"),
            "param": refusal.field,
            "code": _CODES.get(refusal.code, refusal.code),
        }
    }
