"""What holds for every kind of draft, of each kind of target; `test_contract.py` asks it of all that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.head_network import HeadFacts
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.hub.names import MTP
from edgespec.model.target import Target
from edgespec.pair.folder import fingerprint, open_model
from edgespec.pair.pair import open_pair
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.train.head_model import lender, new_head, save_head
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import Head, write_head
from tests.edgespec.draft.gemma_assistant import Assistant, write_assistant
from tests.edgespec.draft.gemma_assistant import write_as_gguf as write_assistant_as_gguf
from tests.edgespec.draft.gguf_drafts import write_as_gguf
from tests.edgespec.draft.mtp_target import TYPES, write_target
from tests.offload.gguf.test_tiny_models import NAMES, TINY
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model, save_folder

FURTHER = [name for name in NAMES if name.endswith("-mtp")]  # files with such a layer

TURNS = ([*b"def write(path):\n"], [*b" return path"], [*b"# and"])
SYSTEM = [*b"def read(path):\n    return 0\n\n"]
PROMPT = "def read(path):\n    return "
GREEDY_AND_WARM: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_new_tokens": 12},
    {"temperature": 0.8, "max_new_tokens": 12, "seed": 3},
)
# Whose draft grows in every step: beside looked up text, the clock may leave it out
DRAFTED = TreeSettings(size=12, lookup=False)
PLAIN = TreeSettings(policy="none")
POLICIES = [
    replace(tree, lookup=False)
    for tree in (
        TreeSettings(policy="adaptive", size=12),
        TreeSettings(policy="dyspec", size=12),
        TreeSettings(policy="opt-tree", size=12),
        TreeSettings(policy="eagle2", size=12),
        TreeSettings(policy="c2t", size=12),
        TreeSettings(policy="sequoia", size=12),
        TreeSettings(policy="specinfer", branching=(3, 2, 1)),
        TreeSettings(policy="mcsd", branching=(3, 2, 1)),
        TreeSettings(policy="chain", draft_tokens=4),
    )
]


WritePair = Callable[[Path, str], tuple[Path, Path]]  # a folder and the target's family -> target and draft


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCase:
    """A kind of draft, and the targets that it is tried with."""

    write: WritePair
    families: tuple[str, ...] = ("llama",)  # of targets
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine


def with_draft(folder: Path, family: str, *, write: Callable[[Path, int], Path]) -> tuple[Path, Path]:
    """Write a family's target, and a draft of a target of so many layers."""
    config = {**FAMILIES, **RECURRENT}[family]()
    return save_folder(folder / "target", make_model(config)), write(folder, int(config.num_hidden_layers))


def _language_model(folder: Path, _num_layers: int) -> Path:
    return save_folder(folder / "draft", make_model(LlamaConfig(**{**SMALL, "num_hidden_layers": 1}), seed=1))


def _eagle3(folder: Path, num_layers: int) -> Path:
    layers = (0, 2, num_layers)
    return write_head(folder / "head", Head(layers=layers, read=layers, flags=frozenset({"norm_before_residual"})))


def _block(folder: Path, num_layers: int, *, markov: str | None = None, selector: bool = False) -> Path:
    own: dict[str, Any] = {"markov": markov, "from_anchor": markov is not None, "selector": selector}
    form = Drafter(ids=(0, 1, num_layers - 1), keys=(("num_target_layers", num_layers),), **own)
    return write_drafter(folder / "drafter", form)


def _assistant(folder: Path, _num_layers: int) -> Path:
    return write_assistant(folder / "assistant", Assistant())


def _assistant_in_file(folder: Path, _num_layers: int) -> Path:
    return write_assistant_as_gguf(folder / "assistant.gguf", Assistant())


def _in_file(folder: Path, num_layers: int, *, write: Callable[[Path, int], Path]) -> Path:
    return write_as_gguf(write(folder, num_layers), folder / "draft.gguf")


def facts(**changes: Any) -> HeadFacts:
    """What a feature head says of itself."""
    return HeadFacts(**{"target": "t", "target_fingerprint": "f", "method": "eagle", **changes})


def write_feature_head(folder: Path, target: Path, /, **changes: Any) -> Path:
    """Write a random head of a target, and return its folder."""
    model = open_model(target)
    of = facts(**{"target": "target", "target_fingerprint": fingerprint(model), **changes})
    with lender(model, device=torch.device("cpu"), dtype=torch.float32) as lent:
        save_head(new_head(lent, of, seed=1), of, folder)
    return folder


def _feature_head(folder: Path, _num_layers: int, **changes: Any) -> Path:
    return write_feature_head(folder / "head", folder / "target", **changes)


