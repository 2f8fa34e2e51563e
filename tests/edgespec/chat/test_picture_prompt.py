"""Words and pictures become what the family's processor makes of them; what cannot be read is refused by name."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from edgespec.chat.picture_parts import sources_of, with_sources
from edgespec.chat.picture_prompt import PictureReader, messages_prompt, picture_reader, read_prompt, text_prompt
from edgespec.chat.pictures import PictureSource
from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PicturePrompt
from tests.support.picture_files import data_address, image, saved
from tests.support.tiny_processors import FAMILIES, SeeingFiles

RED, BLUE = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (80, 80), "blue")


def source(given: Any) -> PictureSource:
    return PictureSource(where="picture 1", given=given)


def reader_of(family: SeeingFiles, folder: Path) -> PictureReader:
    return picture_reader(family.save(folder), str(folder))


def in_base64(picture: Image.Image) -> str:
    return data_address(saved(picture)).partition(",")[2]


def digests(prompt: PicturePrompt) -> list[str]:
    return list(dict.fromkeys(digest for _, _, digest in prompt.image_rows))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM's, of torch's tensors
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_s_processor_says_how_many_rows_a_picture_has_and_where(kind: str, tmp_path: Path) -> None:
    family = FAMILIES[kind]
    reader = reader_of(family, tmp_path)
    text = f"Look: {family.place} and {family.place} What?"
    found = reader.read(text, [source(RED), source(BLUE)])
    tokenizer = family.tokenizer()
    row_id = tokenizer.convert_tokens_to_ids(family.row)
    inside = {place for first, end, _ in found.image_rows for place in range(first, end)}
    assert inside == {place for place, token in enumerate(found.ids) if token == row_id}
    assert len(inside) == found.num_image_tokens > 4
    words = tokenizer.decode([token for token in found.ids if token not in tokenizer.all_special_ids])
    assert words.split()[0] == "Look:"
    assert "and" in words
    assert words.endswith("What?")
    assert found.inputs["pixel_values"].dtype == torch.float32
    first, second = digests(found)
    again = reader.read(text, [source(BLUE), source(RED)])
    assert digests(again) == [second, first]  # of the pixels, wherever they stand
    assert digests(reader.read(text, [source(RED), source(RED)])) == [first]
    ((_, end, _), (start, _, _)) = next(runs for runs in pairwise(found.image_rows) if runs[0][2] != runs[1][2])
    assert " and " in tokenizer.decode(found.ids[end:start])


def test_other_settings_of_a_processor_are_another_picture(tmp_path: Path) -> None:
    family = FAMILIES["gemma3"]
    other = replace(family, settings={**family.settings, "image_mean": [0.4, 0.5, 0.6]})
    one, two = (reader_of(each, tmp_path / str(number)) for number, each in enumerate((family, other)))
    prompts = [reader.read(family.place, [source(RED)]) for reader in (one, two)]
    assert prompts[0].ids == prompts[1].ids
    assert digests(prompts[0]) != digests(prompts[1])


def pair_of(family: SeeingFiles, folder: Path, template: str | None = None) -> Any:
    target, tokenizer = family.save(folder), family.tokenizer()
    tokenizer.name_or_path = str(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return SimpleNamespace(target=target, tokenizer=tokenizer)


def test_messages_become_what_the_template_writes_with_a_place_for_each_picture(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]
    pair = pair_of(family, tmp_path)
    (tmp_path / "red.png").write_bytes(saved(RED))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "Before "}, {"type": "image", "image": "red.png"},
            {"type": "text", "text": " after"},
            {"type": "image_url", "image_url": {"url": data_address(saved(BLUE)), "detail": "low"}},
        ]},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(RED)}},
            {"type": "input_image", "image_url": data_address(saved(BLUE), "image/jpeg")},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    found = read_prompt(pair, messages, folder=tmp_path)
    assert isinstance(found, PicturePrompt)
    place = family.place
    text = (f"[system]Be brief.\n[user]Before {place} after{place}\n[assistant]Seen.\n"
            f"[user]{place}{place}And now?\n[assistant]")  # fmt: skip
    by_text = text_prompt(pair, text, [source(each) for each in (RED, BLUE, RED, BLUE)])
    assert found.ids == by_text.ids
    assert list(found.image_rows) == list(by_text.image_rows)
    assert [digest for _, _, digest in found.image_rows] == 2 * digests(found)
    assert all(torch.equal(found.inputs[name], value) for name, value in by_text.inputs.items())
    # A few more forms that programs have, and pixels themselves
    for part in ({"image": RED}, {"image": tmp_path / "red.png"}, {"image": saved(RED)}, {"path": "red.png"},
                 {"url": data_address(saved(RED))}, {"base64": in_base64(RED)}):  # fmt: skip
        (given,) = sources_of(with_sources([user_of(part)], folder=tmp_path))
        assert given.known().sha256 == source(RED).known().sha256


IN_PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
)
NO_RESULTS = (
    "{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{% for part in message['content'] %}{{ part['text'] or '<image>' }}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)


def words_of(prompt: PicturePrompt, pair: Any) -> str:
    rows = {place for first, end, _ in prompt.image_rows for place in range(first, end)}
    ids = [token for place, token in enumerate(prompt.ids) if place not in rows]
    return str(pair.tokenizer.decode([token for token in ids if token not in pair.tokenizer.all_special_ids]))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else
                                        {"type": "image", "image": part} for part in parts]}  # fmt: skip


def test_templates_that_want_parts_or_have_no_place_in_results_are_followed(tmp_path: Path) -> None:
    family = FAMILIES["llava_onevision"]
    pair = pair_of(family, tmp_path, IN_PARTS)
    found = read_prompt(pair, [{"role": "system", "content": "Short."}, user(RED, "What is this?")], folder=tmp_path)
    assert isinstance(found, PicturePrompt)
    assert words_of(found, pair) == "Short.\nWhat is this?\n"
    pair = pair_of(family, tmp_path / "other", NO_RESULTS)
    result = {"role": "tool", "tool_call_id": "a", "content": user("Done.", RED)["content"]}
    found = read_prompt(pair, [user("Draw."), result, user(" Well?")], folder=tmp_path)
    assert isinstance(found, PicturePrompt)
    assert words_of(found, pair) == "[user]Draw.\n[tool]Done.\n[user] Well?\n"
    found = read_prompt(pair, [user("Draw."), result], folder=tmp_path)
    assert isinstance(found, PicturePrompt)
    assert words_of(found, pair) == "[user]Draw.\n[tool]Done.\n[user]\n"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user(RED, "What does <image> mean?")], "have 1 pictures, and the chat template writes '<image>' 2 times"),
        ([user(*[RED] * 17)], "has 17 pictures, and 16 may be"),
        ([user(RED), {"role": "assistant", "content": user("It is", RED)["content"]}], "has pictures, and only a text"),
        ([user({"type": "video"})], "is no picture, but of type dict"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "a part of type 'video', and only text"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "a part of type 'input_audio'"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"picture 1 \(message 1\) has nothing that is one"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"picture 1 \(message 1\) is no text"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}], "names a file_id"),
        ([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}]}],
         "a source of type 'url', and nothing is ever fetched"),
        ([user("http://a/b.png", RED), user("x", "y"), user(b"%PDF-1.7")], r"picture 2 \(message 3\) is a PDF"),
        ([user("x"), user("Look.", saved(image())[:50])], r"picture 1 \(message 2\) is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_by_its_place(messages: Any, words: str, tmp_path: Path) -> None:
    pair = pair_of(FAMILIES["llava_onevision"], tmp_path)
    with pytest.raises(EdgespecError, match=words):
        read_prompt(pair, messages, folder=tmp_path)


def user_of(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", **part}]}


def test_a_name_from_a_client_is_never_that_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(saved(RED))
    for part in ({"image": str(path)}, {"path": str(path)}, {"url": "red.png"}, {"image": {"path": str(path)}},
                 {"source": {"type": "file", "path": str(path)}}, {"image": path.as_uri()}):  # fmt: skip
        with pytest.raises(EdgespecError) as caught:
            [found.read() for found in sources_of(with_sources([user_of(part)]))]
        assert caught.value.code == "E_PICTURE"
        assert str(tmp_path) not in caught.value.what


def test_models_that_do_not_see_say_so_with_a_way_out(tmp_path: Path) -> None:
    target = FAMILIES["gemma3"].save(tmp_path)
    blind = SimpleNamespace(folder=tmp_path, config=target.config.get_text_config())
    with pytest.raises(EdgespecError, match=r"'gemma3_text'\) does not see: it has no tower for pictures\. Leave"):
        picture_reader(blind, str(tmp_path))
    packed = tmp_path / "model.gguf"
    packed.write_bytes(b"GGUF")
    with pytest.raises(EdgespecError, match=r"'model.gguf' is a GGUF file, .* Use the folder of the same model"):
        picture_reader(SimpleNamespace(folder=packed, config=target.config), "")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(EdgespecError, match=r"has neither preprocessor_config\.json nor processor_config\.json"):
        picture_reader(target, str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Nothing"}))
    with pytest.raises(EdgespecError, match=r"the processor of .* cannot be used"):
        picture_reader(target, str(tmp_path))


def test_a_plain_text_has_a_place_for_each_picture(tmp_path: Path) -> None:
    pair = pair_of(FAMILIES["gemma3"], tmp_path)
    with pytest.raises(EdgespecError, match="has 2 pictures, and '<start_of_image>' 1 times in its text"):
        text_prompt(pair, "A <start_of_image>", [source(RED), source(BLUE)])
    with pytest.raises(EdgespecError, match="half a surrogate pair"):
        text_prompt(pair, "A <start_of_image>\ud800", [source(RED)])
    pair.tokenizer.chat_template = None
    with pytest.raises(EdgespecError, match="no chat template"):
        messages_prompt(pair, with_sources([user(RED)], folder=tmp_path))
