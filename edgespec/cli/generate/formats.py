"""A record in the formats of other tools, and how such a line shows whether its prompt is finished.

`jsonl` is the record itself. `specbench` is what Spec-Bench's evaluation scripts read, `openai-batch` a line
of a batch's output file; both carry the hashes of settings and prompt in fields that are free there. `text` is
the answers alone.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.chat.tools import call_line
from edgespec.cli.generate.requests import Request
from edgespec.cli.prompts.rows import PromptRow
from edgespec.config import MAX_SEED
from edgespec.errors import EdgespecError
from edgespec.hub.names import short_name
from edgespec.text.logprob_entries import completion_logprobs
from edgespec.user_paths import json_text
from edgespec.validation import parse_json

FORMATS = ("jsonl", "specbench", "openai-batch", "text")
BETWEEN_TURNS = "\n\n"  # of texts
FAILED = {"error", "interrupted"}  # finish reasons of rows to run again


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a line of an output file says about a prompt."""

    id: str
    config_hash: str
    prompt_hash: str | None  # None: the record has prompt and settings themselves
    seed: int | None  # of the run
    failed: bool
    record: dict[str, Any]  # the line's content


def check_format(name: str, rows: list[PromptRow]) -> None:
    """Raise EdgespecError for rows that a format has no place for."""
    several = next((row for row in rows if row.follow_ups), None)
    if name == "openai-batch" and several is not None:
        what = f"--format openai-batch holds one answer a row, and {several.where} has {several.num_turns} turns."
        raise EdgespecError("E_SETTING", what, "Use --format jsonl.")


def formatted(name: str, request: Request, record: dict[str, Any]) -> str:
    """Return a record as it is written; nothing where the format has no form for a row that failed."""
    if record["error"] and name in {"text", "specbench"}:
        return ""
    if name == "text":
        calls = record.get("message", {}).get("tool_calls", ())
        return BETWEEN_TURNS.join([*filter(None, record["turns"]), *map(call_line, calls)]) + "\n\n"
    line = record
    if name != "jsonl":
        line = _specbench(request, record) if name == "specbench" else _openai_batch(request, record)
        line |= {"truncated": record["truncated"]} if record["truncated"] else {}
    return json_text(line) + "\n"


def read_entry(name: str, line: bytes) -> Entry | None:
    """Return what a line says about a prompt; None where it is no line of this format."""
    try:
        content = parse_json(line)
        _check_truncated(content)
        return _READERS[name](content)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        return None


def _specbench(request: Request, record: dict[str, Any]) -> dict[str, Any]:
    row = request.row
    turns = record.get("per_turn", [record])
    return {
        "question_id": row.index if row.own_id is None else row.own_id,
        "category": row.category,
        "answer_id": _marked(request, record),
        "model_id": _model_id(record),
        "choices": [
            {
                "index": row.repeat,
                "turns": record["turns"],
                "decoding_steps": [turn["spec"]["passes"] for turn in turns],
                "new_tokens": [turn["usage"]["completion_tokens"] for turn in turns],
                "wall_time": [turn["timings"]["total_s"] for turn in turns],
                "accept_lengths": record["spec"]["accept_lengths"],
            }
        ],
        "tstamp": _created(record).timestamp(),
    }


def _openai_batch(request: Request, record: dict[str, Any]) -> dict[str, Any]:
    mark = _marked(request, record)
    failure, response = None, None
    if record["error"]:
        failure = {"code": record["error"]["type"], "message": record["error"]["message"]}
    else:
        answered = _response if request.row.kind == "response" else _completion
        response = {"status_code": 200, "request_id": f"req-{mark}", "body": answered(request, record, mark)}
    return {"id": f"batch_req-{mark}", "custom_id": record["id"], "response": response, "error": failure}


