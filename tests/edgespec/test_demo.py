"""The built-in pair: small, greedy-exact through trees, worth drafting with, and as the README says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.hub.names import BUILT_IN_HEAD
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from tests.support.families import greedy_tokens

ROOT = Path(__file__).parents[2]
GREEDY = SamplingSettings(temperature=0)
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = open_pair(None, None).tokenizer
    return [tokenizer.encode(row.prompt) for row in read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' greedy decoding gives in float32."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / "target", dtype=torch.float32)
    return [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("draft", "policy", "size"), [(None, "dyspec", 64), (None, "dyspec", 768), (BUILT_IN_HEAD, "adaptive", 64)]
)
def test_streamed_greedy_texts_are_those_of_plain_decoding(
    draft: str | None, policy: Any, size: int, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    with Engine.from_pretrained(
        draft=draft, tree=TreeSettings(policy=policy, size=size), limits=MemoryLimits(max_resident_layers=0)
    ) as engine:
        for prompt, expected in zip(prompts, plain, strict=True):
            assert list(engine.generate(prompt, max_new_tokens=NUM_TOKENS, sampling=GREEDY).token_ids) == expected


def test_the_head_has_more_accepted_than_the_draft(prompts: list[list[int]]) -> None:
    tokens = []
    for draft in (None, BUILT_IN_HEAD):
        with Engine.from_pretrained(
            draft=draft, tree=TreeSettings(policy="eagle2", size=60, depth=7, lookup=False)
        ) as engine:
            results = [engine.generate(prompt, max_new_tokens=64, temperature=1.0, seed=1) for prompt in prompts[::2]]
        tokens.append(sum(result.tokens_per_pass or 0 for result in results) / len(results))
    assert tokens[1] > 1.08 * tokens[0]


def test_trees_yield_several_tokens_a_pass_and_larger_trees_no_fewer(prompts: list[list[int]]) -> None:
    rates = []
    for size in (64, 768):
        with Engine.from_pretrained(tree=TreeSettings(size=size, lookup=False)) as engine:
            steps = [
                step
                for prompt in prompts[::3]
                for step in engine.generate(
                    prompt, max_new_tokens=32, sampling=SamplingSettings(temperature=0.8), seed=7
                ).passes
            ]
        rates.append(sum(len(step.tokens) for step in steps) / len(steps))
    assert rates[0] > 1.8
    assert rates[1] > 0.95 * rates[0]


def test_the_tokenizer_gives_back_any_text() -> None:
    tokenizer = open_pair(None, None).tokenizer
    text = "def f():\n\treturn 'naïve ☃ 漢字'  # \x00\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), DEMO_FOLDER / "README.md"]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readmes_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_readmes_first_command_names_a_file_of_valid_rows() -> None:
    path = DEMO_FOLDER / "prompts.jsonl"
    assert str(path.relative_to(ROOT)).replace("\\", "/") in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]) >= 4