_COPY = partial(with_draft, write=lambda _folder, _num_layers: Path("self:nf4"))
# Each kind of cache and of weights: windows, a mixture, recurrent layers, and both
_COPIED = ("llama", "gemma3", "qwen3-moe", "qwen3-next", "mamba")
# Layers that share keys are of newer transformers
GEMMAS_4 = tuple(family for family in ("gemma4", "gemma4-shared") if family in FAMILIES)
DRAFTS: dict[str, DraftCase] = {
    "language model": DraftCase(
        write=partial(with_draft, write=_language_model), families=("llama", "qwen3.5")
    ),
    "copy, streamed": DraftCase(
        write=_COPY, families=_COPIED, options={"limits": MemoryLimits(max_resident_layers=0)}
    ),
    "copy, one stays": DraftCase(
        write=_COPY, families=("llama", "qwen3-next"), options={"limits": MemoryLimits(max_resident_layers=1)}
    ),
    "copy, all stay": DraftCase(write=_COPY, families=("llama", "mamba")),
    "EAGLE-3": DraftCase(write=partial(with_draft, write=_eagle3), families=("llama", "qwen3.5", "qwen3-moe")),
    "DFlash": DraftCase(
        write=partial(with_draft, write=_block), families=("llama", "gemma2", "qwen3.5", "qwen3-moe")
    ),
    "DSpark": DraftCase(write=partial(with_draft, write=partial(_block, markov="gated"))),
    "DFlash2": DraftCase(
        write=partial(with_draft, write=partial(_block, selector=True)), families=("llama", "gemma2", "qwen3.5")
    ),
    "EAGLE-3, GGUF": DraftCase(write=partial(with_draft, write=partial(_in_file, write=_eagle3))),
    "DSpark, GGUF": DraftCase(
        write=partial(with_draft, write=partial(_in_file, write=partial(_block, markov="vanilla")))
    ),
    "DFlash2, GGUF": DraftCase(
        write=partial(with_draft, write=partial(_in_file, write=partial(_block, selector=True)))
    ),
    "MTP": DraftCase(write=lambda folder, family: (write_target(folder, family)[0], MTP), families=TYPES),
    "MTP, GGUF": DraftCase(write=lambda _folder, family: (TINY / f"{family}.gguf", MTP), families=tuple(FURTHER[:2])),
    "assistant": DraftCase(write=partial(with_draft, write=_assistant), families=GEMMAS_4),
    "assistant, streamed target": DraftCase(
        write=partial(with_draft, write=_assistant), families=GEMMAS_4[:1],
        options={"limits": MemoryLimits(max_resident_layers=0)},
    ),
    "assistant, GGUF": DraftCase(write=partial(with_draft, write=_assistant_in_file), families=GEMMAS_4),
    "head": DraftCase(write=partial(with_draft, write=_feature_head)),
    "routed head": DraftCase(
        write=partial(with_draft, write=partial(_feature_head, router_groups=8, top_groups=2))
    ),
}  # fmt: skip
OF_FAMILIES = [(draft, family) for draft, kind in DRAFTS.items() for family in kind.families]
TEXT = range(30, 50)
# The parents of each layer's nodes, six layers deep, and paths of such a tree
SHAPE = ([0, 0, 0], [1, 1, 2, 0], [5, 4], [8, 9], [10], [12])
COMMITS: tuple[list[int], ...] = ([1, 5, 8, 10, 12, 13], [2, 6], [], [3])


def drafter_at(
    engine: Engine, text: Sequence[int], *, cache: Any = None, sampling: DraftSampling | None = None
) -> tuple[Target, LanguageModelDrafter]:
    """A target that has read a text, and its drafter, which has begun it."""
    assert engine.draft_model is not None
    looked = Target(engine.target_model)
    sampling = sampling or DraftSampling(temperature=1.0)
    drafter = open_drafter(engine.draft_model, looked, sampling=sampling, cache=cache)
    looked.prefill(torch.tensor(text))
    drafter.begin(text)
    return looked, drafter


def rounds_of(
    looked: Target | None, drafter: LanguageModelDrafter, *, count: int
) -> Iterator[tuple[list[int], list[list[int]], Tensor]]:
    """Yield the text, a tree's paths from its root on, and q [nodes, V] of their ends; then a path is committed.

    In odd rounds its last node is taken for one that was not expanded. Without a target, nothing is verified.
    """
    text, root = list(TEXT), 7
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        paths, parents = [[root]], [-1]
        q = [drafter.expand(torch.tensor([root]), torch.tensor([-1]))]
        for above in SHAPE:
            tokens = torch.randint(100, (len(above),), generator=generator)
            q.append(drafter.expand(tokens, torch.tensor(above)))
            paths += [[*paths[parent], token] for parent, token in zip(above, tokens.tolist(), strict=True)]
            parents += above
        yield text, paths, torch.cat(q)
        path = COMMITS[number % len(COMMITS)]
        if looked is not None:
            looked.look(
                TokenTree(
                    tokens=torch.tensor([path[-1] for path in paths]),
                    parents=torch.tensor(parents),
                    ranks=torch.zeros(len(paths), dtype=torch.long),
                    draw="chosen",
                    draft_rows=torch.arange(len(paths)),
                )
            )
            looked.commit(tuple(path))
        added = [paths[node][-1] for node in path]
        drafter.commit(root, [*path[:-1], -1] if path and number % 2 else path, added)
        text, root = [*text, root, *added], number


