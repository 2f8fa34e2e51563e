"""Answers of a form, as DESIGN has them: valid, the same through any trees, behind thoughts that a budget bounds.

    python -m scripts.check.structured [--seeds 2] [--parts cells passes odd random]

The built-in pair with templates whose prompt opens a thought, leaves it to the model, or has none, and with marks that
are tokens in the places of its last ones, as Qwen3's and gpt-oss' are. Each cell is a framing, a form (tools among
them), a budget and a temperature. Its text is written plainly, through trees of the draft, by looked up and forced
tokens alone, by all of them, sixteen in company and with streamed layers: all must be equal, the answer must fit, the
thought must have the tokens of its budget, and be the one without a form. Then passes a text for schemas of known keys,
and odd schemas: each is followed, or refused by name within seconds. Asked for by `--parts`: texts of random schemas,
which need the package jsonschema. The last line is JSON; the status is 1 where anything was wrong.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.chat.answer import answer_format_of
from edgespec.chat.tools import Toolset, read_tools
from edgespec.errors import EdgespecError
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.sampling.grammar import choice_grammar, regex_grammar
from edgespec.text.request import TextRequest
from tests.support.odd_schemas import HARD_GRAMMARS, HARD_SCHEMAS, ODD_SCHEMAS, SLOW_SCHEMAS
from tests.support.random_schemas import random_schema

PARTS = ["cells", "passes", "odd", "random"]
NUM_RANDOM = 2000  # schemas
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
OPENING = 24  # tokens, at most, by which a model opens a thought
_FORMS = ("response_format", "grammar")
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
        own: dict[str, Any] = {} if self.budget is None else {"reasoning_budget": self.budget}
        own["logit_bias"] = {**form.get("logit_bias", {}), **{text: 12 for text in likely if text}}
        if not own["logit_bias"]:
            del own["logit_bias"]
        form = {name: value for name, value in form.items() if name != "logit_bias"}
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
                return _is_record(found := json.loads(content)) and tight(found) == content
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


def tight(found: Any) -> str:
    """Return JSON without white space."""
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
            known, free, before = dict[Cell, Any](), dict[Any, Any](), count.total()
            for cell in cells(name, seeds):
                faults += check_cell(memory, streamed, cell, known, count)
                faults += check_thought(memory, cell, known[cell].token_ids, free, count)
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
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if cell.form not in FREE:
        if plain.finish_reason == "length" and not message["content"] and not calls:
            count["cut within the thought"] += 1
        elif plain.finish_reason != "stop" or not cell.is_valid(message["content"] or "", calls):
            faults.append(f"{cell}: the answer is {message} ({plain.finish_reason})")
        else:
            count["valid answers"] += 1
    return faults


def check_thought(
    engine: Engine, cell: Cell, tokens: Sequence[int], known: dict[Any, Any], count: Counter[str]
) -> list[str]:
    """Return what is wrong with what is thought: it has a budget's tokens, and is what the model thinks without a form.

    Where the model opens the thought itself, the free one begins behind the same tokens.
    """
    ids, toolset = engine.encode(ASKED), cell.toolset()
    num_thought = toolset.num_thought(engine.pair, ids, tokens)
    is_open = FRAMINGS[cell.framing].is_open
    count["budgets kept"] += (has_all := num_thought == cell.budget) and is_open
    if cell.budget is not None and (num_thought > cell.budget or (is_open and not has_all)):
        return [f"{cell}: {num_thought} tokens of thought"]
    if not num_thought:
        return []
    count[f"thoughts: {cell.framing}"] += 1
    tokenizer = engine.pair.tokenizer
    begun = (toolset.reader(tokenizer, answer_format_of(tokenizer), [*ids, *tokens[:at]]) for at in range(OPENING))
    start = next(at for at, reader in enumerate(begun) if reader.is_thinking)
    key = (tokens[:start], json.dumps(cell.fields().get("logit_bias")), replace(cell, form="any"))
    if key not in known:
        options: Any = {name: value for name, value in cell.options().items() if name not in _FORMS}
        known[key] = written(engine, NONE, Toolset().request(
            [*ids, *tokens[:start]], pair=engine.pair, max_context=engine.max_context, options=options))  # fmt: skip
    is_free = known[key].token_ids[:num_thought] == tokens[start : start + num_thought]
    count["thoughts like the free one"] += is_free
    return [] if is_free else [f"{cell}: the thought is not the one without a form"]


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
        raise SystemExit("texts of random schemas are checked by the package jsonschema.") from error
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r} is not of {json.dumps(schema)}: {str(error).splitlines()[0]}"
    return ""


def random_texts(engine: Engine) -> tuple[Counter[str], list[str]]:
    """Return what became of texts of random schemas, sixteen in company, and those that are not what theirs says."""
    engine.pair.tokenizer.chat_template = HEAD
    became, faults, asked, requests = Counter[str](), [], [], []
    for number in range(NUM_RANDOM):
        schema = random_schema(number)
        options: dict[str, Any] = {"json_schema": schema, "max_new_tokens": 200, "temperature": 0.8, "seed": number}
        try:
            requests.append(engine.request("# JSON\n", **options))
            asked.append(schema)
        except EdgespecError as error:
            became[f"refused: {error.what}"] += 1
    engine.use_tree(None)
    for number, result in engine.generate_many(requests):
        if isinstance(result, Exception):
            faults.append(f"{json.dumps(asked[number])}: {result}")
        elif result.finish_reason != "stop":
            became["cut"] += 1
        else:
            became["whole"] += 1
            faults += filter(None, [unlike(asked[number], result.text)])
    return became, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print and return the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="of each cell with a temperature")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    given = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    faults: list[str] = []
    if "cells" in given.parts:
        report["cells"], faults = all_cells(given.seeds)
    with Engine.from_pretrained(parallel=16, **COMMON) as memory:
        if "passes" in given.parts:
            report["passes"] = Counter[str]()
            for name, schema in schemas().items():
                own = [passes(memory, {"json_schema": schema, "temperature": value}) for value in (0.0, 0.8)]
                total = {way: sum(each[way] for each in own) for way in own[0]}
                report["passes"].update(total)
                print(f"{name:<32}" + ", ".join(f"{way} {number}" for way, number in total.items()), flush=True)
        for name, check in {"odd": odd, "random": random_texts}.items():
            if name in given.parts:
                report[name], wrong = check(memory)
                faults += wrong
    for name, found in report.items():
        print(f"{name}: {dict(found)}")
    for fault in faults:
        print(fault)
    print(json.dumps(report | {"faults": len(faults)}))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
