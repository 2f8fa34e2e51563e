"""`/image` and pasted paths: pictures go before the next message, stay with the conversation, and come back with it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import Engine, SamplingSettings
from edgespec.cli.chat.actions import attach_pasted
from edgespec.cli.chat.keys import WaitingKeys
from edgespec.cli.chat.loop import handle
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.state import Chat
from edgespec.cli.console import Console
from edgespec.errors import EdgespecError
from tests.cli.conftest import RunCli
from tests.support.picture_files import data_address, saved
from tests.support.seeing_model import CAT, DOG, MADE, PLACE, SeeingModel, engine_of


@pytest.fixture(scope="module")
def engine(seeing: SeeingModel) -> Iterator[Engine]:
    with engine_of(seeing) as engine:
        yield engine


@pytest.fixture
def chat(engine: Engine, tmp_path: Path) -> Chat:
    engine.forget()
    for name, image in (("cat.png", CAT), ("a dog.png", DOG)):
        (tmp_path / name).write_bytes(saved(image))
    conversation = engine.chat(sampling=SamplingSettings(), max_new_tokens=MADE)
    screen = Screen(Console(quiet=False, verbose=False), color="never")
    return Chat(engine=engine, conversation=conversation, keys=WaitingKeys(), own_tree=engine.tree, screen=screen)


def last(chat: Chat) -> str:
    return chat.conversation.last.text


def test_the_command_line_shows_a_picture_with_the_first_message(
    run_cli: RunCli, seeing: SeeingModel, tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(saved(CAT))
    options = [str(seeing.folder), "--temp", "0", "-n", str(MADE), "-c", "256", "--dtype", "float32", "--no-self-check"]
    image, truth = ["--image", str(tmp_path / "cat.png")], seeing.said(f"[user]{PLACE}What is this?\n[assistant]", CAT)
    for given, stdin in ((["-p", "What is this?"], ""), ([], "What is this?\n")):
        found = run_cli([*options, *given, *image], stdin=stdin, command="chat")
        assert found.out.rstrip("\n") == truth.rstrip("\n"), found.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--image", "nowhere.png"], "there is no file"),
        (["--image", "words.png"], "picture 1"),
        (["--image", "https://a.example/cat.png"], "nothing is ever fetched"),
        (["--raw", "--image", "cat.png"], "--image needs a chat template"),
        (["--image", "cat.png"] * 17, "17 pictures"),
    ],
)
def test_a_picture_of_the_command_line_that_cannot_be_is_refused_before_weights_are_read(
    given: list[str], said: str, run_cli: RunCli, seeing: SeeingModel, no_weights_read: None
) -> None:
    found = run_cli([str(seeing.folder), "-p", "What?", *given], files={"words.png": "words"}, command="chat")
    assert found.code
    assert not found.out
    assert said in found.err


def test_a_model_that_does_not_see_refuses_a_picture_of_the_command_line(run_cli: RunCli) -> None:
    found = run_cli(["-p", "What?", "--image", "cat.png"], command="chat")
    assert "does not see: it has no tower for pictures" in found.err


def test_a_picture_goes_before_the_next_message_and_stays(chat: Chat, seeing: SeeingModel, tmp_path: Path) -> None:
    truth = seeing.said(f"[user]{PLACE}What is this?\n[assistant]", CAT)
    handle(chat, f"/image {tmp_path / 'cat.png'}")
    handle(chat, "What is this?")
    assert last(chat) == truth
    assert not chat.attachments
    handle(chat, "/regen")
    assert last(chat) == truth
    handle(chat, "/edit What is that?")
    assert last(chat) == seeing.said(f"[user]{PLACE}What is that?\n[assistant]", CAT)
    handle(chat, "/undo")
    handle(chat, f"{tmp_path / 'cat.png'} '{tmp_path / 'a dog.png'}' Which?")
    assert last(chat) == seeing.said(f"[user]{PLACE}{PLACE}Which?\n[assistant]", CAT, DOG)


def test_pasted_paths_are_pictures_only_where_they_begin_a_message_and_are_there(chat: Chat, tmp_path: Path) -> None:
    dog = str(tmp_path / "a dog.png")
    for typed, rest, count in (
        (f'"{dog}" and?', "and?", 1),
        (dog.replace(" ", "\\ "), "", 1),
        (f"file://{tmp_path}/cat.png\nWhat?", "What?", 1),
        (f"What is {tmp_path}/cat.png?", f"What is {tmp_path}/cat.png?", 0),
        (f"{tmp_path}/none.png what?", f"{tmp_path}/none.png what?", 0),
        ("It's 'fine'", "It's 'fine'", 0),
    ):
        chat.attachments.clear()
        assert attach_pasted(chat, typed) == rest
        assert len(chat.pictures) == count
    chat.attachments.clear()
    for command, words in (("/image", "needs a file"), (f"/image {tmp_path}/none.png", "there is no file")):
        with pytest.raises(EdgespecError, match=words):
            handle(chat, command)
    assert not chat.attachments


def test_a_session_comes_back_with_the_same_picture_or_says_why_not(
    chat: Chat, seeing: SeeingModel, tmp_path: Path
) -> None:
    picture, session = tmp_path / "cat.png", tmp_path / "session.json"
    handle(chat, f"/image {picture}")
    handle(chat, "What is this?")
    truth, before = last(chat), chat.conversation.messages
    handle(chat, f"/save {session}")
    (entry,) = json.loads(session.read_text())["messages"][0]["images"]
    assert entry["file"] == str(picture)
    assert "base64" not in session.read_text()
    chat.conversation.clear()
    handle(chat, f"/load {session}")
    assert [message.pictures for message in chat.conversation.messages] == [message.pictures for message in before]
    handle(chat, "/regen")
    assert last(chat) == truth
    picture.write_bytes(saved(DOG))
    with pytest.raises(EdgespecError, match="picture 1 has changed since"):
        handle(chat, f"/load {session}")
    picture.unlink()
    with pytest.raises(EdgespecError, match="there is no file"):
        handle(chat, f"/load {session}")
    handle(chat, f"/save {tmp_path / 'x.md'}")
    assert f"Picture: {picture}" in (tmp_path / "x.md").read_text()


def test_a_session_that_the_page_wrote_has_its_pictures_in_it(chat: Chat, seeing: SeeingModel, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "What is this?", "images": [{"data": data_address(saved(CAT))}]}
    session = {"schema": "edgespec.session/1", "messages": [asked, {"role": "assistant", "content": "A cat."}]}
    (tmp_path / "page.json").write_text(json.dumps(session))
    handle(chat, f"/load {tmp_path / 'page.json'}")
    handle(chat, "And now?")
    text = f"[user]{PLACE}What is this?\n[assistant]A cat.\n[user]And now?\n[assistant]"
    assert last(chat) == seeing.said(text, CAT)
    handle(chat, f"/save {tmp_path / 'again.json'}")
    handle(chat, f"/load {tmp_path / 'again.json'}")
