"""Cells of answers of a form: framings, forms, budgets and temperatures, by every way to write and to ask for a text.

The framings: the built-in pair with a template that opens a thought, leaves it to the model, or has none; and with
marks that are tokens of it, as Qwen3's and gpt-oss' are. These take the places of its last tokens.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.chat.tools import Toolset, read_tools
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.sampling.text_grammars import choice_grammar, regex_grammar
from edgespec.text.request import TextRequest
from tests.support.running_server import running_server

HEAD = "{% if tools %}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["main", "run"]}, "count": {"type": "integer", "maximum": 99, "minimum": 0},
                   "pure": {"type": "boolean"}},
    "required": ["name", "count", "pure"], "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": RECORD}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": RECORD}}
CLOSED = {"}": 8}  # objects of any keys end
FORMS: dict[str, dict[str, Any]] = {  # as bodies and rows have them
    "any": {},
    "schema": {"response_format": SCHEMA},
    "object": {"response_format": {"type": "json_object"}, "logit_bias": CLOSED},
    "choice": {"guided_choice": ["first", "second"]},
    "regex": {"guided_regex": "[a-c]{3}[0-9]{2}"},
    "grammar": {"grammar": 'root ::= ("yes" | "no") " " [0-9]{1,3}'},
    "tools forced": {"tools": TOOLS, "tool_choice": "required"},
    "tools free": {"tools": TOOLS},
}
FREE = {"any", "tools free"}  # any words may come
BUDGETS = (None, 0, 8)
ASKED = [{"role": "user", "content": "def main("}]
LENGTH = 200
NONE = TreeSettings(policy="none")
WAYS: dict[str, TreeSettings] = {
    "trees": TreeSettings(size=8, lookup=False),
    "forced and looked up": TreeSettings(policy="lookup", size=16),
    "all": TreeSettings(size=16),
}
COMMON: dict[str, Any] = {"dtype": "float32", "self_check": False, "context_tokens": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How a family writes: its template, and its marks that are tokens; `closes` is made likely, to end a thought."""

    template: str
    marks: tuple[str, ...] = ()
    opens: str = ""  # made likely, to open a thought
    closes: str = ""
    is_open: bool = False  # the prompt has begun a thought
    thinks: bool = True


_HARMONY = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>", "<|return|>", "<|call|>")
_OPEN = HEAD + "<think>{{ '\\n' }}{# '\\n</think>\\n\\n' <tool_call> #}"
FRAMINGS = {
    "built-in, opened": Framing(template=_OPEN, is_open=True),
    "built-in, the model's": Framing(template=HEAD + "{# '<think>\\n' '\\n</think>\\n\\n' <tool_call> #}"),
    "built-in, none": Framing(template=HEAD + "{# <tool_call> #}", thinks=False),
    "Qwen3": Framing(template=_OPEN, marks=("<think>", "</think>", "<tool_call>", "</tool_call>"), closes="</think>",
                     is_open=True),
    "gpt-oss": Framing(template=HEAD + "<|start|>assistant", marks=_HARMONY, opens="an", closes="<|end|>"),
}  # fmt: skip
FRAMINGS["gpt-oss"] = replace(FRAMINGS["gpt-oss"], template=FRAMINGS["gpt-oss"].template + "{# <|channel|> #}")


