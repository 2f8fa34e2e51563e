"""Every message reaches the prompt as transformers' template writes it, in another way that is said, or is an error."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from edgespec.chat.prompt_ids import prompt_ids
from edgespec.chat.rendering import refuses_system, rendered
from edgespec.errors import EdgespecError
from tests.support.families import make_tokenizer

TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
ANY_ROLE = TURN + END
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endif %}"
    + END
)
DEVELOPER = KNOWN_ROLES.replace("'system'", "'system', 'developer'")
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role in ['system', 'developer'] %}"
    "{{ raise_exception('System role not supported') }}{% endif %}["
    "{{ m.role }}]{{ m.content | trim }}" + END
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}" + END
)
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
PAIRS = TURN + CALLS + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}" + END
AS_JSON = TURN + CALLS + "{{ c.function.arguments | tojson }}{% endfor %}" + END
JOINED = TURN + CALLS + "{{ '(' + c.function.arguments + ')' }}{% endfor %}" + END
KEYED = TURN + "{% if 'tool_calls' in m %}<{{ m.tool_calls[0].function.name }}>{% endif %}" + END
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
    + CALLS
    + "{% endfor %}"
    + END
)
CUTS_REASONING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    + END
)
UPPER = "{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}" + END
LONG = "A question that is long enough to be found by itself"
CITY = {"city": "Bern", "days": 1}


def said(role: str, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    calls = [{"id": "1", "type": "function", "function": {"name": "warmth", "arguments": arguments}}]
    return [said("user"), said("assistant", content, tool_calls=calls), said("tool", "11"), said("user", "and now?")]


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def theirs(template: str, messages: list[dict[str, Any]], **values: Any) -> str:
    """What transformers makes of the messages itself."""
    return str(
        with_template(template).apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **values)
    )


def ours(template: str, messages: list[dict[str, Any]], **values: Any) -> str:
    return rendered(with_template(template), messages, values=values)


@pytest.mark.parametrize("role", ["User", "function", "human", "tool"])
@pytest.mark.parametrize("text", [LONG, "s"], ids=["long", "short"])
def test_a_message_that_the_template_leaves_out_is_an_error_with_its_number_and_role(role: str, text: str) -> None:
    messages = [said("system", "as short as can be"), said(role, text), said("user", "what is this?")]
    assert f"]{text}[" not in theirs(KNOWN_ROLES, messages)
    with pytest.raises(EdgespecError, match=rf"message 2 \(role '{role}'\) does not reach the prompt") as caught:
        ours(KNOWN_ROLES, messages)
    assert (caught.value.code, "`raw=True`" in caught.value.fix) == ("E_PROMPT_INVALID", True)
    assert ours(ANY_ROLE, messages) == theirs(ANY_ROLE, messages)  # where any role is written, nothing is lost


def test_a_question_in_python_is_not_lost_either() -> None:
    with pytest.raises(EdgespecError, match=r"message 1 \(role 'User'\) does not reach the prompt"):
        prompt_ids(with_template(KNOWN_ROLES), [said("User", LONG)])


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CUTS_REASONING, [said("user"), said("assistant", f"<think>{LONG}</think>"), said("user", LONG)]),
        (CUTS_REASONING, [said("user"), said("assistant", f"<think>{LONG}</think>yes"), said("user", LONG)]),
        (UPPER, [said("user", LONG), said("assistant", "no"), said("user", "why")]),
        (ANY_ROLE, [said("system", " \n"), said("user", LONG), said("user", LONG)]),
        (ANY_ROLE, [said("user", f"  {LONG}\n"), said("assistant", ""), said("user", "4827")]),
    ],
    ids=["reasoning-alone", "reasoning", "other-letters", "blank", "spaces"],
)
def test_what_a_template_changes_is_not_lost(template: str, messages: list[dict[str, Any]]) -> None:
    assert ours(template, messages) == theirs(template, messages)


def test_rows_whose_texts_stand_in_the_prompt_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, count = with_template(ANY_ROLE), []
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *given, **named: count.append(1) or apply(*given, **named)
    )
    rendered(tokenizer, [said("system", LONG), said("user", LONG)])
    assert len(count) == 1


def test_developer_is_system_where_the_template_has_no_such_role() -> None:
    messages, as_system = [said("developer", "s"), said("user")], [said("system", "s"), said("user")]
    assert ours(KNOWN_ROLES, messages) == theirs(KNOWN_ROLES, as_system)
    with pytest.raises(EdgespecError, match=r"message 1 \(role 'developer'\) does not reach"):
        ours(KNOWN_ROLES.replace("'system', ", ""), messages)
    assert ours(DEVELOPER, messages) == theirs(DEVELOPER, messages)
    assert ours(ANY_ROLE, messages) == theirs(ANY_ROLE, messages)


@pytest.mark.parametrize("template", [NO_SYSTEM, ALTERNATING], ids=["refused", "alternating"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_that_is_refused_goes_before_the_first_user_s(template: str, role: str) -> None:
    folded = [said("user", "Be short.\n\nhi"), said("assistant", "yes"), said("user", "why")]
    assert ours(template, [said(role, "Be short."), said("user"), *folded[1:]]) == theirs(template, folded)
    tokenizer = with_template(template)
    assert refuses_system(tokenizer)
    assert not refuses_system(with_template(KNOWN_ROLES))
    with pytest.raises(EdgespecError, match="template fails for messages of system"):  # there is no user's message
        rendered(tokenizer, [said("system")])


def test_a_message_behind_a_folded_one_keeps_its_number() -> None:
    lossy = NO_SYSTEM.replace(
        "[{{ m.role }}]{{ m.content | trim }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}"
    )
    with pytest.raises(EdgespecError, match=r"message 3 \(role 'User'\)"):
        ours(lossy, [said("system", "s"), said("user"), said("User")])
    with pytest.raises(EdgespecError, match=r"message 2 \(role 'User'\)"):
        rendered(with_template(lossy), [said("system", "s"), said("user"), said("User")], first=0)


@pytest.mark.parametrize("template", [PAIRS, AS_JSON], ids=["pairs", "tojson"])
def test_arguments_of_calls_are_objects(template: str) -> None:
    """In OpenAI's form they are JSON; templates are written for the object."""
    assert ours(template, call(json.dumps(CITY))) == theirs(template, call(CITY))
    assert ours(template, call(CITY)) == theirs(template, call(CITY))
    for nothing in ("", " ", "null", None, {}):
        assert ours(template, call(nothing)) == theirs(template, call({})), nothing


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    for given in ("[1, 2]", "Bern", '{"city": ', "3"):
        assert ours(AS_JSON, call(given)) == theirs(AS_JSON, call(given))
    with pytest.raises(EdgespecError, match="template fails for messages of user, assistant, tool, user") as caught:
        ours(PAIRS, call("Bern"))
    assert "`chat_template`" in caught.value.fix


