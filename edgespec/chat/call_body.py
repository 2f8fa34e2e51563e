"""Where a call ends that is being written: with its JSON or its last tag, whatever marks stand in its texts.

A body is told of the whole text so far again and again, and looks at each character once. What cannot become a call
is known as soon as it is written: it is a ValueError, and what was taken for a call is words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from edgespec.chat.answer_marks import pattern_of
from edgespec.chat.call_values import SaidText, read_call

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

_QUOTED = r'"(?:[^"\\\x00-\x1f]|\\.)*+'  # a text of JSON without its end
_IN_TEXT = r'(?:[^"\\\x00-\x1f]|\\.)*+'
_BETWEEN = r"[\s\w+.,:-]*+"  # texts and brackets of JSON
_BETWEEN_BARE = r'[^"{}\[\]<]*+'  # where keys have no quotes
_BARE_KEY = r"(?<=[{,]\s*)[^\s\"{}\[\],:<][^\"{}\[\],:<]*?(?=\s*:)"


@dataclass(slots=True, kw_only=True)
class JsonBody:
    """A call whose body is JSON; texts may have marks of their own around them, and keys none."""

    field: ResponseTemplateField
    captures: dict[str, str]
    begin: int  # behind the mark
    at: int  # up to where the text is read
    depth: int = 0
    text_end: str = ""  # that the open text waits for
    stop: int | None = None  # of the JSON
    earlier: str = ""  # values of keys that came again

    def scan(self, text: str, *, is_end: bool) -> int | None:
        """Return where the call ends with its mark, None while it is open; raises ValueError where it is none."""
        if self.stop is None:
            self.stop = self._json_end(text, is_end=is_end)
        if self.stop is None or self.field.close_re is None:
            return self.stop
        end = pattern_of(rf"\s*(?:{self.field.close_re.pattern})")
        found = end.match(text, self.stop, partial=True)
        if found is not None and found.partial and not is_end:
            return None
        self.captures |= {name: value for name, value in (found.groupdict() if found else {}).items() if value}
        return self.stop if found is None else found.end()  # an end that is left out, or cut

    def function(self, text: str) -> Any:
        """Return the function or the functions that the call is of; raises an error where it is none."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        body = _as_json(text[self.begin : self.stop], self.field.content_args).strip()
        value, self.earlier = read_call(body) if body else (None, "")
        plain = replace(self.field, content_args={})
        return process_field(json.dumps(value), plain, self.captures)["function"]

    def _json_end(self, text: str, *, is_end: bool) -> int | None:
        while self.at < len(text):
            if self.text_end and not self._read_text(text):
                return None
            between = _BETWEEN_BARE if self.field.content_args.get("unquoted_keys") else _BETWEEN
            found = pattern_of(between).match(text, self.at)
            begins = text[found.end() : found.end() + 1]
            if self.depth == 0 and (found.group().strip() or begins not in "{["):
                return self._scalar_end(text, is_end=is_end)
            self.at = found.end()
            if self.at == len(text):
                break
            if text[self.at] in "{[}]":
                self.depth += 1 if text[self.at] in "{[" else -1
                self.at += 1
                if self.depth <= 0:
                    return self.at
            elif not self._opens_text(text):
                return None
        return self._scalar_end(text, is_end=is_end) if is_end and self.depth == 0 else None

    def _opens_text(self, text: str) -> bool:
        """Read the mark that begins a text; False where it is not whole yet."""
        for begin, end in [*self.field.content_args.get("string_delims", ()), ('"', '"')]:
            if text.startswith(begin, self.at):
                self.at, self.text_end = self.at + len(begin), end
                return True
            if begin.startswith(text[self.at : self.at + len(begin)]):
                return False
        raise ValueError("no JSON")

    def _read_text(self, text: str) -> bool:
        """Read on in a text; False where its end is not there yet."""
        if self.text_end == '"':
            self.at = pattern_of(_IN_TEXT).match(text, self.at).end()
            if self.at < len(text) and text[self.at] not in '"\\':
                raise ValueError("no JSON")
            closes_at = self.at if text.startswith('"', self.at) else -1
        else:
            closes_at = text.find(self.text_end, self.at)
            self.at = closes_at if closes_at >= 0 else max(self.at, len(text) - len(self.text_end) + 1)
        if closes_at < 0:
            return False
        self.at, self.text_end = closes_at + len(self.text_end), ""
        return True

    def _scalar_end(self, text: str, *, is_end: bool) -> int | None:
        """Return where arguments end that are no object: a text of JSON, null, or nothing."""
        if "name" not in self.captures:
            raise ValueError("no object")
        close = self.field.close_re.pattern if self.field.close_re else r"\Z"
        whole = pattern_of(rf'\s*(?P<value>null|{_QUOTED}"|)\s*(?={close}|\Z)')
        found = whole.match(text, self.begin, partial=not is_end)
        if found is None:
            raise ValueError("no JSON")
        return None if not is_end and (found.partial or found.end() == len(text)) else found.end("value")


