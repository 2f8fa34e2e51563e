"""Write answers as models write them, right and wrong, and look what clients get of each: whole, streamed, cut.

    python -m scripts.check.calls --samples 100000
    python -m scripts.check.calls --samples 1000 --family glm --first 17

No model runs: pieces of text go straight to the reader of answers, and of every fifth sample through chat completions,
messages or responses. Each word that is written is unlike all others. What holds for every sample: nothing raises; each
whole word is in a call, in the text or in the thought, once; arguments are JSON of an object; where nothing wrong was
written, the calls are those that were meant; the finish says whether the model or a bound ended the text; the pieces
of a stream are the whole answer, field by field. Prints counts by family, and faults with the number that makes each
again. Exits 1 where there are any.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from edgespec.chat.answer import AnswerReader
from edgespec.config import SamplingSettings
from edgespec.pair.find import find_pair
from edgespec.pair.pair import open_pair
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.answer import _event
from edgespec.serve.anthropic_messages import MessageAnswer
from edgespec.serve.chat import ChatTexts
from edgespec.serve.openai_chat import ChatBody, ChatCompletion
from edgespec.serve.openai_responses import ResponseAnswer, ResponsesBody
from edgespec.serve.request_fields import UnusedFields
from edgespec.serve.request_queue import TextDelta, TextEnded, TextEvent
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.tuning.step import StepResult
from edgespec.validation import parse_json
from scripts.check.written_calls import FAMILIES, TOOLS, Family, Sample, drawn

NUM_SHOWN = 5  # faults of a family
ONE_IN = 5  # samples go through a protocol, each in turn
SHARE_LOGPROBS = 0.1
STOPS = {"stop": "stop", "length": "length", "context": "length"}


@dataclass
class Counts:
    """What became of a family's samples."""

    samples: int = 0
    calls: int = 0
    as_meant: int = 0  # samples without anything wrong, whose calls are those that were meant
    cut: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Check all families."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000, help="of each family")
    parser.add_argument("--family", nargs="*", help="by name")
    parser.add_argument("--first", type=int, default=0, help="number of the first sample")
    args = parser.parse_args()
    num_faults = 0
    for family in FAMILIES:
        if args.family and family.name not in args.family:
            continue
        started = time.perf_counter()
        found = check(family, range(args.first, args.first + args.samples))
        num_faults += found.faults.total()
        print(
            f"{family.name}: {found.samples} samples, {found.cut} cut, {found.calls} calls, {found.as_meant} as meant, "
            f"{found.faults.total()} faults, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        for fault, count in found.faults.most_common():
            print(f"  {count} {fault}")
    print(json.dumps({"faults": num_faults}))
    return 1 if num_faults else 0


def check(family: Family, numbers: range) -> Counts:
    """Check samples of a family, by their numbers."""
    counts, tokenizer = Counts(), open_pair(*find_pair(None, None)).tokenizer
    protocols: Sequence[Callable[..., None]] = (_chat, _messages, _responses)
    for number in numbers:
        draw = random.Random(f"{family.name} {number}")
        sample = drawn(family, draw)
        counts.samples += 1
        counts.cut += sample.finish != "stop"
        try:
            parts = _check_parts(family, sample, draw, counts)
            if number % ONE_IN == 0:
                protocols[number // ONE_IN % len(protocols)](family, sample, draw, tokenizer, parts)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:90]
            if counts.faults.total() < NUM_SHOWN:
                print(f"{family.name} --first {number} --samples 1: {sample.text!r}")
                traceback.print_exc(limit=-2)
            counts.faults[what] += 1
    return counts


def reader_of(family: Family, sample: Sample) -> AnswerReader:
    """Return a reader of a sample."""
    return AnswerReader(family.format, prompt_end=sample.prompt_end, tools=TOOLS, has_one_call=sample.has_one_call)


def joined(parts: Sequence[Any]) -> dict[str, Any]:
    """Return what parts are together."""
    calls = [(part.call.name, part.call.arguments) for part in parts if part.call is not None]
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    return {**texts, "calls": calls}


def pieces_of(text: str, draw: random.Random) -> list[str]:
    """Return a text in pieces of a few characters, as tokens and passes cut it."""
    most, pieces, at = draw.choice([1, 4, 8, 20, 60]), [], 0
    while at < len(text):
        size = 1 + int(draw.random() * most)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def _check_parts(family: Family, sample: Sample, draw: random.Random, counts: Counts) -> dict[str, Any]:
    reader = reader_of(family, sample)
    whole = joined([*reader.feed(sample.text), *reader.end()])
    reader = reader_of(family, sample)
    streamed = joined([part for piece in pieces_of(sample.text, draw) for part in reader.feed(piece)] + reader.end())
    assert streamed == whole, f"streamed is not whole: {streamed} {whole}"
    values = [parse_json(arguments, is_strict=True) for _, arguments in whole["calls"]]
    assert all(isinstance(value, dict) for value in values), "arguments are no object"
    counts.calls += len(values)
    if sample.has_one_call:
        assert len(values) <= 1, "several calls"
    else:
        out = whole["content"] + " " + whole["reasoning"] + " " + json.dumps(whole["calls"])
        for word in sample.words:
            assert out.count(word) == 1, f"a word is out {min(out.count(word), 2)} times"
    if sample.meant is not None and not sample.has_one_call:
        found = [(name, value) for (name, _), value in zip(whole["calls"], values, strict=True)]
        assert found == sample.meant, f"not the calls that were meant: {found} {sample.meant}"
        counts.as_meant += 1
    return whole


def _run(made: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns that waits for nothing."""
    try:
        made.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


async def _all(parts: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(parts) as found:
        return [part async for part in found]


class _Queue:
    """A queue that hands out the pieces of one text."""

    def __init__(self, tokenizer: Any, chunks: Sequence[TextChunk], result: GenerationResult) -> None:
        self.engine = SimpleNamespace(pair=SimpleNamespace(tokenizer=tokenizer))
        self._chunks, self._result = chunks, result

    async def events(self, requests: Any, *, started: list[Any], num_thought: Any) -> AsyncGenerator[TextEvent, None]:
        del requests, num_thought
        started.append(SimpleNamespace(cancel=lambda: None))
        for chunk in self._chunks:
            yield TextDelta(index=0, chunk=chunk)
        yield TextEnded(index=0, result=self._result)


def _texts(family: Family, sample: Sample, draw: random.Random, tokenizer: Any) -> tuple[Any, Callable[[], ChatTexts]]:
    """Return a queue, and what makes the answer anew."""
    chunks, pieces, has_logprobs = [], [*pieces_of(sample.text, draw), ""], draw.random() < SHARE_LOGPROBS
    for number, piece in enumerate(pieces):
        tokens = (300 + number, 301 + number)[: 1 + number % 2]
        logprobs = tuple(TokenLogprob(token=token, logprob=-number / 9, top=((token, -0.5),)) for token in tokens)
        finish: Any = None if number < len(pieces) - 1 else "stop" if sample.finish == "stop" else "length"
        step = StepResult(tokens=tokens, logprobs=logprobs if has_logprobs else (), finish=finish, num_drafted=0,
                          is_prefill=number == 0, grow_s=0.0, target_s=0.1, rest_s=0.0)  # fmt: skip
        chunks.append(TextChunk(text=piece, step=step))
    result = GenerationResult(
        text=sample.text, token_ids=tuple(token for chunk in chunks for token in chunk.step.tokens),
        finish_reason=sample.finish, prompt_tokens=7, seed=1, sampling=SamplingSettings(),
        steps=tuple(chunk.step for chunk in chunks), total_s=1.0,
    )  # fmt: skip
    queue, requests = _Queue(tokenizer, chunks, result), [SimpleNamespace(ids=[1] * 7, stop_tokens=frozenset())]
    toolset = SimpleNamespace(reader=lambda *_: reader_of(family, sample), num_thought=lambda *_: 0)
    return queue, lambda: ChatTexts(queue, requests, toolset)  # type: ignore[arg-type]


def _sent(parts: Sequence[Any]) -> list[Any]:
    """Return a stream's objects as a client reads them."""
    lines = [_event(part) for part in parts]
    text = "".join(lines).encode().decode()
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [parse_json(line, is_strict=True) for line in data if line != "[DONE]"]


def _read(whole: Any) -> Any:
    return parse_json(json.dumps(whole, ensure_ascii=False, allow_nan=False).encode(), is_strict=True)


def _reason(sample: Sample, found: dict[str, Any]) -> str:
    """Return why an answer ended."""
    has_ended = sample.finish == "stop" or (sample.has_one_call and found["calls"])
    return "calls" if found["calls"] and has_ended else STOPS[sample.finish]


def _chat(family: Family, sample: Sample, draw: random.Random, tokenizer: Any, found: dict[str, Any]) -> None:
    queue, make = _texts(family, sample, draw, tokenizer)
    body = ChatBody(messages=[{"role": "user", "content": "x"}], stream_options={"include_usage": True})  # type: ignore[arg-type]
    chunks = _sent(_run(_all(ChatCompletion(queue, "m", body, make()).chunks())))
    whole = _read(_run(ChatCompletion(queue, "m", body, make()).whole()))
    (choice,) = whole["choices"]
    choices = [part for chunk in chunks for part in chunk["choices"]]
    deltas = [part["delta"] for part in choices]
    message = choice["message"]
    for name in ("content", "reasoning_content"):
        text = "".join(delta.get(name) or "" for delta in deltas)
        assert text == (message.get(name) or ""), f"chat: {name} of the stream is another"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls))), "chat: numbers of calls"
    functions = [call["function"] for call in calls]
    assert functions == [call["function"] for call in message.get("tool_calls", [])], "chat: calls of the stream"
    assert [(one["name"], one["arguments"]) for one in functions] == found["calls"], "chat: calls are others"
    entries = [entry for part in choices if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert entries == (choice["logprobs"] or {"content": []})["content"], "chat: log-probabilities of the stream"
    reasons = [part["finish_reason"] for part in choices if part["finish_reason"]]
    wanted = {"calls": "tool_calls"}.get(_reason(sample, found), _reason(sample, found))
    assert reasons == [choice["finish_reason"]] == [wanted], f"chat: finish {reasons} {choice['finish_reason']}"
    assert chunks[-1]["usage"] == whole["usage"], "chat: usage of the stream"


def _messages(family: Family, sample: Sample, draw: random.Random, tokenizer: Any, found: dict[str, Any]) -> None:
    _, make = _texts(family, sample, draw, tokenizer)
    events = _sent(_run(_all(MessageAnswer("m", make()).chunks())))
    whole = _read(_run(MessageAnswer("m", make()).whole()))
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks), "messages: numbers of blocks"
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for name in ("text", "thinking"):
                blocks[-1][name] = blocks[-1].get(name, "") + delta.get(name, "")
            blocks[-1]["json"] += delta.get("partial_json", "")
    assert len(blocks) == len(whole["content"]), "messages: blocks of the stream"
    for block, other in zip(blocks, whole["content"], strict=True):
        assert block["type"] == other["type"], "messages: types of blocks"
        if other["type"] == "tool_use":
            assert (block["name"], parse_json(block["json"], is_strict=True)) == (other["name"], other["input"])
        else:
            name = "text" if other["type"] == "text" else "thinking"
            assert block[name] == other[name], "messages: a block's text"
    texts = "".join(block.get("text", "") for block in whole["content"])
    assert texts == found["content"], "messages: the text is another"
    (ending,) = (event for event in events if event["type"] == "message_delta")
    wanted = {"calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}[_reason(sample, found)]
    assert ending["delta"]["stop_reason"] == whole["stop_reason"] == wanted, "messages: why it ended"
    assert ending["usage"] == whole["usage"], "messages: usage"


def _responses(family: Family, sample: Sample, draw: random.Random, tokenizer: Any, found: dict[str, Any]) -> None:
    _, make = _texts(family, sample, draw, tokenizer)
    body: Any = ResponsesBody(input="x")
    job = body.job(UnusedFields(lambda _what: None))
    events = _sent(_run(_all(ResponseAnswer("m", body, make(), job).chunks())))
    whole = _read(_run(ResponseAnswer("m", body, make(), job).whole()))
    last, items = events[-1]["response"], [_named(item) for item in whole["output"]]
    assert [_named(item) for item in last["output"]] == items, "responses: items of the stream"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [_named(item) for item in done] == items, "responses: items that were done"
    written = dict.fromkeys(range(len(items)), "")
    for event in events:
        written[event.get("output_index", -1)] = written.get(event.get("output_index", -1), "") + (
            event["delta"] if event["type"].endswith(".delta") else ""
        )
    for number, item in enumerate(items):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert written[number] == text, "responses: pieces of an item"
    is_cut = _reason(sample, found) == "length"
    assert last["status"] == whole["status"] == ("incomplete" if is_cut else "completed"), "responses: status"
    assert last["usage"] == whole["usage"], "responses: usage"
    assert [event["sequence_number"] for event in events] == list(range(len(events))), "responses: numbers of events"


def _named(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in {"id", "call_id"}}


if __name__ == "__main__":
    sys.exit(main())
