"""A folder's chat template is used wherever it stands, or one that is named in its place."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from edgespec.chat.chat_template import template_ids
from edgespec.chat.given_template import unread, with_template
from edgespec.chat.rendering import rendered
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair, open_tokenizer
from tests.support.families import make_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "TOOLS" + TEMPLATE}]
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "warmth"}}]


def saved(folder: Path, template: Any = None, **files: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder with these files."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    opened = open_tokenizer(folder)
    assert isinstance(opened, PreTrainedTokenizerFast)
    return opened


@pytest.mark.parametrize("name", ["chat_template", "processor_config"])
@pytest.mark.parametrize(
    "content", [TEMPLATE, {"default": TEMPLATE, "rag": "RAG"}, NAMED], ids=["text", "object", "list"]
)
def test_a_processor_s_template_is_used_where_the_tokenizer_has_none(tmp_path: Path, name: str, content: Any) -> None:
    """As by transformers' processor of the same folder: its tokenizer is given this template."""
    found = saved(tmp_path / "own", **{name: {"chat_template": content}})
    known = make_tokenizer()
    known.chat_template = TEMPLATE
    assert found.apply_chat_template(MESSAGES, tokenize=False) == known.apply_chat_template(MESSAGES, tokenize=False)
    both = saved(tmp_path / "both", "OWN" + TEMPLATE, **{name: {"chat_template": content}})
    assert both.chat_template == "OWN" + TEMPLATE


@pytest.mark.parametrize("content", [{"chat_template": 5}, {"chat_template": [{"name": "a"}]}, ["no object"]])
def test_a_processor_s_template_that_is_none_is_one_error(tmp_path: Path, content: Any) -> None:
    with pytest.raises(EdgespecError, match=r"chat_template\.json'") as caught:
        saved(tmp_path / "bad", chat_template=content)
    assert caught.value.code == "E_CONFIG_INVALID"


def test_a_folder_without_any_template_has_none(tmp_path: Path) -> None:
    assert not saved(tmp_path / "none", processor_config={"processor_class": "X"}, chat_template={}).chat_template


def test_without_a_default_the_names_are_told(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path / "named", {"rag": "RAG" + TEMPLATE, "tool_use": "TOOLS" + TEMPLATE})
    with pytest.raises(EdgespecError, match="no default: rag, tool_use") as caught:
        template_ids(tokenizer, MESSAGES)
    assert (caught.value.code, caught.value.fix) == ("E_CHAT_TEMPLATE", "Choose one with `chat_template=rag`.")
    given = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert rendered(tokenizer, MESSAGES, values={"tools": TOOLS}) == given == "TOOLS<user>hi>"


@pytest.fixture
def folder(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(pair_folders[0], tmp_path / "model")
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({**config, "chat_template": NAMED}))
    return tmp_path / "model"


def test_a_template_is_chosen_by_name_or_file_or_given_as_a_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("FILE" + TEMPLATE)
    for wanted, begins in [("tool_use", "TOOLS<"), (tmp_path / "own.jinja", "FILE<"), ("TEXT" + TEMPLATE, "TEXT<")]:
        assert rendered(with_template(open_pair(folder, None), wanted, {}).tokenizer, MESSAGES).startswith(begins)
    assert rendered(with_template(open_pair(folder, None), None, {}).tokenizer, MESSAGES).startswith("<user>")


def test_a_template_that_is_not_there_or_says_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    pair = open_pair(folder, None)
    with pytest.raises(EdgespecError, match=r"no chat template 'rag'.*own are default, tool_use"):
        with_template(pair, "rag", {})
    (tmp_path / "empty.jinja").write_text("")
    with pytest.raises(EdgespecError, match="holds no chat template"):
        with_template(pair, tmp_path / "empty.jinja", {})
    with pytest.raises(EdgespecError, match="tokenize cannot be given"):
        with_template(pair, None, {"tokenize": True})
    pair.tokenizer.chat_template = None
    with pytest.raises(EdgespecError, match="`template_args` are for a chat template, and the model has none"):
        with_template(pair, None, {"enable_thinking": False})


def test_values_that_no_template_reads_are_told(folder: Path) -> None:
    pair = with_template(open_pair(folder, None), "{{ enable_thinking }}" + TEMPLATE, {"enable_thinking": False})
    assert pair.template_args == {"enable_thinking": False}
    assert unread(pair.tokenizer, ["enable_thinking", "thinking", "content"]) == ["thinking"]
