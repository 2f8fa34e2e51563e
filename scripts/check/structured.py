"""Answers of a form, as DESIGN has them: valid, the same through any trees, behind thoughts that a budget bounds.

    python -m scripts.check.structured [--seeds 2] [--parts cells ways passes times odd random budgets http link]

The built-in pair with templates whose prompt opens a thought, leaves it to the model, or has none, and with marks that
are tokens, as Qwen3's and gpt-oss' are. Each cell is a framing, a form (tools among them), a budget and a temperature.
Its text is written plainly, through trees of the draft, by looked up and forced tokens alone, by all of them, sixteen
in company and with streamed layers: all must be equal, the answer must fit, the thought must have the tokens of its
budget, and be the one without a form. By `ways` each is asked for as chat completions (whole and streamed), responses,
messages, completions, rows, `generate -p`, `chat` and in Python, alone and in company, from memory and streamed, by
each source of trees, and must be the text of plain decoding. Then passes a text for schemas of known keys, and odd
schemas: each is followed, or refused by name within seconds. Asked for by `--parts`: times of compiling, of a mask and
of a step without a grammar; texts of random schemas, sixteen in company; two hundred thoughts of budgets; sixteen
clients of a server; tokens a second over a link of 0.5 GiB/s. Those of random schemas and of the server need the
package jsonschema. The last line is JSON; the status is 1 where anything was wrong.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from edgespec import Engine, MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.hub.names import NO_DRAFT
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.sampling.grammar import json_schema_grammar
from edgespec.sampling.matcher import token_grammar
from scripts.check.structured_cells import ASKED, COMMON, FRAMINGS, HEAD, LENGTH, NONE, RECORD, WAYS, Cell, all_cells
from scripts.check.structured_ways import all_ways
from scripts.situations import throttle_edgespec
from tests.support.odd_schemas import HARD_GRAMMARS, HARD_SCHEMAS, ODD_SCHEMAS, SLOW_SCHEMAS
from tests.support.random_schemas import random_schema
from tests.support.running_server import running_server

OPENED = FRAMINGS["built-in, opened"].template
BOUNDED = ("any", "schema", "choice", "regex")  # of the thoughts that have budgets
PARTS = ["cells", "ways", "passes", "odd", "random", "budgets", "http", "link", "times"]


def schemas() -> dict[str, dict[str, Any]]:
    """Return twenty schemas of records as people ask for them, with and without white space."""
    parts: dict[str, Any] = {
        "text": {"type": "string", "maxLength": 16}, "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "flag": {"type": "boolean"}, "kind": {"enum": ["reading device", "writing device", "neither of them"]},
        "list": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"enum": ["yes", "no"]}},
    }  # fmt: skip

    def record(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        fields = {"properties": dict(properties), "required": list(properties), "additionalProperties": False}
        return {"type": "object", **fields, **more}

    tight = {"x-guidance": {"whitespace_flexible": False}}
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        found[f"one {name}"] = record({name: part}, **tight)
        found[f"nested {name}"] = record({"outer_object": record({f"inner_{name}": part})}, **tight)
        found[f"four fields and a {name}"] = record(
            {"identifier": {"type": "integer", "maximum": 99, "minimum": 0}, "is_valid": {"type": "boolean"},
             "category": {"enum": ["first", "second"]}, name: part}, **tight)  # fmt: skip
        found[f"with white space: {name}"] = record({"identifier": {"type": "boolean"}, name: part})
    return found


def passes(engine: Engine, options: dict[str, Any]) -> dict[str, int]:
    """Return the passes of one text by each way; all texts are equal, or it is an error."""
    engine.pair.tokenizer.chat_template = HEAD
    found, texts = {}, set()
    for name, tree in {"plain": NONE, **WAYS}.items():
        engine.use_tree(tree)
        engine.forget()
        result = engine.generate("# JSON\n", max_new_tokens=120, seed=1, **options)
        found[name] = len(result.passes)
        texts.add(result.token_ids)
    if len(texts) > 1:
        raise SystemExit("texts of a schema differ")
    return found


def odd(engine: Engine) -> tuple[Counter[str], list[str]]:
    """Return what became of odd schemas, and those that took longer than five seconds or failed without a name."""
    count, faults = Counter[str](), []
    asked: dict[str, dict[str, Any]] = {
        name: {"json_schema": one} for name, one in {**ODD_SCHEMAS, **HARD_SCHEMAS, **SLOW_SCHEMAS}.items()
    }
    asked |= {f"grammar: {name}": {"grammar": one} for name, one in HARD_GRAMMARS.items()}
    for name, form in asked.items():
        started = time.perf_counter()
        try:
            result = engine.generate("# JSON\n", **form, max_new_tokens=40, temperature=0.0)
            count["followed" if result.finish_reason == "stop" else "followed, and cut"] += 1
        except EdgespecError as error:
            count["refused" if error.code == "E_GRAMMAR" else f"refused by {error.code}"] += 1
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")
        if (seconds := time.perf_counter() - started) > 5:
            faults.append(f"{name} took {seconds:.1f} s")
        count["longest, in milliseconds"] = max(count["longest, in milliseconds"], round(1e3 * seconds))
    return count, faults


def unlike(schema: Any, text: str) -> str:
    """Return how a text is not what a schema says; empty where it is."""
    try:
        import jsonschema
    except ImportError as error:
        raise SystemExit("random schemas and the server's texts are checked by the package jsonschema.") from error
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r} is not of {json.dumps(schema)}: {str(error).splitlines()[0]}"
    return ""


def in_company(engine: Engine, requests: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of requests in their order, made sixteen at a time."""
    engine.use_tree(None)
    for start in range(0, len(requests), 16):
        engine.forget()
        found = dict(engine.generate_many(requests[start : start + 16]))
        yield from (found[index] for index in sorted(found))


