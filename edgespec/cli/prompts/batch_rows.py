"""Rows of an OpenAI batch: `url` and `method` say to which endpoint a row's body goes."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError
from edgespec.validation import shown

DEFAULT_COMPLETION_TOKENS = 16  # new ones of /v1/completions, as OpenAI has it
RESPONSES = "/v1/responses"
# -> what a body has there
ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", RESPONSES: "input"}
FIX = f"Rows of {' and '.join(ENDPOINTS)} are run."


def endpoint(row: Mapping[str, Any]) -> str:
    """Return the path of a row's url, whatever server stands before it; empty where the row has none."""
    url = row.get("url")
    if not isinstance(url, str):
        return "" if url is None else shown(url)
    try:
        return urlsplit(url).path.rstrip("/") or url
    except ValueError:  # half an address of IPv6, or a host that is none
        return url


def is_response(row: Mapping[str, Any]) -> bool:
    """Return whether a row asks for a response."""
    return "body" in row and endpoint(row) == RESPONSES


def endpoint_fault(row: Mapping[str, Any]) -> EdgespecError | None:
    """Return why a row with a body cannot be run here; None where it can, or does not say where it goes."""
    body, method, path = row["body"], row.get("method"), endpoint(row)
    if method is not None and str(method).upper() != "POST":
        return _invalid(f"its method is {shown(method)}, for the url {path or '(none)'}, and only POST is run.")
    if not path:
        return None
    source = ENDPOINTS.get(path)
    if source is None:
        return _invalid(f"its url is {path}, which is no endpoint of a batch here.")
    if body.get(source) is None:
        return _invalid(f'its url is {path}, and its body has no "{source}".')
    return None


def single_prompt(prompt: Any, where: str) -> str | list[int]:
    """Return the prompt of a completion, a text or token ids; raises EdgespecError for several, and for none."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        raise _invalid(f"{where} has {len(prompt)} prompts, and a row has one.", "Write a row for each.")
    is_ids = isinstance(prompt, list) and all(type(part) is int for part in prompt)
    if not is_ids and not isinstance(prompt, str):
        raise _invalid(f'the "prompt" of {where} is neither a text nor token ids.', "Write one of them.")
    if not prompt:
        raise EdgespecError("E_PROMPT_EMPTY", f"{where} has an empty prompt.", "Remove the row.")
    return prompt  # type: ignore[no-any-return]


def echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a completion that echoes its prompt, as rows say it: with what the prompt is scored for."""
    count = body.get("logprobs")
    scores = count is not None or body.get("max_tokens") == 0
    found = {"prompt_logprobs": count if type(count) is int else 0} if scores else {}
    return {**found, **{name: value for name, value in body.items() if name != "echo"}}


def _invalid(what: str, fix: str = FIX) -> EdgespecError:
    return EdgespecError("E_PROMPT_INVALID", what, fix)
