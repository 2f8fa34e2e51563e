"""A body is read by the table of fields: what asks for nothing is left out, what has no effect is noted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from edgespec.serve.body import Fields, fields_of, is_empty, unknown_field
from edgespec.serve.field_table import FIELDS, PROTOCOLS, RequestField
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.validation import shown

B = TypeVar("B", bound=Fields)
HEADER = "X-Edgespec-Unused"
MAX_NAMED, MAX_NAME = 32, 60  # fields in the header, and characters of one
_TABLE = {name: {field.name: field for field in FIELDS if name in field.protocols} for name in PROTOCOLS}


class UnusedFields:
    """The fields of one request that are taken without effect: a header of the answer names them, and the log once."""

    def __init__(self, say_once: Callable[[str], None]) -> None:
        """Note none at first."""
        self._say_once = say_once
        self.names: dict[str, None] = {}

    def add(self, name: str, why: str) -> None:
        """Note a field; parts of its name may be the client's own."""
        name = ascii(name)[1:-1][:MAX_NAME]
        if name not in self.names and len(self.names) < MAX_NAMED:
            self.names[name] = None
            self._say_once(f"a client's '{name}' is taken and has no effect: {why}")

    @property
    def headers(self) -> dict[str, str]:
        """The header that names them, if there are any."""
        return {HEADER: ", ".join(self.names)} if self.names else {}


def read_fields(kind: type[B], protocol: str, body: Mapping[str, Any], unused: UnusedFields) -> B:
    """Return the fields of a body that are done; raises RefusalError for one that is unknown, refused or wrong.

    Those that `kind` lacks and the protocol has say nothing to it, as a temperature says nothing to a count of tokens.
    """
    done: dict[str, Any] = {}
    also: dict[str, RequestField] = {}
    for name, value in body.items():
        field = _TABLE[protocol].get(name)
        if field is None:
            if value is not False and not is_empty(value):
                raise unknown_field(name)
        elif asks_for_something(field, value) and not (name == "best_of" and value == body.get("n")):
            if field.use == "refused":
                what = f"'{name}' is not done here: {field.means}. Leave it out."
                raise RefusalError(BAD_REQUEST, what, code="unsupported_parameter", field=name)
            if field.use == "unused":
                unused.add(name, field.means)
            elif field.other_name_of is not None:
                also[name] = field
            elif name in kind.model_fields:
                done[name] = value
    for name, field in also.items():
        other = str(field.other_name_of)
        if done.setdefault(other, body[name]) != body[name]:
            what = f"'{name}' is {shown(body[name])} and '{other}' {shown(done[other])}, which are one. Leave out one."
            raise RefusalError(BAD_REQUEST, what, code="invalid_value", field=name)
    return fields_of(kind, done)


def asks_for_something(field: RequestField, value: Any) -> bool:
    """Return whether a value asks for more than leaving its field out does."""
    if value is None or (is_empty(value) and not field.is_empty_value_read):
        return False
    return not any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in field.nothing)


def only_functions(
    tools: Sequence[Mapping[str, Any]], own_types: Sequence[str | None], unused: UnusedFields
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the tools that are functions of the client's, each with its place in the body.

    Others, which a server would run, are only offered.
    """
    found = []
    for number, tool in enumerate(tools):
        if (kind := tool.get("type")) in own_types:
            found.append((f"tools.{number}", tool))
        else:
            unused.add(f"tools[{kind}]", "only functions are called")
    return found