def write_pair(folder: Path, framing: Framing) -> list[Path]:
    """Write the built-in pair with a framing's marks in the places of its last tokens; return target and draft."""
    for model in ("target", "draft"):
        shutil.copytree(DEMO_FOLDER / model, folder / model)
        path = folder / model / "tokenizer.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        vocab = {token: text for text, token in found["model"]["vocab"].items()}
        for token, mark in enumerate(framing.marks, start=len(vocab) - len(framing.marks)):
            del found["model"]["vocab"][vocab[token]]
            found["model"]["merges"] = [merge for merge in found["model"]["merges"] if "".join(merge) != vocab[token]]
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            found["added_tokens"].append({"id": token, "content": mark, "special": mark in _HARMONY, **flags})
        path.write_text(json.dumps(found), encoding="utf-8")
    return [folder / "target", folder / "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is asked for."""

    framing: str
    form: str
    budget: int | None
    temperature: float
    seed: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields of a body or of a row."""
        form, framing = FORMS[self.form], FRAMINGS[self.framing]
        likely = (framing.opens, framing.closes if self.budget is None else "")
        bias = {**form.get("logit_bias", {}), **{text: 12 for text in likely if text}}
        own = {} if self.budget is None else {"reasoning_budget": self.budget}
        own |= {"logit_bias": bias} if bias else {}
        return {"max_tokens": LENGTH, "temperature": self.temperature, "seed": self.seed, **form, **own}

    def toolset(self) -> Toolset:
        """Return the tools of its answer."""
        form = FORMS[self.form]
        found = read_tools(form.get("tools", []), form.get("tool_choice", "auto"))
        return replace(found, ends_with_words=self.form not in {*FREE, "tools forced"})

    def options(self) -> dict[str, Any]:
        """Return its options in Python."""
        fields = self.fields()
        taken = ("temperature", "seed", "response_format", "grammar", "logit_bias", "reasoning_budget")
        found = {name: fields[name] for name in taken if name in fields}
        if "guided_regex" in fields:
            found["grammar"] = regex_grammar(fields["guided_regex"])
        if "guided_choice" in fields:
            found["grammar"] = choice_grammar(fields["guided_choice"])
        return {**found, "max_new_tokens": LENGTH, "skip_special_tokens": False}

    def request(self, engine: Engine, **more: Any) -> TextRequest:
        """Return its request in Python."""
        options: Any = self.options() | more
        most = engine.max_context
        return self.toolset().request(engine.encode(ASKED), pair=engine.pair, max_context=most, options=options)

    def is_valid(self, content: str, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an answer is what its form says."""
        if self.form == "tools forced":
            return len(calls) == 1 and calls[0]["name"] == "look" and _is_record(json.loads(calls[0]["arguments"]))
        match self.form:
            case "schema":
                return _is_record(found := json.loads(content)) and _tight(found) == content
            case "object":
                return isinstance(json.loads(content), dict)
            case "choice":
                return content in ("first", "second")
            case "regex":
                return len(content) == 5 and content[:3].strip("abc") == "" and content[3:].isdigit()
            case "grammar":
                word, _, number = content.partition(" ")
                return word in ("yes", "no") and number.isdigit() and len(number) <= 3
        return True


def _is_record(found: Any) -> bool:
    return isinstance(found, dict) and found.keys() == RECORD["properties"].keys()  # type: ignore[attr-defined]


def _tight(found: Any) -> str:
    return json.dumps(found, separators=(",", ":"))


def cells(framing: str, seeds: int) -> Iterator[Cell]:
    """Yield the cells of a framing."""
    for form, budget, temperature in itertools.product(FORMS, BUDGETS, (0.0, 0.8)):
        if budget is None or FRAMINGS[framing].thinks:
            for seed in range(seeds if temperature else 1):
                yield Cell(framing=framing, form=form, budget=budget, temperature=temperature, seed=seed)


def all_cells(seeds: int) -> tuple[Counter[str], list[str]]:
    """Return the counts of cells and texts, and what is wrong."""
    count, faults = Counter[str](), []
    for name, framing in FRAMINGS.items():
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            target, draft = write_pair(folder, framing)
            limits = MemoryLimits(max_resident_layers=0)
            memory, streamed = (
                opened.enter_context(Engine.from_pretrained(target, draft=draft, **COMMON, **options))
                for options in ({"parallel": 16}, {"limits": limits})
            )
            for engine in (memory, streamed):
                engine.pair.tokenizer.chat_template = framing.template
            known, before = dict[Cell, Any](), count.total()
            for cell in cells(name, seeds):
                faults += check_cell(memory, streamed, cell, known, count)
            faults += in_company(memory, known, count)
            print(f"{name}: {count.total() - before} counts, {len(faults)} faults", flush=True)
    return count, faults


def written(engine: Engine, tree: TreeSettings, request: TextRequest) -> Any:
    """Return a text by these trees, whose prompt is read anew."""
    engine.use_tree(tree)
    engine.forget()
    return engine.submit(request).result()


def check_cell(memory: Engine, streamed: Engine, cell: Cell, known: dict[Cell, Any], count: Counter[str]) -> list[str]:
    """Return what is wrong with a cell's texts."""
    plain = known[cell] = written(memory, NONE, cell.request(memory))
    texts = {name: written(memory, tree, cell.request(memory)) for name, tree in WAYS.items()}
    texts["streamed"] = written(streamed, WAYS["all"], cell.request(streamed))
    count.update(cells=1, texts=1 + len(texts))
    faults = [f"{cell}: {name} is another text" for name, one in texts.items() if one.token_ids != plain.token_ids]
    ids, toolset = memory.encode(ASKED), cell.toolset()
    message = toolset.message(memory.pair.tokenizer, ids, plain.text)
    num_thought = toolset.num_thought(memory.pair, ids, plain.token_ids)
    count["thoughts"] += num_thought > 0
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if cell.form not in FREE:
        if plain.finish_reason == "length" and not message["content"] and not calls:
            count["cut within the thought"] += 1
        elif plain.finish_reason != "stop" or not cell.is_valid(message["content"] or "", calls):
            faults.append(f"{cell}: the answer is {message} ({plain.finish_reason})")
        else:
            count["valid answers"] += 1
    if cell.budget is not None and FRAMINGS[cell.framing].is_open:
        has_all = num_thought == cell.budget
        count["budgets kept"] += has_all
        faults += [] if has_all else [f"{cell}: {num_thought} tokens of thought"]
    if FRAMINGS[cell.framing].is_open:
        free = known[replace(cell, form="any")]
        is_free = free.token_ids[:num_thought] == plain.token_ids[:num_thought] or cell.form == "object"  # its own bias
        count["thoughts like the free one"] += is_free
        faults += [] if is_free else [f"{cell}: the thought is not the one without a form"]
    return faults


def in_company(engine: Engine, known: Mapping[Cell, Any], count: Counter[str]) -> list[str]:
    """Return what is wrong with texts that are made sixteen at a time, in two orders, by trees that tune themselves."""
    faults = []
    engine.use_tree(None)
    for asked in (list(known), [*itertools.chain.from_iterable(list(known)[start::5] for start in range(5))]):
        engine.forget()
        for number, found in engine.generate_many(cell.request(engine) for cell in asked):
            count["texts in company"] += 1
            if isinstance(found, Exception) or found.token_ids != known[asked[number]].token_ids:
                faults.append(f"{asked[number]}: another text in company")
    return faults


def all_ways(seeds: int) -> tuple[Counter[str], list[str]]:
    """Return the counts of answers by each way to ask for one, and what differs from the text in Python."""
    del seeds
    count, faults = Counter[str](), list[str]()
    for name in ("built-in, opened", "Qwen3", "gpt-oss"):
        with tempfile.TemporaryDirectory() as folder:
            faults += _ways_of(Path(folder), name, count)
            print(f"{name}: {dict(count)}, {len(faults)} faults", flush=True)
    return count, faults


def _ways_of(folder: Path, name: str, count: Counter[str]) -> list[str]:
    target, draft = write_pair(folder, FRAMINGS[name])
    template = folder / "t.jinja"
    template.write_text(FRAMINGS[name].template, encoding="utf-8")
    pair = [str(target), "-md", str(draft), "--dtype", "float32", "--chat-template", str(template)]
    asked = [cell for cell in cells(name, 1) if cell.form != "any"]
    expected, found = dict[tuple[Cell, str], Any](), dict[tuple[Cell, str], tuple[Any, Any]]()
    with Engine.from_pretrained(target, draft=draft, tree=NONE, **COMMON) as engine:
        engine.pair.tokenizer.chat_template = FRAMINGS[name].template
        for number, cell in enumerate(asked):
            plain = written(engine, NONE, cell.request(engine))
            expected[cell, "python"] = _told(cell, engine, plain)
            row = written(engine, NONE, cell.request(engine, name=str(number)))
            expected[cell, "row"] = _told(cell, engine, row)
            if not cell.form.startswith("tools"):
                raw = {name: value for name, value in cell.options().items() if name != "reasoning_budget"}
                expected[cell, "raw"] = written(engine, NONE, engine.request("def main(", **raw)).text
            engine.use_tree(None)
            chat = engine.chat(**cell.options())
            if cell.toolset().seen:
                chat.use_tools(cell.toolset())
            found[cell, "chat in Python"] = _told(cell, engine, chat.send("def main(")), expected[cell, "python"]
    with (
        running_server("--parallel", "16", "-c", "256", *pair[1:], pair[0]) as (address, _),
        httpx.Client(base_url=address, timeout=300) as client,
        ThreadPoolExecutor(16) as clients,
    ):
        answers = clients.map(lambda one: _asked(client, *one), itertools.product(asked, _PROTOCOLS))
        for cell, way, answer in answers:
            if answer is not None:
                found[cell, way] = answer, expected[cell, "raw" if way == "completions" else "python"]
    rows = "".join(
        json.dumps({"id": str(number), "messages": ASKED, **cell.fields()}) + "\n" for number, cell in enumerate(asked)
    )
    (folder / "in.jsonl").write_text(rows, encoding="utf-8")
    output = _run("generate", str(folder / "in.jsonl"), "-m", *pair, "--ordered")
    for cell, line in zip(asked, output.splitlines(), strict=True):
        record = json.loads(line)
        found[cell, "rows"] = _shown(record.get("message") or {"content": record["text"]}), expected[cell, "row"]
    for cell in asked:
        flags = _flags(cell, folder)
        if cell.budget == 8 and not cell.temperature and flags is not None:
            prompt = [*pair, "-p", "def main(", "--temp", "0", "-n", str(LENGTH), "--reasoning-budget", "8", *flags]
            way, own = "chat" if cell.form == "tools free" else "generate", expected[cell, "python"][1]
            answer = _run(way, *(["-m"] if way == "generate" else []), *prompt)
            found[cell, f"{way} -p"] = answer.strip()[-len(own.strip()) :], own.strip()  # behind the thought
    faults = []
    for (cell, way), (answer, own) in found.items():
        count[way] += 1
        if answer != own:
            faults.append(f"{cell} by {way}: {answer!r} is not {own!r}")
    return faults


def _run(*command: str) -> str:
    line = [sys.executable, "-m", "edgespec", *command, "-c", "256"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=300).stdout


def _flags(cell: Cell, folder: Path) -> list[str] | None:
    """Return some cells' form as flags; None for others."""
    bias = [f"--logit-bias={text}={value}" for text, value in cell.fields().get("logit_bias", {}).items()]
    if cell.form == "tools free":
        (folder / "tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
        return ["--tools", str(folder / "tools.json"), *bias]
    if cell.form == "schema":
        return ["--json-schema", json.dumps(RECORD), *bias]
    if cell.form != "grammar":
        return None
    (folder / "form.lark").write_text(cell.fields()["grammar"], encoding="utf-8")
    return ["--grammar", str(folder / "form.lark"), *bias]


def _told(cell: Cell, engine: Engine, result: Any) -> Any:
    return _shown(cell.toolset().message(engine.pair.tokenizer, engine.encode(ASKED), result.text))


def _shown(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return what is thought, said and called."""
    calls = [
        (call["function"]["name"], _tight(json.loads(call["function"]["arguments"])))
        for call in message.get("tool_calls") or ()
    ]
    return (message.get("reasoning_content") or "").strip(), message.get("content") or "", calls


_PROTOCOLS = ("chat", "streamed chat", "responses", "messages", "completions")
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
    if cell.temperature or "logit_bias" in fields or cell.form not in ("schema", "tools forced", "tools free"):
        return None
    budget, schema = cell.budget, {"type": "json_schema", "schema": RECORD}
    if way == "responses":
        body: dict[str, Any] = {"input": ASKED, "max_output_tokens": LENGTH, "temperature": 0.0}
        body |= {} if budget is None else {"reasoning": {"max_tokens": budget}}
        body |= {"text": {"format": {**schema, "name": "a"}}} if cell.form == "schema" else {}
        tools = [{"type": "function", **tool["function"]} for tool in fields.get("tools", ())]  # type: ignore[dict-item]
        return body | {
            name: value for name, value in (("tools", tools), ("tool_choice", fields.get("tool_choice"))) if value
        }
    body = {"messages": ASKED, "max_tokens": LENGTH, "temperature": 0.0}
    body |= {} if budget is None else {"thinking": {"type": "enabled", "budget_tokens": budget}}
    body |= {"output_config": {"format": schema}} if cell.form == "schema" else {}
    body |= {"tools": [{"name": "look", "input_schema": RECORD}]} if "tools" in fields else {}
    return body | ({"tool_choice": {"type": "any"}} if cell.form == "tools forced" else {})
