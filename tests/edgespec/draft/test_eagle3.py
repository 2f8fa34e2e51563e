"""EAGLE-3 heads of both containers: their outputs are the page's, and texts are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from edgespec import Engine, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft import eagle3
from edgespec.draft.eagle3 import Eagle3Facts
from edgespec.draft.eagle3_network import Eagle3Fuse, Eagle3Layer
from edgespec.draft.feature_head import FeatureHeadDrafter, open_drafter
from edgespec.draft.known_tokens_head import KnownTokensHead
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.model import causal_model
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from tests.conftest import FAMILIES, GROUPED, RECURRENT, make_model, save_folder
from tests.edgespec.draft.eagle3_head import ALL_FLAGS, Head, reference, states_of, tensors_of, write_head
from tests.edgespec.draft.misplaced import children_late, features_early
from tests.edgespec.draft.texts import (
    GREEDY_AND_WARM,
    POLICIES,
    PROMPT,
    check_after_cancel,
    check_company,
    name_of,
    open_engine,
)

SAMPLING = DraftSampling(temperature=0.8)
LAYERS = 8
PLAIN = LlamaConfig(**{**GROUPED, "num_hidden_layers": LAYERS})

FORMS: dict[str, Head] = {
    "plain": Head(),
    "plain, ids of H": Head(taps=(2, 7, 8), read=(2, 7, 8)),
    "plain, ids of outputs": Head(taps=(1, 3, 7), read=(2, 4, 8)),
    "plain, embedding's output": Head(taps=(0, 5), read=(0, 5)),
    "plain, no aux": Head(use_aux=False, read=(LAYERS + 1,)),
    "plain, all flags": Head(flags=frozenset(ALL_FLAGS)),
    "plain, norm_before_residual": Head(flags=frozenset({"norm_before_residual"})),
    "plain, norm_output": Head(flags=frozenset({"norm_output"})),
    "plain, norm_before_fc": Head(flags=frozenset({"norm_before_fc"})),
    "plain, whole vocabulary, no head": Head(draft_vocab=257, owns_head=False),
    "plain, whole vocabulary, own head": Head(draft_vocab=257),
    "plain, three layers": Head(num_layers=3),
    "plain, biases": Head(has_bias=True),
    "plain, narrow": Head(width=24, owns_embedding=True),
    "speculators": Head(container="speculators", taps=(2, 4, 5)),
    "speculators, own embedding": Head(container="speculators", owns_embedding=True, taps=(1, 3, 4)),
    "speculators, qwen3, fc_norm": Head(container="speculators", family="qwen3", flags=frozenset({"fc_norm"})),
    "speculators, two layers": Head(container="speculators", num_layers=2, flags=frozenset({"norm_before_residual"})),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("eagle3") / "target", make_model(PLAIN))


def compare(engine: Engine, plain: PreTrainedModel, head: Head, tensors: dict[str, Tensor], *, rounds: int = 3) -> None:
    """Grow random trees from a text, commit a path of each, and compare each node with the page's forward."""
    target_model, draft_model = engine.target_model, engine.draft_model
    assert draft_model is not None
    looked = Target(target_model)
    drafter: LanguageModelDrafter = open_drafter(draft_model, looked, sampling=SAMPLING)
    text, root = list(range(30, 50)), 7
    looked.prefill(torch.tensor(text))
    drafter.begin(text)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert isinstance(embed, Tensor)
    generator = torch.Generator().manual_seed(0)
    for number in range(rounds):
        states = states_of(plain, text)
        paths, parents = [[root]], [-1]
        drafter.expand(torch.tensor([root]), torch.tensor([-1]))
        for width in (3, 4, 2):
            above = torch.randint(len(paths), (width,), generator=generator)
            tokens = torch.randint(100, (width,), generator=generator)
            drafter.expand(tokens, above)
            for token, parent in zip(tokens.tolist(), above.tolist(), strict=True):
                paths.append([*paths[parent], token])
                parents.append(parent)
        found = drafter.hidden(torch.arange(len(paths)))
        logits = draft_model.logits(found)
        for row, path in enumerate(paths):
            expected, expected_logits = reference(head, tensors, states, embed, output, text, path)
            torch.testing.assert_close(found[row], expected[-1], rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(logits[row], expected_logits[-1], rtol=2e-4, atol=1e-4)
        tree = TokenTree(
            tokens=torch.tensor([path[-1] for path in paths]),
            parents=torch.tensor(parents),
            ranks=torch.zeros(len(paths), dtype=torch.long),
            draw="chosen",
            draft_rows=torch.arange(len(paths)),
        )
        looked.look(tree)
        best = max(range(len(paths)), key=lambda row: len(paths[row]))
        path = [row for row in range(1, len(paths)) if paths[row] == paths[best][: len(paths[row])]]
        path = path[: len(paths[best]) - 1]
        looked.commit(tuple(path))
        drafter.commit(root, path, paths[best][1:])
        text += paths[best]
        root = number


@pytest.mark.parametrize("name", FORMS)
def test_outputs_in_a_tree_are_the_pages(name: str, target_folder: Path, tmp_path: Path) -> None:
    head = FORMS[name]
    folder = write_head(tmp_path / "head", head)
    with open_engine(target_folder, folder) as engine:
        compare(engine, make_model(PLAIN), head, tensors_of(head))


def test_torchs_own_file_is_read(target_folder: Path, tmp_path: Path) -> None:
    head = Head(owns_embedding=True)
    folder = write_head(tmp_path / "head", head, is_torch_file=True)
    with open_engine(target_folder, folder) as engine:
        compare(engine, make_model(PLAIN), head, tensors_of(head), rounds=1)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3Facts.layers
    patch.setattr(Eagle3Facts, "layers", lambda self, count: tuple(layer - 1 for layer in right(self, count)))


def exchanged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Eagle3Fuse, "forward", lambda _self, embedded, previous: torch.cat([previous, embedded], -1))


