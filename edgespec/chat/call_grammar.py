"""The grammars of answers that call tools.

One call is required; or strict ones fit among any words; or there are calls, or an answer that has a grammar itself.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from edgespec.chat.answer import AnswerFormat, Tool
from edgespec.chat.answer_frame import (
    SPACE,
    Thought,
    before_answer,
    either,
    inner_answer,
    marked,
    marks_of_thoughts,
    quoted,
    thought_rules,
    until,
    without,
    words,
)
from edgespec.chat.bare_call import TEXT_BOUNDS, BareArguments, bare_rules, unheld
from edgespec.chat.call_values import KINDS, parts_of, schema_parts
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar, bounded_json, refused, schema_to_follow
from edgespec.validation import shown


def forced_calls(answer_format: AnswerFormat | None, tools: Sequence[Tool], thought: Thought) -> Grammar:
    """Return the grammar of an answer that is one call of these tools; raises EdgespecError without such a form."""
    answer_format = _checked(answer_format, "a call of a tool")
    before = before_answer(answer_format, thought)
    rules = [f"start: {before} call", *_call(answer_format, tools, fits=lambda _: True)]
    return _grammar([*rules, *(thought_rules(answer_format) if before else ())])


def strict_calls(answer_format: AnswerFormat | None, tools: Sequence[Tool], thought: Thought) -> Grammar:
    """Return the grammar of an answer that may call these tools, those that are strict by their schemas.

    Raises EdgespecError where no grammar writes calls in the model's form.
    """
    answer_format = _checked(answer_format, "'strict'")
    mark, thoughts = answer_format.call["mark"], marks_of_thoughts(answer_format)
    rules = _call(answer_format, tools, is_marked=False)
    if answer_format.answer:
        return _grammar([*_channels(answer_format, thought), *rules, *thought_rules(answer_format)])
    if not mark:  # a call is the whole answer, and no other begins as one
        others = without(answer_format.call["openings"], before=r"\s*")
        return _grammar(["start: WORDS? | call", rf"WORDS: /\s*[^\s{{](?s:.*)/ & {others}", *rules])
    marks = [mark, *answer_format.call.get("openings", ()), *thoughts[:1]]
    rules += [*words(answer_format, "words", marks), *until(answer_format, "call_mark", "words", mark, marks)]
    if "close" not in answer_format.call:  # it ends with the answer
        return _grammar(["start: words | call_mark call", *rules])
    if not thoughts:
        return _grammar(["start: (call_mark call)* words", *rules])
    rest = "(call_mark call | thought_mark thought_end)* (words | thought_mark thought)"
    start = f"start: thought_end {rest} | thought" if thought == "open" else f"start: {rest}"
    rules += until(answer_format, "thought_mark", "words", thoughts[0], marks)
    return _grammar([start, *rules, *thought_rules(answer_format)])


def calls_or_answer(
    answer_format: AnswerFormat | None, tools: Sequence[Tool], answer: Grammar, thought: Thought
) -> Grammar:
    """Return the grammar of calls of these tools, strict ones by their schemas, or of an answer that has its own.

    Raises EdgespecError where no grammar writes calls in the model's form.
    """
    fix = "Leave out the tools, or the form of the answer."
    answer_format = _checked(answer_format, "an answer of a form that tools may be called instead of", fix)
    before, call = before_answer(answer_format, thought), answer_format.call
    calls = "call+" if call["mark"] and "close" in call else "call"
    rules = [f"start: {before} ({calls} | {inner_answer(answer_format)})", *_call(answer_format, tools, most=None)]
    return _grammar([*rules, *(thought_rules(answer_format) if before else ())], answer)


def _channels(answer_format: AnswerFormat, thought: Thought) -> list[str]:
    """Return the rules of an answer whose words stand between marks: any before the last one, or before a call."""
    between, ends = marked(answer_format, answer_format.answer["between"]), answer_format.call["ends"]
    said = marked(answer_format, answer_format.answer["begins"][0])
    before = " | ".join(marked(answer_format, mark) for mark in answer_format.call["before"])
    first = f"thought_end {between} " if thought == "open" else ""
    return [f"start: {first}(({before}) thought_end {between})* ({said} words | call)",
            *words(answer_format, "words", ends)]  # fmt: skip


def _grammar(rules: Sequence[str], answer: Grammar | None = None) -> Grammar:
    return Grammar(form="grammar", text="\n".join(rules) + "\n", answer=answer)


def _checked(
    answer_format: AnswerFormat | None,
    what: str,
    fix: str = "Leave the choice of tools to the model, and 'strict' out.",
) -> AnswerFormat:
    if answer_format is None or not answer_format.call:
        what = f"{what} cannot be enforced for this model: no grammar is known for calls in its form."
        raise EdgespecError("E_GRAMMAR", what, fix)
    return answer_format


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _call(
    answer_format: AnswerFormat,
    tools: Sequence[Tool],
    *,
    fits: Callable[[Tool], bool] = _is_strict,
    is_marked: bool = True,
    most: int | None = 1,
) -> list[str]:
    """Return the rules of a call with its mark, at most so many where a mark has a list, or of what follows a mark.

    The arguments of tools that `fits` takes fit their schemas; those of others are any.
    """
    found = answer_format.call
    marks = [marked(answer_format, found[name]) if found.get(name) else None for name in ("mark", "close")]
    try:
        if "heads" in found:
            is_list, begins = "tail" in found, f"{SPACE} {marks[0]} " if is_marked and marks[0] else ""
            ends = f" {SPACE} {marks[1]}" if is_list else f" {marks[1] or ''}"
            more = "+" if is_list and not (is_marked and most) else ""
            return [f"call: {begins}one{more}{ends}", *_headed(answer_format, tools, fits)]
        if answer_format.tags:
            calls = " | ".join(f"tool_{number}" for number in range(len(tools)))
            written = f"({calls}) {SPACE} {marked(answer_format, found['close'])}"
            call = f"call: {f'{SPACE} {marks[0]} ' if is_marked else ''}{written}"
            return [call, *_tagged(answer_format, tools, fits)]
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise refused("a tool's schema", f"it is none: {error}") from error
    schemas = [_schema(answer_format, tool, has_any_arguments=not fits(tool)) for tool in tools]
    one = {"anyOf": schemas}
    several = {"type": "array", "items": one, "minItems": 1, **({"maxItems": most} if is_marked and most else {})}
    schema = bounded_json(several if found.get("list") else one)
    parts = [marks[0] if is_marked else None, f"%json {json.dumps(schema)}", marks[1]]
    return ["call: " + " ".join(f"{SPACE} {part}" for part in parts if part is not None)]


def _schema(answer_format: AnswerFormat, tool: Tool, *, has_any_arguments: bool = False) -> dict[str, Any]:
    call = answer_format.call
    return {
        "type": "object",
        "properties": {
            call["name"]: {"const": tool["function"]["name"]},
            call["arguments"]: _arguments(tool, is_any=has_any_arguments),
        },
        "required": [call["name"], call["arguments"]],
        "additionalProperties": False,
    }


def _parameters(tool: Tool) -> dict[str, Any]:
    return schema_to_follow(tool["function"].get("parameters") or {})


def _arguments(tool: Tool, *, is_any: bool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which is an object's in any case."""
    arguments = {} if is_any else _parameters(tool)
    # Its own references begin at itself; what says nothing of its type would let through a text.
    return {"$id": f"tool:{quote(tool['function']['name'], safe='')}", **arguments, "type": "object"}