def name_of(tree: TreeSettings) -> str:
    """The name of trees in a test's id."""
    return f"{tree.policy}-{tree.draw or 'own'}"


def open_engine(target: Path, draft: Path | None, **options: Any) -> Engine:
    settings = {"context_tokens": 160, "self_check": False, "draft_check": False, "dtype": "float32", **options}
    return Engine.from_pair(open_pair(target, draft), **settings)


def _requests_of(engine: Engine) -> list[TextRequest]:
    """Texts of several lengths, warm and greedy in turn."""
    return [
        engine.request(PROMPT[number:], temperature=0.8 * (1 - number % 2), max_new_tokens=6 + number, seed=number)
        for number in range(3)
    ]


def check_company(target: Path, draft: Path, **options: Any) -> None:
    """Texts are what they are alone, and without a draft; each takes the steps that it takes alone."""
    with open_engine(target, draft, tree=DRAFTED, parallel=3, **options) as engine:
        requests = _requests_of(engine)
        alone = [engine.submit(request).result() for request in requests]
        together = dict(engine.generate_many(requests))
        engine.use_tree(PLAIN)
        plain = [engine.submit(request).result() for request in requests]
    for number, expected in enumerate(alone):
        found = together[number]
        assert not isinstance(found, Exception)
        assert found.token_ids == expected.token_ids == plain[number].token_ids
        assert [step.path for step in found.steps] == [step.path for step in expected.steps]
        assert any(step.num_drafted for step in found.steps)


def check_after_cancel(target: Path, draft: Path, **others: Any) -> None:
    """A turn begins on rows that both models have: what is drafted does not depend on how they came to be."""
    first, second = PROMPT * 3, PROMPT * 2 + "def write(path):"
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.8, "seed": 3}  # by whose noise a guess is taken
    with open_engine(target, draft, tree=DRAFTED, context_tokens=256, **others) as engine:
        expected = engine.generate(second, **options)
        engine.forget()
        handle = engine.submit(engine.request(first, max_new_tokens=40, temperature=0.0))
        for _ in zip(range(3), handle, strict=False):
            pass
        handle.cancel()
        engine.generate(first, max_new_tokens=6, temperature=0.0, reuse=True)
        found = engine.generate(second, **options, reuse=True)
    assert found.token_ids == expected.token_ids
    assert [step.path for step in found.steps] == [step.path for step in expected.steps]


def check_turns(target: Path, draft: Path, file: Path, **options: Any) -> None:
    """A conversation's turns go on from rows that are kept, and those of another run from a file's.

    Texts are plain decoding's, and what is drafted is what a draft that has read the whole text guesses.
    """
    temperatures = (0.0, 0.8)
    options = {"context_tokens": 256, "tree": DRAFTED, **options}
    with open_engine(target, draft, **options) as engine:
        expected = [_talk(engine, temperature, reuse=False)[0] for temperature in temperatures]
        engine.use_tree(PLAIN)
        plain = [_talk(engine, temperature, reuse=False)[0] for temperature in temperatures]
    for is_resumed in (False, True):
        with open_engine(target, draft, **options) as engine:
            cache = PromptCache(file, engine.pair, engine.run_config)
            cache.keep_beginning([[*SYSTEM, 1], [*SYSTEM, 2]])
            engine.prefix_cache.prompt_cache = cache
            talks = [_talk(engine, temperature, reuse=True) for temperature in temperatures]
        assert talks[0][1][0] == len(TURNS[0]) + (0 if is_resumed else len(SYSTEM))
        for (found, num_read), whole, alone in zip(talks, expected, plain, strict=True):
            assert num_read[1:] == [1 + len(turn) for turn in TURNS[1:]], "the last token of an answer, and the turn"
            for one, fresh, other in zip(found, whole, alone, strict=True):
                assert one.token_ids == fresh.token_ids == other.token_ids
                assert [step.path for step in one.steps] == [step.path for step in fresh.steps]
            assert sum(step.num_drafted for one in found for step in one.steps) > 8


def _talk(engine: Engine, temperature: float, *, reuse: bool) -> tuple[list[GenerationResult], list[int]]:
    """The answers of a conversation, and how many tokens each turn has read."""
    text, answers, num_read = list(SYSTEM), list[GenerationResult](), list[int]()
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 8, "reuse": reuse}
    for turn in TURNS:
        text += turn
        num_read.append(0)

        def count(_done: int, total: int) -> None:
            num_read[-1] = total

        answers.append(engine.generate(text, on_prefill=count, **options))
        text += answers[-1].token_ids
    return answers, num_read
