"""Pictures through every protocol: the answer is transformers' own, and a bad picture harms nobody."""

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from PIL import Image

from edgespec import Engine
from tests.support.picture_files import data_address, png_of_size, saved
from tests.support.seeing_model import CAT, DOG, MADE, PLACE, SeeingModel, engine_of

GREEDY: dict[str, Any] = {"model": "any", "temperature": 0}
ASKED = f"[user]{PLACE}What is this?\n[assistant]"


@pytest.fixture(scope="module")
def engine(seeing: SeeingModel) -> Iterator[Engine]:
    with engine_of(seeing, parallel=2) as engine:
        yield engine


def part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_address(saved(image)), "detail": "auto"}}


def block(image: Image.Image) -> dict[str, Any]:
    data = base64.b64encode(saved(image)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_python_takes_paths_bytes_and_pixels(engine: Engine, seeing: SeeingModel, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(saved(CAT))
    truth = seeing.said(ASKED, CAT)
    for given in (path, str(path), saved(CAT), CAT, data_address(saved(CAT))):
        content = [{"type": "image", "image": given}, words("What is this?")]
        found = engine.generate([{"role": "user", "content": content}], max_new_tokens=MADE, temperature=0)
        assert found.text == truth
        assert found.usage.image_tokens == 6
        assert found.usage.prompt_tokens == len(engine.encode([{"role": "user", "content": content}]))
    assert engine.chat(max_new_tokens=MADE, temperature=0).send("What is this?", images=[path]).text == truth


def test_chat_completions(openai: OpenAI, seeing: SeeingModel) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [part(CAT), words("What is this?")]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [words("And "), part(DOG), words("?")]},
    ]
    found = openai.chat.completions.create(**GREEDY, messages=messages[:1], max_tokens=MADE)
    assert found.choices[0].message.content == seeing.said(ASKED, CAT)
    assert found.usage.prompt_tokens_details.model_dump()["image_tokens"] == 6
    text = f"[user]{PLACE}What is this?\n[assistant]A cat.\n[user]And {PLACE}?\n[assistant]"
    chunks = openai.chat.completions.create(**GREEDY, messages=messages, max_tokens=MADE, stream=True)
    written = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert written == seeing.said(text, CAT, DOG)
    # Another picture under the same words finds none of the first one's rows
    other = [{"role": "user", "content": [part(DOG), words("What is this?")]}]
    found = openai.chat.completions.create(**GREEDY, messages=other, max_tokens=MADE)
    assert found.choices[0].message.content == seeing.said(ASKED, DOG) != seeing.said(ASKED, CAT)


def test_responses(openai: OpenAI, seeing: SeeingModel) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_address(saved(CAT)), "detail": "auto"},
        {"type": "input_text", "text": "What is this?"},
    ]
    asked: Any = {**GREEDY, "input": [{"role": "user", "content": content}], "max_output_tokens": MADE}
    found = openai.responses.create(**asked)
    assert found.output_text == seeing.said(ASKED, CAT)
    assert found.usage.input_tokens_details.model_dump()["image_tokens"] == 6


def test_messages_also_with_the_result_of_a_tool(anthropic: Anthropic, seeing: SeeingModel) -> None:
    asked: Any = {"model": "any", "max_tokens": MADE, "extra_body": {"temperature": 0}}
    messages: Any = [{"role": "user", "content": [block(CAT), words("What is this?")]}]
    found = anthropic.messages.create(**asked, messages=messages)
    assert found.content[0].text == seeing.said(ASKED, CAT)
    assert found.usage.model_dump()["image_tokens"] == 6
    read = found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    assert anthropic.messages.count_tokens(model="any", messages=messages).input_tokens == read
    result = {"type": "tool_result", "tool_use_id": "a", "content": [words("Seen:"), block(DOG)]}
    messages = [{"role": "user", "content": "Look."}, {"role": "user", "content": [result, words("Well?")]}]
    found = anthropic.messages.create(**asked, messages=messages)
    text = f"[user]Look.\n[tool]Seen:{PLACE}\n[user]Well?\n[assistant]"
    assert found.content[0].text == seeing.said(text, DOG)


BAD = {
    "http": ("https://example.com/a.png", "address of https:, and nothing is ever fetched"),
    "file": ("file:///etc/passwd", "address of file:, and nothing is ever fetched"),
    "name": ("/etc/passwd", "names of files are not read here"),
    "cut off": (data_address(saved(CAT)[:200]), "is damaged, or cut off"),
    "bomb": (data_address(png_of_size(9_000, 9_000)), "is 9000 x 9000 pixels"),
    "PDF": (data_address(b"%PDF-1.7 secret words"), "is a PDF"),
    "base64": ("data:image/png;base64,secretwords!", "is no base64"),
    "line": (data_address(saved(Image.new("RGB", (1, 1000)))), "one side is more than 200 times"),
}


def test_bad_pictures_are_named_and_a_good_client_is_served_meanwhile(
    openai: OpenAI, address: str, seeing: SeeingModel
) -> None:
    truth, answers = seeing.said(ASKED, CAT), []

    def ask() -> None:
        messages: Any = [{"role": "user", "content": [part(CAT), words("What is this?")]}]
        with OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
            for _ in range(3):
                found = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=MADE)
                answers.append(found.choices[0].message.content)

    good = threading.Thread(target=ask)
    good.start()
    for url, why in BAD.values():
        messages: Any = [words("x"), {"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(BadRequestError) as caught:
            openai.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": messages}], max_tokens=1)
        assert why in str(caught.value)
        assert "picture 1 (message 1)" in str(caught.value)
        assert "secret" not in str(caught.value)
    many: Any = [{"role": "user", "content": [part(CAT)] * 17}]
    with pytest.raises(BadRequestError, match="has 17 pictures, and 16 may be"):
        openai.chat.completions.create(**GREEDY, messages=many, max_tokens=1)
    for kind in ("video_url", "input_audio", "file"):
        messages = [{"role": "user", "content": [{"type": kind, kind: {}}]}]
        with pytest.raises(BadRequestError, match=f"a part of type '{kind}', and only text and images"):
            openai.chat.completions.create(**GREEDY, messages=messages, max_tokens=1)
    good.join(60)
    assert answers == [truth] * 3


def test_two_pictures_at_once_share_passes(openai: OpenAI, address: str, seeing: SeeingModel) -> None:
    found: dict[str, str | None] = {}

    def ask(name: str, image: Image.Image) -> None:
        body = {**GREEDY, "messages": [{"role": "user", "content": [part(image), words("What is this?")]}],
                "max_tokens": MADE}  # fmt: skip
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
        found[name] = answer["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=pair) for pair in (("cat", CAT), ("dog", DOG))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"cat": seeing.said(ASKED, CAT), "dog": seeing.said(ASKED, DOG)}


def test_jpeg_in_another_mode_is_what_its_pixels_are(openai: OpenAI, seeing: SeeingModel) -> None:
    content = saved(CAT.convert("L"), "JPEG")
    pixels = Image.open(io.BytesIO(content)).convert("RGB")
    messages: Any = [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": data_address(content, "image/jpeg")}}, words("What is this?"),
    ]}]  # fmt: skip
    found = openai.chat.completions.create(**GREEDY, messages=messages, max_tokens=MADE)
    assert found.choices[0].message.content == seeing.said(ASKED, pixels)