def test_a_template_that_joins_arguments_to_texts_gets_json() -> None:
    assert ours(JOINED, call(json.dumps(CITY))) == theirs(JOINED, call(json.dumps(CITY)))
    assert ours(JOINED, call(CITY)) == theirs(JOINED, call(json.dumps(CITY)))


def test_a_template_that_joins_contents_gets_an_empty_one() -> None:
    joined = PAIRS.replace("{{ m.content or '' }}", "{{ m.content + '' }}")
    assert ours(joined, call(CITY)) == theirs(joined, call(CITY, ""))
    both = JOINED.replace("{{ m.content or '' }}", "{{ m.content + '' }}")
    assert ours(both, call(CITY)) == theirs(both, call(json.dumps(CITY), ""))


def test_ids_of_calls_are_short_where_a_template_refuses_others() -> None:
    nine = (
        "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }};{% endfor %}{{ m.tool_call_id }}"
    )
    calls = [{"id": name, "type": "function", "function": {"name": "warmth", "arguments": {}}} for name in ("ab", "cd")]
    results = [said("tool", "11", tool_call_id=name) for name in ("ab", "cd")]
    text = ours(TURN + CALLS + nine + END, [said("user"), said("assistant", None, tool_calls=calls), *results])
    first, second = text.partition("[assistant]")[2].partition("[tool]")[0].replace("<warmth>", "").split(";")[:2]
    assert len({first, second}) == 2
    assert text.endswith(f"[tool]11{first}[tool]11{second}[assistant]")
    kept = call({}, None)
    assert ours(TURN + CALLS + "{{ c.id }}{% endfor %}" + END, kept).count("<warmth>1") == 1


def test_null_is_no_call() -> None:
    dumped = said("assistant", "yes", tool_calls=None, function_call=None, refusal=None)
    plain = [said("user"), said("assistant", "yes"), said("user")]
    for calls in (None, []):
        messages = [said("user"), {**dumped, "tool_calls": calls}, said("user")]
        assert ours(KEYED, messages) == theirs(KEYED, plain)


def test_a_call_in_the_older_form_is_a_call() -> None:
    older = said("assistant", None, function_call={"name": "warmth", "arguments": json.dumps(CITY)})
    assert ours(PAIRS, [said("user"), older, said("user")]).count("<warmth>city=Bern;days=1;") == 1


def test_a_message_that_only_calls_is_there_where_contents_are_parts() -> None:
    in_parts = [
        {**each, **({"content": [{"type": "text", "text": each["content"]}]} if each["content"] else {})}
        for each in call(CITY)
    ]
    assert ours(PARTS, call(CITY)) == theirs(PARTS, in_parts)
    assert "<warmth>" in ours(PARTS, call(CITY))


def test_calls_that_no_template_writes_are_an_error() -> None:
    with pytest.raises(EdgespecError, match=r"message 2 \(role 'assistant'\) does not reach the prompt"):
        ours(ANY_ROLE.replace("[{{ m.role }}]", ""), call(CITY))
    assert ours(KNOWN_ROLES, [said("user"), call(CITY, "I look.")[1], said("user")]).count("I look.") == 1


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"content": "x"}, 'message 1 has no "role"'),
        (said("user", 5), '"content" 5, which is no text'),
        (said("assistant", "x", tool_calls=3), "tool_calls that are no list of calls"),
        (said("assistant", "x", tool_calls=["warmth"]), "tool_calls that are no list of calls"),
        (said("assistant", "x", tool_calls=[{"function": {"arguments": "{}"}}]), "no list of calls"),
    ],
)
def test_messages_that_are_none_are_named(message: dict[str, Any], what: str) -> None:
    with pytest.raises(EdgespecError, match=what) as caught:
        ours(PAIRS, [message])
    assert caught.value.code == "E_PROMPT_INVALID"


def test_values_reach_the_template_and_those_of_transformers_are_refused() -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort }}" + ANY_ROLE
    tools = [{"type": "function", "function": {"name": "warmth"}}]
    given: dict[str, Any] = {"tools": tools, "reasoning_effort": "high"}
    assert ours(template, [said("user")], **given) == theirs(template, [said("user")], **given)
    for name in ("tokenize", "messages", "chat_template", "add_generation_prompt"):
        with pytest.raises(EdgespecError, match=f"{name} cannot be given to a chat template"):
            rendered(with_template(template), [said("user")], values={name: 1})
    with pytest.raises(EdgespecError, match="tools 'warmth' is no list of objects"):
        ours(template, [said("user")], tools="warmth")
