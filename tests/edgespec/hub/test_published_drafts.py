"""Published drafts are known by the names that people give to their targets, and the page has the command's table."""

import re
from typing import get_args

import pytest

from edgespec.draft.draft_kind import Name
from edgespec.hub.published_drafts import published_drafts, published_for
from scripts.make import published_drafts as page_of_drafts


def targets(*names: str) -> set[str]:
    return {one.target for one in published_for(names)}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("Qwen/Qwen3.6-27B", "Qwen3.6-27B"),
        ("unsloth/Qwen3.6-27B-MTP-GGUF", "Qwen3.6-27B"),
        ("Qwen3.6-27B-UD-Q4_K_XL.gguf", "Qwen3.6-27B"),
        ("QWEN3.6_27b-q4_k_m-00001-of-00003.gguf", "Qwen3.6-27B"),
        ("ollama:qwen3.6:27b", "Qwen3.6-27B"),
        ("ollama:llama3.3:70b", "Llama-3.3-70B-Instruct"),
        ("Meta-Llama-3.1-8B-Instruct-Q8_0.gguf", "Llama-3.1-8B-Instruct"),
        ("google/gemma-4-31B-it-qat-q4_0-gguf", "gemma-4-31B-it"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B-Instruct-2507"),
        ("Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B"),
        ("zai-org/GLM-5.3-Flash", "GLM-5.3-Flash"),
        ("zai-org/GLM-5.3-FP8", "GLM-5.3"),
    ],
)
def test_a_target_is_known_by_what_people_call_it(name: str, target: str) -> None:
    assert targets(name) == {target}


@pytest.mark.parametrize(
    "name",
    [
        "GLM-5",
        "GLM-5.25",
        "Kimi-K2.5.1",
        "Qwen3-4",
        "Qwen3-40B",
        "Qwen3.6",
        "Kimi-K2",
        "DeepSeek-R1-0528-Qwen3-8B",
        "my-qwen3-8b",
        "",
        ".",
    ],
)
def test_another_model_is_not_taken_for_one(name: str) -> None:
    assert targets(name) == set()


def test_of_several_names_each_counts_once() -> None:
    found = published_for(["file", "Qwen3-8B-GGUF", "Qwen/Qwen3-8B"])
    assert {one.target for one in found} == {"Qwen3-8B"}
    assert len(found) == len({one.name for one in found})


def test_every_draft_has_a_kind_that_is_read_and_a_page_that_names_it() -> None:
    table = published_drafts()
    assert len(table) == len({(one.target, one.name) for one in table})
    for one in table:
        assert one.kind in get_args(Name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.name)
        assert one.source.startswith("https://")
        assert targets(one.target) >= {one.target}


def test_the_page_has_the_same_table() -> None:
    page = page_of_drafts.PATH.read_text(encoding="utf-8")
    assert page == page_of_drafts.page_with_table(page), "run: python -m scripts.make.published_drafts"
    for one in published_drafts():
        assert one.name in page
        assert one.source in page
