"""Pictures of prompts on the command line: `--image`, rows of files, and what records and --resume know of them."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from edgespec.chat.pictures import PictureSource
from edgespec.cli.generate import requests as requests_module
from tests.cli.conftest import RunCli, jsonl, written
from tests.support.picture_files import data_address, saved
from tests.support.seeing_model import CAT, DOG, MADE, PLACE, SeeingModel
from tests.support.tiny_pictures import picture

ASKED = f"[user]{PLACE}What is this?\n[assistant]"


@pytest.fixture
def options(seeing: SeeingModel) -> list[str]:
    return ["-m", str(seeing.folder), "--temp", "0", "-n", str(MADE), "-c", "256", "--dtype", "float32",
            "--no-self-check"]  # fmt: skip


def test_image_goes_with_a_prompt_and_keeps_its_place(
    run_cli: RunCli, options: list[str], seeing: SeeingModel, tmp_path: Path
) -> None:
    for name, image in (("cat.png", CAT), ("dog.png", DOG)):
        (tmp_path / name).write_bytes(saved(image))
    images = ["--image", str(tmp_path / "cat.png"), "--image", str(tmp_path / "dog.png")]
    found = run_cli([*options, "-p", "What is this?", *images[:2]])
    assert found.out.rstrip("\n") == seeing.said(ASKED, CAT).rstrip("\n")
    found = run_cli([*options, "-p", "What is this?", *images])
    assert found.out.rstrip("\n") == seeing.said(f"[user]{PLACE}{PLACE}What is this?\n[assistant]", CAT, DOG).rstrip(
        "\n"
    )
    text = "Between <|vision_start|><|image_pad|><|vision_end|> words"
    assert run_cli([*options, "--raw", "-p", text, *images[:2]]).out.rstrip("\n") == seeing.said(text, CAT).rstrip("\n")
    assert "has 1 pictures, and '<|image_pad|>' 0 times" in run_cli([*options, "--raw", "-p", "a", *images[:2]]).err
    assert "--image goes with -p TEXT" in run_cli([*options, "p.txt", *images[:2]], files={"p.txt": "a"}).err
    assert "there is no file" in run_cli([*options, "-p", "a", "--image", "nowhere.png"]).err


def parts(*given: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]


def test_rows_have_images_of_their_files_folder(
    run_cli: RunCli, options: list[str], seeing: SeeingModel, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    (folder / "seen").mkdir(parents=True)
    (folder / "seen/cat.png").write_bytes(saved(CAT))
    (folder / "dog.webp").write_bytes(saved(DOG, "WEBP", lossless=True))
    image, address = {"type": "image"}, {"type": "image_url", "image_url": {"url": data_address(saved(DOG))}}
    rows = [
        {"id": "prompt", "prompt": "What is this?", "images": ["seen/cat.png"]},
        {"id": "messages", "messages": [{"role": "user", "content": parts("One ", image, " and ", image)}],
         "images": ["seen/cat.png", "dog.webp"]},
        {"id": "turns", "turns": ["What is this?"], "images": "seen/cat.png"},
        {"custom_id": "batch", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": parts(address, "What is this?")}]}},
        {"custom_id": "response", "url": "/v1/responses", "body": {"input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": data_address(saved(DOG))},
                                         {"type": "input_text", "text": "What is this?"}]}]}},
        {"id": "words", "prompt": "What is this?"},
    ]  # fmt: skip
    (folder / "p.jsonl").write_text(jsonl(rows)["p.jsonl"])
    run_cli([*options, str(folder / "p.jsonl"), "-o", str(tmp_path / "out.jsonl")]).ended()
    found = {record["id"]: record for record in written(tmp_path / "out.jsonl")}
    truths = {
        "prompt": seeing.said(ASKED, CAT),
        "messages": seeing.said(f"[user]One {PLACE} and {PLACE}\n[assistant]", CAT, DOG),
        "batch": seeing.said(ASKED, DOG),
        "response": seeing.said(ASKED, DOG),
    }
    assert {name: found[name]["text"] for name in truths} == truths
    assert found["turns"]["text"] == truths["prompt"]
    assert found["words"]["text"] != truths["prompt"]
    assert found["prompt"]["usage"]["image_tokens"] == 6
    assert "image_tokens" not in found["words"]["usage"]
    # Records have digests, and no picture
    assert found["messages"]["images"] == [*found["prompt"]["images"], *found["batch"]["images"]]
    assert found["batch"]["prompt"] == [{"role": "user", "content": parts(image, "What is this?")}]
    assert "base64" not in (tmp_path / "out.jsonl").read_text()
    assert len(found["prompt"]["images"][0]) == 64


def test_resume_knows_another_picture_of_the_same_name(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    picture, prompts, out = tmp_path / "a.png", tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(jsonl([{"id": "a", "prompt": "What?", "images": ["a.png"]}])["p.jsonl"])
    for kind in ("jsonl", "openai-batch"):
        arguments = [*options, str(prompts), "-o", str(out), "--format", kind]
        picture.write_bytes(saved(CAT))
        assert run_cli([*arguments, "--overwrite"]).code == 0
        picture.write_bytes(saved(CAT, "WEBP", lossless=True))  # the same pixels
        assert "nothing to do" in run_cli([*arguments, "--resume"]).err
        picture.write_bytes(saved(DOG))
        assert "prompts have changed" in run_cli([*arguments, "--resume"]).ended(2).err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "images": 7}, 'the "images" of line 1 are no list of file names'),
        ({"messages": [{"role": "user", "content": "a"}], "images": ["a.png"]}, "its messages have 0 places for them"),
        ({"messages": [{"role": "user", "content": "a", "images": ["a.png"]}]}, "message 1 has images beside"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "a part of type 'video'"),
        ({"body": {"prompt": "a"}, "images": ["a.png"]}, "beside a completion's prompt"),
    ],
)  # fmt: skip
def test_rows_with_bad_pictures_end_the_run_before_it_begins(
    row: dict[str, Any], words: str, run_cli: RunCli, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(saved(CAT))
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    refused = run_cli([*options, str(tmp_path / "p.jsonl")])
    assert refused.code in (2, 4)
    assert words in refused.err
    assert "reading weights" not in refused.err


BAD_ROWS = {
    "none": {"prompt": "a", "images": ["none.png"]},
    "damaged": {"messages": [{"role": "user", "content": [{"type": "image", "image": "p.jsonl"}]}]},
    "address": {"body": {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, {"type": "text", "text": "a"}]}]}},
    "file_id": {"messages": [{"role": "user", "content": [{"type": "image", "file_id": "f"}]}]},
    "many": {"turns": ["a", "b"], "images": ["a.png"] * 17},
}  # fmt: skip


def test_a_bad_picture_is_its_row_s_error_and_the_others_run(
    run_cli: RunCli, options: list[str], seeing: SeeingModel, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(saved(CAT))
    rows = [{"id": name, **row} for name, row in BAD_ROWS.items()]
    good = {"id": "good", "prompt": "What is this?", "images": ["a.png"]}
    (tmp_path / "p.jsonl").write_text(jsonl([rows[0], good, *rows[1:]])["p.jsonl"])
    outcome = run_cli([*options, str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "out.jsonl")]).ended(3)
    found = {record["id"]: record for record in written(tmp_path / "out.jsonl")}
    assert found["good"]["text"] == seeing.said(ASKED, CAT)
    errors = {name: found[name]["error"] for name in BAD_ROWS}
    assert {name: error["type"] for name, error in errors.items()} == {
        **dict.fromkeys(BAD_ROWS, "E_PICTURE"), "none": "E_FILE_NOT_FOUND"
    }  # fmt: skip
    said = ("there is no file", "is damaged", "is an address of https:", "names a file_id", "has 17 pictures")
    for error, words in zip(errors.values(), said, strict=True):
        assert words in error["message"]
    assert "not run, and errors in the records: line 1 (picture 1: there is no file" in outcome.err
    # Without a good one the run ends before weights are read.
    (tmp_path / "p.jsonl").write_text(jsonl(rows)["p.jsonl"])
    refused = run_cli([*options, str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--overwrite"])
    assert (refused.code, "reading weights" in refused.err) == (4, False)
    assert "line 1: picture 1: there is no file" in refused.err


@pytest.mark.parametrize("most_bytes", [1 << 28, 0])
def test_a_row_s_picture_is_decoded_once_or_again_beside_passes(
    most_bytes: int, run_cli: RunCli, options: list[str], seeing: SeeingModel, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    threads: list[str] = []
    read = PictureSource.read

    def noted(source: PictureSource) -> Any:
        threads.append(threading.current_thread().name)
        return read(source)

    monkeypatch.setattr(PictureSource, "read", noted)
    monkeypatch.setattr(requests_module, "MOST_PIXEL_BYTES", most_bytes)
    images = [CAT, DOG, picture(3, 64, 64)]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.png").write_bytes(saved(image))
    rows = [{"id": str(number), "prompt": "What is this?", "images": [f"{number}.png"]} for number in range(3)]
    (tmp_path / "p.jsonl").write_text(jsonl(rows)["p.jsonl"])
    run_cli([*options, str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-np", "2"]).ended()
    found = {record["id"]: record["text"] for record in written(tmp_path / "out.jsonl")}
    assert found == {str(number): seeing.said(ASKED, image) for number, image in enumerate(images)}
    again = [] if most_bytes else ["edgespec-pictures_0"] * 3
    assert threads == [threading.current_thread().name] * 3 + again


def test_models_that_do_not_see_are_named(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(CAT))
    refused = run_cli(["-p", "What?", "--image", str(tmp_path / "a.png")]).ended(2)
    assert "does not see: it has no tower for pictures" in refused.err