def _as_json(text: str, args: Mapping[str, Any]) -> str:
    """Return JSON whose texts and keys have quotes."""
    marks = args.get("string_delims", ())
    if not marks and not args.get("unquoted_keys"):
        return text
    texts = "|".join(rf"{re.escape(begin)}(?P<text>.*?){re.escape(end)}" for begin, end in marks) or r"(?P<text>\A\b\B)"

    def quoted(found: Any) -> str:
        if found["text"] is not None:
            return json.dumps(found["text"])
        return json.dumps(found["key"]) if found["key"] is not None else str(found[0])

    return str(pattern_of(rf'{texts}|{_QUOTED}"|(?P<key>{_BARE_KEY})').sub(quoted, text))


@dataclass(slots=True, kw_only=True)
class TagBody:
    """A call whose values stand between tags; one ends where another tag or the call's end follows."""

    tags: Mapping[str, str]  # patterns: what opens a value and names its key, what closes it, what ends the call
    captures: dict[str, str]
    begin: int
    at: int
    values: dict[str, Any]
    key: str | None = None
    is_text: bool | None = None  # whether the value says that it is a text, or JSON
    value_start: int = 0
    earlier: str = ""  # values of keys that came again

    def scan(self, text: str, *, is_end: bool) -> int | None:
        """Return where the call ends, None while it is open; raises ValueError where it is none."""
        del is_end
        while True:
            if self.key is not None and not self._read_value(text):
                return None
            follows = rf"\s*(?:{self.tags['open']}|(?P<end>{self.tags['end']}))"
            found = pattern_of(follows).match(text, self.at, partial=True)
            if found is None:
                raise ValueError("no tag")
            if found.partial:
                return None
            self.at = found.end()
            if found["end"] is not None:
                return self.at
            self.value_start, self.key = self.at, found["key"].strip()
            said = found.groupdict().get("string")
            self.is_text = None if said is None else said == "true"
            if self.key in self.values:
                self.earlier += json.dumps({self.key: self.values[self.key]}, ensure_ascii=False)

    def function(self, text: str) -> Any:
        """Return the function that the call is of."""
        del text
        return {"name": self.captures["name"], "arguments": self.values}

    def _read_value(self, text: str) -> bool:
        close = rf"{self.tags['close']}(?=\s*(?:{self.tags['open']}|{self.tags['end']}))"
        found = pattern_of(close).search(text, self.at, partial=True)
        if found is None or found.partial:
            self.at = len(text) if found is None else found.start()
            return False
        value = text[self.value_start : found.start()]
        if self.tags.get("lines"):  # a value has lines of its own
            value = re.sub(r"\A\r?\n|\r?\n\Z", "", value)
        self.values[str(self.key)], self.key, self.at = self._as_said(value), None, found.end()
        return True

    def _as_said(self, value: str) -> Any:
        """Return a value as its tag says it, else as it was written."""
        if not self.is_text and self.is_text is not None:
            try:
                found, earlier = read_call(value)
                return value if earlier else found
            except ValueError:
                return value
        return SaidText(value) if self.is_text else value


@dataclass(slots=True, kw_only=True)
class AnyBody:
    """A call of another family, up to the mark that ends it."""

    field: ResponseTemplateField
    captures: dict[str, str]
    begin: int
    at: int
    stop: int | None = None
    earlier: str = ""

    def scan(self, text: str, *, is_end: bool) -> int | None:
        """Return where the call ends with its mark, None while it is open."""
        found = self.field.close_re and self.field.close_re.search(text, self.at, partial=not is_end)
        if found is None:
            self.at = len(text)
        elif found.partial or (found.end() == len(text) and not is_end):
            self.at = found.start()
        else:
            self.stop = found.start()
            self.captures |= {name: value for name, value in found.groupdict().items() if value}
            return int(found.end())
        self.stop = len(text) if is_end else None
        return self.stop

    def function(self, text: str) -> Any:
        """Return the function or the functions that the call is of; raises an error where it is none."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        value = process_field(text[self.begin : self.stop], self.field, self.captures)
        values = value if isinstance(value, list) else [value]
        return [found["function"] for found in values]


Body: TypeAlias = JsonBody | TagBody | AnyBody


def call_body(field: ResponseTemplateField, tags: Mapping[str, str], captures: dict[str, str], begin: int) -> Body:
    """Return the body of a call that begins after its mark."""
    if tags:
        return TagBody(tags=tags, captures=captures, begin=begin, at=begin, values={})
    is_json = field.content == "json" and not field.content_args.get("allow_non_json") and not field.transform_each
    return (JsonBody if is_json else AnyBody)(field=field, captures=captures, begin=begin, at=begin)