def _headed(answer_format: AnswerFormat, tools: Sequence[Tool], fits: Callable[[Tool], bool]) -> Iterator[str]:
    """Yield the rules of calls that begin with the tool's name; raises EdgespecError for a name that none can have."""
    call, calls = answer_format.call, " | ".join(f"tool_{number}" for number in range(len(tools)))
    tail = f" {marked(answer_format, call['tail'])}" if "tail" in call else ""
    yield f"one: {f'{SPACE} ' if tail else ''}({calls}){tail}"
    for number, tool in enumerate(tools):
        name, index = tool["function"]["name"], f"/{call['index']}/ " if "index" in call else ""
        before, after = call["heads"][0]
        written = call["mark"] + before + name + (":0" if index else "") + after
        found = re.fullmatch(answer_format.template["fields"]["calls"]["open_pattern"], written)
        if found is None or found["name"] != name:
            what = f"a call of {shown(name)} cannot be enforced for this model: its calls have no such names."
            raise EdgespecError("E_GRAMMAR", what, "Write the name in letters, digits, '_' and '-'.")
        heads = [
            f"{marked(answer_format, one + name)} {index}{marked(answer_format, end)}" for one, end in call["heads"]
        ]
        if "quote" in call:
            schema = _parameters(tool) if fits(tool) else {}
            bare = BareArguments(answer_format, schema, f"tool_{number}", is_strict=_is_strict(tool))
            arguments = bare.value(schema, ["object"])
            yield from bare.rules
        else:
            arguments = f"%json {json.dumps(bounded_json(_arguments(tool, is_any=not fits(tool))))}"
        yield f"tool_{number}: ({' | '.join(heads)}) {arguments}"
    yield from bare_rules(answer_format) if "quote" in call else ()


