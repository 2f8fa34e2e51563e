"""Answers of a form by every way to ask for one: each, alone and in company, from memory and streamed, by every source.

A way's settings are a source of trees (none, the draft, what is looked up and forced, all), company (alone, or sixteen
at a time) and where the layers are. Each cell is asked for by each way under some of the sixteen, so that every pair of
values occurs: what does not is a fault. Eight seeds are the whole product.
"""

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from click.testing import CliRunner

from edgespec import Engine, MemoryLimits
from edgespec.cli import cli
from scripts.check.structured_cells import (
    ASKED,
    COMMON,
    FORMS,
    FRAMINGS,
    LENGTH,
    NONE,
    RECORD,
    TOOLS,
    WAYS,
    Cell,
    cells,
    tight,
    write_pair,
    written,
)  # fmt: skip
from tests.support.running_server import running_server

SOURCES = {"plain": NONE, **WAYS}
FLAGS = {"plain": "--policy none", "trees": "--tree-size 8 --lookup off",
         "forced and looked up": "--policy lookup --tree-size 16", "all": "--tree-size 16"}  # fmt: skip
PROTOCOLS = ("chat", "streamed chat", "responses", "messages", "completions")
TERMINALS = {"schema": "generate -p", "grammar": "generate -p", "tools free": "chat -p"}
ASKED_OTHERWISE = ("schema", "object", "tools forced", "tools free")  # of responses and messages
NAMES = ("built-in, opened", "Qwen3", "gpt-oss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the texts of a request are written."""

    source: str
    has_company: bool = False
    is_streamed: bool = False

    def flags(self) -> list[str]:
        """Return it as flags of a command."""
        return [*FLAGS[self.source].split(), *(["-ngl", "0"] if self.is_streamed else [])]


SETTINGS = [
    Setting(source=source, has_company=has_company, is_streamed=is_streamed)
    for source, has_company, is_streamed in itertools.product(SOURCES, (False, True), (False, True))
]


@dataclass(slots=True)
class Found:
    """What was answered, and what was not as it should be."""

    count: Counter[tuple[str, str]] = field(default_factory=Counter)  # by way and source
    pairs: set[frozenset[tuple[str, Any]]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def take(self, cell: Cell, way: str, setting: Setting, answer: Any, own: Any) -> None:
        """Count an answer, and compare it with plain decoding's."""
        self.count[way, setting.source] += 1
        values = {"way": way, **{name: getattr(cell, name) for name in ("framing", "form", "budget", "temperature")},
                  **{name: getattr(setting, name) for name in ("source", "has_company", "is_streamed")}}  # fmt: skip
        self.pairs |= {frozenset(pair) for pair in itertools.combinations(values.items(), 2)}
        if answer != own:
            self.faults.append(f"{cell} by {way}, {setting}: {answer!r} is not {own!r}")

    def missing(self) -> Iterator[str]:
        """Yield the pairs of a way or another value with a setting's that never occurred."""
        known = [one for pair in self.pairs for one in pair]
        values = {name: {value for key, value in known if key == name} for name in dict(known)}
        for one, other in itertools.permutations(values, 2):
            if other in ("source", "has_company", "is_streamed"):
                for pair in itertools.product(values[one], values[other]):
                    is_terminal = str(pair[0]).endswith(" -p") and pair[1] is True and other == "has_company"
                    if frozenset(zip((one, other), pair, strict=True)) not in self.pairs and not is_terminal:
                        yield f"{pair[0]} never came with {other} {pair[1]}"


def settings_of(number: int, way: int, many: int) -> list[Setting]:
    """Return some settings, others for each cell and way."""
    return [SETTINGS[(number + 3 * way + 5 * each) % len(SETTINGS)] for each in range(many)]


def all_ways(seeds: int) -> tuple[Counter[str], list[str]]:
    """Return the counts of answers by way and source, and what differs from the text of plain decoding."""
    found, many = Found(), min(2 * seeds, len(SETTINGS))
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            _ways_of(Path(folder), name, many, found)
            print(f"{name}: {found.count.total()} answers, {len(found.faults)} faults", flush=True)
    found.faults += found.missing()
    for way in dict.fromkeys(way for way, _ in found.count):
        print(f"{way:<16}" + ", ".join(f"{source} {found.count[way, source]}" for source in SOURCES))
    return Counter({"answers": found.count.total(), "pairs of values": len(found.pairs)}), found.faults


def _ways_of(folder: Path, name: str, many: int, found: Found) -> None:
    """Ask for a framing's cells by all ways, each under so many settings."""
    target, draft = write_pair(folder, FRAMINGS[name])
    template = folder / "t.jinja"
    template.write_text(FRAMINGS[name].template, encoding="utf-8")
    pair = [str(target), "-md", str(draft), "--dtype", "float32", "--chat-template", str(template), "--no-self-check"]
    asked = [cell for cell in cells(name, 1) if cell.form != "any"]
    with ExitStack() as opened:
        limits = MemoryLimits(max_resident_layers=0)
        memory, streamed = (
            opened.enter_context(Engine.from_pretrained(target, draft=draft, parallel=16, **COMMON, **options))
            for options in ({}, {"limits": limits})
        )
        for engine in (memory, streamed):
            engine.pair.tokenizer.chat_template = FRAMINGS[name].template
        expected = _expected(memory, asked)
        for number, cell in enumerate(asked):
            for setting in settings_of(number, 0, many):
                engine = streamed if setting.is_streamed else memory
                found.take(cell, "chat in Python", setting, _sent(engine, cell, setting), expected[cell, "python"])
    for source, is_streamed in itertools.product(SOURCES, (False, True)):
        served = Setting(source=source, is_streamed=is_streamed)
        with (
            running_server(*served.flags(), "-np", "16", "-c", "256", *pair[1:], pair[0]) as (address, _),
            httpx.Client(base_url=address, timeout=300) as client,
        ):
            for setting in (served, replace(served, has_company=True)):
                _served(client, asked, setting, many, expected, found)
    for setting in SETTINGS:
        own = {
            str(number): cell
            for number, cell in enumerate(asked)
            if setting in settings_of(number, len(PROTOCOLS), min(3 * many, 16) if setting.has_company else many)
        }
        _rows(folder, pair, own, setting, expected, found)
    for number, cell in enumerate([cell for cell in asked if cell.form in TERMINALS]):
        for setting in dict.fromkeys(replace(one, has_company=False) for one in settings_of(5 * number, 0, many)):
            _terminal(folder, pair, cell, setting, expected, found)


def _expected(engine: Engine, asked: Sequence[Cell]) -> dict[tuple[Cell, str], Any]:
    """Return the texts of plain decoding, alone, as each way shows them."""
    found = dict[tuple[Cell, str], Any]()
    for number, cell in enumerate(asked):
        found[cell, "python"] = _told(cell, engine, written(engine, NONE, cell.request(engine)))
        found[cell, "row"] = _told(cell, engine, written(engine, NONE, cell.request(engine, name=str(number))))
        if cell.form in ASKED_OTHERWISE:
            other = replace(cell, is_biased=False)
            found[cell, "otherwise"] = _told(cell, engine, written(engine, NONE, other.request(engine)))
        if not cell.form.startswith("tools"):
            raw = {name: value for name, value in cell.options().items() if name != "reasoning_budget"}
            found[cell, "raw"] = written(engine, NONE, engine.request("def main(", **raw)).text
    return found


def _sent(engine: Engine, cell: Cell, setting: Setting) -> Any:
    """Return what a chat in Python answers, beside fifteen texts where it has company."""
    engine.use_tree(SOURCES[setting.source])
    engine.forget()
    others = [engine.submit(cell.request(engine, name=str(number))) for number in range(15 * setting.has_company)]
    chat = engine.chat(**cell.options())
    if cell.toolset().seen:
        chat.use_tools(cell.toolset())
    answer = _told(cell, engine, chat.send("def main("))
    for other in others:
        other.result()
    return answer


def _served(
    client: httpx.Client,
    asked: Sequence[Cell],
    setting: Setting,
    many: int,
    expected: Mapping[tuple[Cell, str], Any],
    found: Found,
) -> None:
    """Ask a server for the texts that are a setting's own, sixteen at a time or one by one."""
    texts = {"completions": "raw", "responses": "otherwise", "messages": "otherwise"}
    own = [
        (cell, way)
        for (number, cell), (place, way) in itertools.product(enumerate(asked), enumerate(PROTOCOLS))
        if _body(cell, way) is not None and setting in settings_of(number, place, many)
    ]
    with ThreadPoolExecutor(16 if setting.has_company else 1) as clients:
        for cell, way, answer in clients.map(lambda one: _asked(client, *one), own):
            found.take(cell, way, setting, answer, expected[cell, texts.get(way, "python")])


def _rows(
    folder: Path, pair: Sequence[str], own: Mapping[str, Cell], setting: Setting,
    expected: Mapping[tuple[Cell, str], Any], found: Found,
) -> None:  # fmt: skip
    """Answer a file of the rows that are a setting's own."""
    rows = (json.dumps({"id": name, "messages": ASKED, **cell.fields()}) + "\n" for name, cell in own.items())
    (folder / "in.jsonl").write_text("".join(rows), encoding="utf-8")
    many = "16" if setting.has_company else "1"
    output = _run("generate", str(folder / "in.jsonl"), "-m", *pair, "--ordered", *setting.flags(), "-np", many)
    for cell, line in zip(own.values(), output.splitlines(), strict=True):
        record = json.loads(line)
        answer = _shown(record.get("message") or {"content": record.get("text")})
        found.take(cell, "rows", setting, answer, expected[cell, "row"])


def _terminal(
    folder: Path, pair: Sequence[str], cell: Cell, setting: Setting,
    expected: Mapping[tuple[Cell, str], Any], found: Found,
) -> None:  # fmt: skip
    """Ask for a cell at the terminal; what is thought comes before what is compared."""
    way, text = TERMINALS[cell.form], expected[cell, "python"][1].strip()
    prompt = [*pair, "-p", "def main(", "--temp", str(cell.temperature), "--seed", "0", "-n", str(LENGTH)]
    prompt += [] if cell.budget is None else ["--reasoning-budget", str(cell.budget)]
    flags = [*_flags(cell, folder), *setting.flags()]
    answer = _run(*way.split()[:1], *(["-m"] if way == "generate -p" else []), *prompt, *flags).strip()
    found.take(cell, way, setting, answer[len(answer) - len(text) :], text)


def _run(*command: str) -> str:
    return CliRunner().invoke(cli, [*command, "-c", "256"], prog_name="edgespec").stdout


def _flags(cell: Cell, folder: Path) -> list[str]:
    """Return a cell's form as flags."""
    bias = [f"--logit-bias={text}={value}" for text, value in cell.fields().get("logit_bias", {}).items()]
    if cell.form == "tools free":
        (folder / "tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
        return ["--tools", str(folder / "tools.json"), *bias]
    if cell.form == "schema":
        return ["--json-schema", json.dumps(RECORD), *bias]
    (folder / "form.lark").write_text(FORMS["grammar"]["grammar"], encoding="utf-8")
    return ["--grammar", str(folder / "form.lark"), *bias]


def _told(cell: Cell, engine: Engine, result: Any) -> Any:
    return _shown(cell.toolset().message(engine.pair.tokenizer, engine.encode(ASKED), result.text))


def _shown(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return what is thought, said and called."""
    calls = [
        (call["function"]["name"], tight(json.loads(call["function"]["arguments"])))
        for call in message.get("tool_calls") or ()
    ]
    return (message.get("reasoning_content") or "").strip(), message.get("content") or "", calls


_PATHS = {"chat": "chat/completions", "streamed chat": "chat/completions"}


def _asked(client: httpx.Client, cell: Cell, way: str) -> tuple[Cell, str, Any]:
    """Return what a server answers to a cell by a protocol, as `_shown` has it; None where it has no such request."""
    body = _body(cell, way)
    if body is None:
        return cell, way, None
    answer = client.post(f"/v1/{_PATHS.get(way, way)}", json=body)
    if answer.is_error:
        return cell, way, answer.text
    if way == "streamed chat":
        lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return cell, way, _joined([choice["delta"] for line in lines for choice in line["choices"]])
    found = answer.json()
    if way == "chat":
        return cell, way, _shown(found["choices"][0]["message"])
    if way == "completions":
        return cell, way, found["choices"][0]["text"]
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    for part in found["output" if way == "responses" else "content"]:
        match part["type"]:
            case "reasoning":
                message["reasoning_content"] += part["content"][0]["text"]
            case "message":
                message["content"] += part["content"][0]["text"]
            case "thinking":
                message["reasoning_content"] += part["thinking"]
            case "text":
                message["content"] += part["text"]
            case "function_call":
                message["tool_calls"].append({"function": part})
            case "tool_use":
                message["tool_calls"].append({"function": {**part, "arguments": json.dumps(part["input"])}})
    return cell, way, _shown(message)


def _joined(deltas: Sequence[Mapping[str, Any]]) -> Any:
    """Return the message that the deltas of a stream are of."""
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    names = {call["index"]: call["function"]["name"] for call in calls if call["function"].get("name")}
    written = dict.fromkeys(names, "")
    for call in calls:
        written[call["index"]] += call["function"].get("arguments") or ""
    texts = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")}
    functions = [{"function": {"name": names[index], "arguments": written[index]}} for index in names]
    return _shown({**texts, "tool_calls": functions})


def _body(cell: Cell, way: str) -> dict[str, Any] | None:
    """Return a cell as a protocol has it; None where it lacks a part of it."""
    fields = cell.fields()
    if way in _PATHS:
        return {"messages": ASKED, **fields, "stream": way == "streamed chat"}
    if way == "completions":
        fields.pop("reasoning_budget", None)
        return None if "tools" in fields else {"prompt": "def main(", **fields}
    if cell.form not in ASKED_OTHERWISE or (cell.form == "object" and way == "messages"):
        return None
    budget, schema = cell.budget, {"type": "json_schema", "schema": RECORD}
    drawn = {"temperature": cell.temperature, "seed": cell.seed}
    if way == "responses":
        body: dict[str, Any] = {"input": ASKED, "max_output_tokens": LENGTH, **drawn}
        body |= {} if budget is None else {"reasoning": {"max_tokens": budget}}
        body |= {"text": {"format": {**schema, "name": "a"}}} if cell.form == "schema" else {}
        body |= {"text": {"format": {"type": "json_object"}}} if cell.form == "object" else {}
        tools = [{"type": "function", **tool["function"]} for tool in fields.get("tools", ())]  # type: ignore[dict-item]
        return body | {
            name: value for name, value in (("tools", tools), ("tool_choice", fields.get("tool_choice"))) if value
        }
    body = {"messages": ASKED, "max_tokens": LENGTH, **drawn}
    body |= {} if budget is None else {"thinking": {"type": "enabled", "budget_tokens": budget}}
    body |= {"output_config": {"format": schema}} if cell.form == "schema" else {}
    body |= {"tools": [{"name": "look", "input_schema": RECORD}]} if "tools" in fields else {}
    return body | ({"tool_choice": {"type": "any"}} if cell.form == "tools forced" else {})