def random_texts(engine: Engine, count: int) -> tuple[Counter[str], list[str]]:
    """Return what became of random schemas, and the texts that are not what theirs says."""
    engine.pair.tokenizer.chat_template = HEAD
    became, faults, asked, requests = Counter[str](), [], [], []
    for number in range(count):
        schema = random_schema(number)
        options: dict[str, Any] = {"json_schema": schema, "max_new_tokens": 200, "temperature": 0.8, "seed": number}
        try:
            requests.append(engine.request("# JSON\n", **options))
            asked.append(schema)
        except EdgespecError as error:
            became[f"refused: {error.what}"] += 1
    for schema, result in zip(asked, in_company(engine, requests), strict=True):
        if isinstance(result, Exception):
            faults.append(f"{json.dumps(schema)}: {result}")
        elif result.finish_reason != "stop":
            became["cut"] += 1
        else:
            became["whole"] += 1
            faults += filter(None, [unlike(schema, result.text)])
    return became, faults


def budgets(engine: Engine) -> tuple[Counter[str], list[str]]:
    """Return the numbers of two hundred texts whose thought has a budget, and those that were not kept to it."""
    tokenizer = engine.pair.tokenizer
    tokenizer.chat_template = OPENED
    close = tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    became, faults, requests, asked = Counter[str](), [], [], list[Cell]()
    for number in range(200):
        cell = Cell(framing="built-in, opened", form=BOUNDED[number % len(BOUNDED)], budget=number // 4,
                    temperature=0.8 * (number % 8 > 3), seed=number)  # fmt: skip
        asked.append(cell)
        requests.append(replace(cell.request(engine), max_new_tokens=number // 4 + LENGTH))
    for number, result in enumerate(in_company(engine, requests)):
        most = number // 4
        answer = result.text.partition("</think>")[2].strip()  # a free one may have the mark as its words
        upto_answer = tokenizer.decode(list(result.token_ids[: most + len(close)]))
        became["kept to the token"] += list(result.token_ids[most : most + len(close)]) == close
        became["closed once"] += upto_answer.count("</think>") == 1
        became["with an answer"] += bool(answer) and asked[number].is_valid(answer, ())
    faults += [f"budgets: {name} {number} of 200" for name, number in became.items() if number != 200]
    return became, faults


def over_http() -> tuple[Counter[str], list[str]]:
    """Return the number of texts of sixteen clients at once, whole and streamed, and those that are not as asked."""
    asked = list(schemas().values()) * 4

    def ask(number: int) -> str:
        body = {
            "messages": ASKED, "max_tokens": 240, "temperature": 0.8 * (number % 2), "seed": number,
            "reasoning_budget": number % 12, "stream": number % 4 > 1, "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": asked[number]}},
        }  # fmt: skip
        answer = client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        if not body["stream"]:
            whole = answer.json()
            (choice,), usage, content = whole["choices"], whole["usage"], whole["choices"][0]["message"]["content"]
        else:
            lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in line["choices"]]
            choice, usage = choices[-1], lines[-1]["usage"]
            content = "".join(each["delta"].get("content") or "" for each in choices)
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        if choice["finish_reason"] != "stop" or thought > number % 12:
            return f"{asked[number]}: {choice['finish_reason']}, {thought} tokens of thought of {number % 12}"
        return unlike(asked[number], content)

    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(OPENED)
        template.flush()
        with (
            running_server("--parallel", "16", "-c", "512", "--chat-template", template.name) as (address, _),
            httpx.Client(base_url=address, timeout=300) as client,
            ThreadPoolExecutor(16) as clients,
        ):
            faults = list(filter(None, clients.map(ask, range(len(asked)))))
    return Counter({"texts": len(asked), "valid": len(asked) - len(faults)}), faults