def _tagged(answer_format: AnswerFormat, tools: Sequence[Tool], fits: Callable[[Tool], bool]) -> Iterator[str]:
    """Yield the rules of calls whose values stand between tags; raises EdgespecError for a schema of no such values."""
    call, close = answer_format.call, answer_format.call["after_value"]
    yield from (*words(answer_format, "value", [close]), *until(answer_format, "value_end", "value", close, [close]))
    any_value = _written(answer_format, (), {}, is_any=True)
    for number, tool in enumerate(tools):
        name, schema = tool["function"]["name"], _parameters(tool)
        rules = [marked(answer_format, call["before_name"] + name + call["after_name"])]
        parts = list(schema_parts(schema, schema)) if fits(tool) else []
        is_one_of = any("anyOf" in part or "oneOf" in part for part in parts)
        if is_one_of and _is_strict(tool):
            raise unheld(f"the arguments of {shown(name)} have one of several forms")
        properties = list(dict.fromkeys(key for part in parts for key in part.get("properties", ())))
        needed = {key for part in parts for key in part.get("required", ()) if not is_one_of}
        if wrong := next((one for one in (name, *properties) if re.search('[<>"\n]', one)), None):
            raise unheld(f"{shown(wrong)} is no name between tags")
        for key in properties:
            value = _value(answer_format, schema, key, is_strict=_is_strict(tool))
            opened = marked(answer_format, call["before_key"] + key)
            rules.append(f"({SPACE} {opened} ({value})){'' if key in needed else '?'}")
        if all(part.get("additionalProperties", True) is True for part in parts):
            others = f" & ~/{either(properties)}/" if properties else ""
            yield rf'KEY_{number}: /[^<>"\s]([^<>"\n]*[^<>"\s])?/{others}'
            rules.append(f"({SPACE} {marked(answer_format, call['before_key'])} KEY_{number} ({any_value}))*")
        yield f"tool_{number}: {' '.join(rules)}"


def _value(answer_format: AnswerFormat, schema: Mapping[str, Any], key: str, *, is_strict: bool) -> str:
    """Return the rule of an argument's value with its end: any text, one of some texts, or JSON."""
    texts, kinds, is_any = list[str](), set[str](), False
    found = parts_of(schema, schema, key)
    for part in found:
        named = part.get("type", [])
        chosen = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
        texts += [value for value in chosen if isinstance(value, str)]
        own = {*([named] if isinstance(named, str) else named)} if not chosen else set()
        kinds |= own - {"string"}
        kinds |= {KINDS[type(value)] for value in chosen if not isinstance(value, str)}
        if "string" in own and not any(name in part for name in ("allOf", "anyOf", "oneOf", "$ref")):
            is_any = True
            if is_strict and (bound := next((name for name in TEXT_BOUNDS if name in part), None)):
                raise unheld(f"the text '{key}' has a {bound}")
    if not (is_any or texts or kinds):
        return _written(answer_format, (), {}, is_any=True)
    shared = {name: schema[name] for name in ("$defs", "definitions", "components") if name in schema}
    schema_of_json = {**shared, "allOf": [found[0]], "type": sorted(kinds)} if kinds else None
    return _written(answer_format, texts, schema_of_json, is_any=is_any)


def _written(answer_format: AnswerFormat, texts: Sequence[str], schema: Any, *, is_any: bool = False) -> str:
    """Return what stands behind an argument's name: any text or some, or JSON of a schema, each with its end."""
    call, line = answer_format.call, r"/\n?/ " if answer_format.tags.get("lines") else ""
    text_begins, json_begins, end = (
        marked(answer_format, call.get(name, call["after_key"]))
        for name in ("after_key", "after_key_of_json", "after_value")
    )
    says_kind = "after_key_of_json" in call
    choices = (
        [f"{text_begins} value_end"] if is_any else [f"{text_begins} {line}{quoted(one)} {line}{end}" for one in texts]
    )
    if schema is not None and (says_kind or not is_any):
        choices.append(f"{json_begins} {line}%json {json.dumps(bounded_json(schema))} {line}{end}")
    return " | ".join(choices)