def exchanged_in_attention(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3Layer.forward

    def forward(self: Eagle3Layer, hidden_states: Tensor, **named: Any) -> Tensor:
        own = self.self_attn.forward
        self.self_attn.forward = lambda hidden_states, **rest: own(hidden_states.roll(32, -1), **rest)
        try:
            return right(self, hidden_states, **named)
        finally:
            del self.self_attn.forward

    patch.setattr(Eagle3Layer, "forward", forward)


def map_as_ids(patch: pytest.MonkeyPatch) -> None:
    def forward(self: KnownTokensHead, hidden: Tensor) -> Tensor:
        known: Tensor = self.linear(self.norm(hidden))
        logits = known.new_full((*known.shape[:-1], self.num_tokens), -torch.inf)
        return logits.index_copy_(-1, self.d2t, known)

    patch.setattr(KnownTokensHead, "forward", forward)


def recycled_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    right = eagle3.read_eagle3

    def read(*arguments: Any, **named: Any) -> Any:
        facts, layer = right(*arguments, **named)
        return replace(facts, norm_output=not facts.norm_output), layer

    patch.setattr("edgespec.pair.eagle3.read_eagle3", read)


def first_row_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(causal_model, "replace", lambda window, **_: window)


def own_rows_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FeatureHeadDrafter, "_num_lasting", lambda _self, rows: len(rows))


def norm_not_before_residual(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3Layer.__init__

    def init(self: Eagle3Layer, *arguments: Any) -> None:
        right(self, *arguments)
        self.norm_before_residual = not self.norm_before_residual

    patch.setattr(Eagle3Layer, "__init__", init)


FAULTS = [
    off_by_one, exchanged, exchanged_in_attention, map_as_ids, recycled_before_the_norm, features_early,
    children_late,
    first_row_seen, own_rows_stay, norm_not_before_residual,
]  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS)
@pytest.mark.parametrize("name", ["plain", "plain, all flags"])
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = FORMS[name]
    folder = write_head(tmp_path / "head", head)
    plant(monkeypatch)
    with open_engine(target_folder, folder) as engine, pytest.raises(AssertionError, match="Tensor-likes"):
        compare(engine, make_model(PLAIN), head, tensors_of(head))


TARGETS: dict[str, Callable[[], PretrainedConfig]] = {
    name: of[name]
    for of, names in (
        (FAMILIES, ("gemma2", "gemma4", "gpt2", "qwen3-moe", "llama4")),
        (RECURRENT, ("qwen3.5", "qwen3-next", "nemotron-h", "lfm2", "jamba")),
    )
    for name in names
}


@pytest.mark.parametrize("family", TARGETS)
def test_hybrids_and_mixtures_give_the_states_between_their_layers(family: str, tmp_path: Path) -> None:
    config = TARGETS[family]()
    target = save_folder(tmp_path / "target", make_model(config))
    last = int(config.num_hidden_layers)
    head = Head(taps=(0, 2, last), read=(0, 2, last))
    folder = write_head(tmp_path / "head", head)
    with open_engine(target, folder) as engine:
        compare(engine, make_model(config), head, tensors_of(head), rounds=2)


@pytest.fixture(scope="module")
def plain_texts(target_folder: Path) -> list[tuple[int, ...]]:
    with open_engine(target_folder, None) as engine:
        return [engine.generate(PROMPT, **options).token_ids for options in GREEDY_AND_WARM]


@pytest.mark.parametrize(
    "tree",
    POLICIES,
    ids=name_of,
)
def test_every_policy_gives_plain_decodings_tokens(
    target_folder: Path, plain_texts: list[tuple[int, ...]], tree: TreeSettings, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "head", Head(flags=frozenset({"norm_before_residual"})))
    with open_engine(target_folder, folder, tree=tree) as engine:
        found = [engine.generate(PROMPT, **options).token_ids for options in GREEDY_AND_WARM]
    assert found[0] == plain_texts[0]
    assert (found[1] == plain_texts[1]) == (tree.draft_sampling(SAMPLING).tail_share > 0)


@pytest.mark.parametrize("draw", ["sampled", "chosen", "coupled"])
def test_every_draw_gives_plain_decodings_greedy_text(
    target_folder: Path, plain_texts: list[tuple[int, ...]], draw: Any, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "head", Head())
    policy = "dyspec" if draw == "sampled" else "opt-tree"
    tree = TreeSettings(policy=policy, draw=draw, size=12, lookup=False)
    with open_engine(target_folder, folder, tree=tree) as engine:
        assert engine.generate(PROMPT, **GREEDY_AND_WARM[0]).token_ids == plain_texts[0]


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "qwen3-moe"])
def test_texts_are_in_company_what_they_are_alone(family: str, tmp_path: Path) -> None:
    config = (FAMILIES | RECURRENT)[family]()
    target = save_folder(tmp_path / "target", make_model(config))
    last = int(config.num_hidden_layers)
    folder = write_head(tmp_path / "head", Head(taps=(0, 2, last), read=(0, 2, last)))
    check_company(target, folder)


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "qwen3-moe"])
def test_a_text_goes_on_after_it_was_cancelled_and_cut(family: str, tmp_path: Path) -> None:
    config = (FAMILIES | RECURRENT)[family]()
    target = save_folder(tmp_path / "target", make_model(config))
    last = int(config.num_hidden_layers)
    head = Head(taps=(0, 2, last), read=(0, 2, last))
    folder = write_head(tmp_path / "head", head)
    check_after_cancel(target, folder)