def over_a_link(common: Mapping[str, Any]) -> dict[str, float]:
    """Return tokens a second of the schemas' texts, greedy, by layers that come over a link."""
    throttle_edgespec(0.5 * 2**30)
    found = {}
    with Engine.from_pretrained(limits=MemoryLimits(max_resident_layers=0), **common) as engine:
        ways = {"plain": NONE, "without a draft": WAYS["forced and looked up"], "default": None}
        for name, tree in ways.items():
            engine.use_tree(tree)
            engine.forget()
            options: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.0}
            results = [engine.generate("# JSON\n", json_schema=schema, **options) for schema in schemas().values()]
            seconds = sum(result.total_s for result in results)
            found[name] = round(sum(len(result.token_ids) for result in results) / seconds, 1)
    return found


def times(engine: Engine, models: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return milliseconds of masks by vocabulary, and of a step without any grammar."""
    pairs = [engine.pair, *(open_pair(model, NO_DRAFT) for model in models)]
    found = {f"{pair.vocab} tokens": mask_times(pair) for pair in pairs}
    for name, tree in {"plain": NONE, "trees": WAYS["trees"]}.items():
        engine.use_tree(tree)
        passes, steps = [], list[float]()
        for _ in range(5):
            engine.forget()
            result = engine.generate("def main(", max_new_tokens=200, temperature=0.0)
            passes += result.passes[1:]
            steps.append((result.total_s - result.time_to_first_token_s) / (len(result.passes) - 1))
        rest = statistics.median(step.rest_s for step in passes)
        own = {"a step": min(steps), "of it beside the pass and the draft": rest}
        found[f"no grammar, {name}"] = {name: round(1e3 * seconds, 3) for name, seconds in own.items()}
    return found


def mask_times(pair: ModelPair) -> dict[str, float]:
    """Return medians of compiling a schema, of a mask and of one five tokens deep, in milliseconds."""
    made, times = time.perf_counter(), dict[str, list[float]]()
    for number in range(21):
        grammar = json_schema_grammar({**RECORD, "title": str(number)})
        started = time.perf_counter()
        found = token_grammar(grammar, pair.tokenizer, vocab=pair.vocab, stop_tokens=pair.stop_tokens)
        if number == 0:
            times["the table of tokens"] = [time.perf_counter() - made]
            continue
        times.setdefault("compiling", []).append(time.perf_counter() - started)
        path = pair.tokenizer.encode('{"name":"main', add_special_tokens=False)
        for name, tokens in (("a mask", path[:0]), ("a mask behind a path", path)):
            matcher = found.matcher()
            started = time.perf_counter()
            matcher.allowed(tokens)
            times.setdefault(name, []).append(time.perf_counter() - started)
    return {name: round(1e3 * statistics.median(own), 3) for name, own in times.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print and return the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="of each cell with a temperature")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["cells", "passes", "odd"])
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="beside the built-in one, for `times`")
    parser.add_argument("--schemas", type=int, default=2000, help="random ones")
    given = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    faults: list[str] = []
    for name, run in (("cells", all_cells), ("ways", all_ways)):
        if name in given.parts:
            report[name], wrong = run(given.seeds)
            faults += wrong
    with Engine.from_pretrained(parallel=16, **COMMON) as memory:
        if "passes" in given.parts:
            report["passes"] = Counter[str]()
            for name, schema in schemas().items():
                own = [passes(memory, {"json_schema": schema, "temperature": value}) for value in (0.0, 0.8)]
                total = {way: sum(each[way] for each in own) for way in own[0]}
                report["passes"].update(total)
                print(f"{name:<32}" + ", ".join(f"{way} {number}" for way, number in total.items()), flush=True)
        if "times" in given.parts:
            report["milliseconds"] = times(memory, given.models)
        checks = {"odd": odd, "random": partial(random_texts, count=given.schemas), "budgets": budgets}
        for name, check in checks.items():
            if name in given.parts:
                report[name], wrong = check(memory)
                faults += wrong
    if "http" in given.parts:
        report["http"], wrong = over_http()
        faults += wrong
    if "link" in given.parts:
        report["tokens a second over a link"] = over_a_link(COMMON)
    for name, found in report.items():
        print(f"{name}: {dict(found)}")
    for fault in faults:
        print(fault)
    print(json.dumps(report | {"faults": len(faults)}))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