def _completion(request: Request, record: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return the body of a response: a chat completion, or a plain one for a request of that kind."""
    is_plain = request.row.kind == "completion"
    message = record.get("message", {"role": "assistant", "content": record["text"]})
    answer = {"text": record.get("echo", "") + record["text"]} if is_plain else {"message": message}
    ended = record["finish_reason"] if record["finish_reason"] in ("stop", "tool_calls") else "length"
    usage, entries, of_prompt = record["usage"], record["logprobs"], record.get("prompt_logprobs")
    logprobs: dict[str, Any] | None = None
    if request.row.echoes and request.logprobs is None and "prompt_logprobs" not in record["config"]:
        of_prompt = None  # it asked for the text alone
    if is_plain and (entries is not None or of_prompt is not None):
        prompt = of_prompt or []
        logprobs = completion_logprobs(
            [*prompt, *(entries or [])], prompt=record.get("echo", ""), num_prompt=len(prompt)
        )
    elif entries is not None:
        logprobs = {"content": entries, "refusal": None}
    return {
        "id": f"{'cmpl' if is_plain else 'chatcmpl'}-{mark}",
        "object": "text_completion" if is_plain else "chat.completion",
        "created": int(_created(record).timestamp()),
        "model": _model_id(record),
        "system_fingerprint": record["config_hash"],
        "choices": [{"index": 0, **answer, "logprobs": logprobs, "finish_reason": ended}],
        **({} if is_plain or of_prompt is None else {"prompt_logprobs": of_prompt}),
        "usage": {
            **{name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
            "completion_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
        },
    }


def _response(request: Request, record: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return the body of a response, as the server writes it."""
    from edgespec.serve.response_items import items_of

    is_cut, usage = record["finish_reason"] not in ("stop", "tool_calls"), record["usage"]
    status = "incomplete" if is_cut else "completed"
    return {
        "id": f"resp-{mark}",
        "object": "response",
        "created_at": int(_created(record).timestamp()),
        "model": _model_id(record),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": items_of(record.get("message", {"content": record["text"]}), status),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        },
    }


def _marked(request: Request, record: dict[str, Any]) -> str:
    """Return one name that holds settings, prompt, the run's seed and the id: `config-prompt-seed-id`."""
    return f"{record['config_hash']}-{request.row.digest}-{record['config']['seed']}-{record['id']}"


def _model_id(record: dict[str, Any]) -> str:
    """Return the models' names, without their paths, and the policy that drafted."""
    names = [short_name(Path(record[key])) for key in ("model", "draft_model") if record[key]]
    return "+".join([*names, record["spec"]["policy"]])


def _created(record: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(record["created"])


def _read_jsonl(line: Any) -> Entry:
    return Entry(
        id=_text(line["id"]),
        config_hash=_text(line["config_hash"]),
        prompt_hash=None,
        seed=_seed(config.get("seed")) if isinstance(config := line.get("config"), dict) else None,
        failed=line["error"] is not None or line["finish_reason"] in FAILED,
        record=line,
    )


def _read_specbench(line: Any) -> Entry:
    config, prompt, seed, name = _text(line["answer_id"]).split("-", 3)
    line["choices"][0]["turns"]  # a KeyError where there are none
    return Entry(id=name, config_hash=config, prompt_hash=prompt, seed=_seed(int(seed)), failed=False, record=line)


def _read_openai_batch(line: Any) -> Entry:
    config, prompt, seed, name = _text(line["id"]).removeprefix("batch_req-").split("-", 3)
    failed = line["error"] is not None
    return Entry(id=name, config_hash=config, prompt_hash=prompt, seed=_seed(int(seed)), failed=failed, record=line)


def _check_truncated(line: Any) -> None:
    """Raise TypeError for a line that says in an unknown form what was cut off its prompt."""
    cut = line.get("truncated")
    if cut is not None and not isinstance(cut["side"], str):
        raise TypeError


def _seed(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_SEED else None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_READERS: dict[str, Callable[[Any], Entry]] = {
    "jsonl": _read_jsonl,
    "specbench": _read_specbench,
    "openai-batch": _read_openai_batch,
}
