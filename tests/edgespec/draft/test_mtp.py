"""Multi-token-prediction layers of a target's own checkpoint: their outputs are the page's, texts plain decoding's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.cli import run
from edgespec.config import DraftSampling
from edgespec.draft.agreement import Agreement, Comparison
from edgespec.draft.mtp import mtp_names
from edgespec.draft.readings import AS_STATED, Reading
from edgespec.errors import EdgespecError
from edgespec.grow.sequoia import power_law
from edgespec.hub.names import MTP, NO_DRAFT
from edgespec.pair.folder import open_architecture, open_model
from edgespec.pair.mtp import open_mtp
from edgespec.pair.pair import open_pair
from edgespec.placement.acceptance import AssumedAcceptance
from edgespec.placement.own_layer import weigh_own_layer
from edgespec.placement.pair_setup import set_up
from edgespec.placement.pair_sizes import PairSizes
from edgespec.placement.place import Memory
from edgespec.placement.run_config import RunConfig
from edgespec.tuning import draft_check
from tests.edgespec.draft.contract import PLAIN, TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.mtp_target import TYPES, reference, write_target
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import publish
from tests.support.families import make_model, save_folder
from tests.support.tiny_configs import tiny_config

RUN = RunConfig(
    device=torch.device("cpu"), dtype=torch.float32, limits=MemoryLimits(), context_tokens=64, prompt_tokens=16
)
# Whose draft grows in every step: beside looked up text, the clock may leave it out
DRAFTED = TreeSettings(size=8, depth=4, lookup=False)


@pytest.fixture(scope="module", params=TYPES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return write_target(tmp_path_factory.mktemp("mtp") / "target", request.param)


@torch.no_grad()
def compare(engine: Engine, plain: PreTrainedModel, *, rounds: int = 2, reading: Reading = AS_STATED) -> None:
    """Grow a tree from a text, commit a path, and compare each node with the page's forward, so read."""
    looked, drafter = drafter_at(engine, TEXT)
    for text, paths, _ in rounds_of(looked, drafter, count=rounds):
        found = drafter.hidden(torch.arange(len(paths)))
        logits = drafter.model.logits(found)
        for row, path in enumerate(paths):
            expected, expected_logits = reference(plain, text, path, reading)
            torch.testing.assert_close(found[row], expected[-1], rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(logits[row], expected_logits[-1], rtol=2e-4, atol=1e-4)


def test_outputs_in_a_tree_are_the_pages(written: tuple[Path, PreTrainedModel]) -> None:
    folder, plain = written
    with open_engine(folder, MTP) as engine:
        compare(engine, plain)


@pytest.mark.parametrize("reading", [Reading(before_norm=True), Reading(flips_output=True)])
def test_a_reading_that_the_check_has_found_is_the_pages_and_texts_stay(
    written: tuple[Path, PreTrainedModel], reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = written
    one = Agreement(first=0.5, second=0.5)
    found = Comparison(stated=one, best=one, reading=reading)
    monkeypatch.setattr(draft_check, "_read_cached", lambda _: found)
    with open_engine(folder, MTP, tree=DRAFTED, draft_check=True) as engine:
        compare(engine, plain, reading=reading)
        texts = []
        for tree in (None, PLAIN):
            engine.use_tree(tree)
            texts.append(engine.generate(list(range(20, 40)), max_new_tokens=12, seed=3, ignore_eos=True).token_ids)
    assert texts[0] == texts[1]


def test_a_draft_reads_the_layers_own_tensors_and_no_others(written: tuple[Path, PreTrainedModel]) -> None:
    pair = open_pair(written[0], MTP)
    names = mtp_names(pair.target.config.get_text_config(decoder=True), is_gguf=False)
    stored = {entry.name for entry in pair.draft.checkpoint.tensors.values()}
    assert stored == {name for name in names.of_layer(pair.target.checkpoint.tensors) if "embed_tokens" not in name}
    assert pair.names == (written[0].name, "mtp")  # by its word: the folder's name would be the target's


def test_the_layer_drafts_where_nobody_has_named_a_draft(written: tuple[Path, PreTrainedModel]) -> None:
    pair = open_pair(written[0], None)
    assert pair.has_default_draft
    assert open_pair(written[0], NO_DRAFT).draft is None
    assert not open_pair(written[0], MTP).has_default_draft
    setup = set_up(pair, RUN)
    (why,) = setup.notes
    assert (setup.pair.draft is None) == ("does not draft" in why)
    assert (setup.weights.draft is None) == (setup.pair.draft is None)


def seconds_of(placed: TreeSettings, base: float, node: float) -> Any:
    """Steps that take 2 s without trees, and so many times as long with one node, and with each more."""

    def step_s(nodes: int, depth: int, _tokens: float) -> float:
        assert (placed.policy == "none") == (nodes == depth == 0)
        return 2.0 if nodes == 0 else 2.0 * (base + node * (nodes - 1))

    return step_s


@pytest.mark.parametrize(
    ("base", "node", "said"),
    [
        (1.2, 9.0, "drafts: a step with 1 node is reckoned to take 1.2 times as long, and to yield 1.5 tokens"),
        (1.49, 9.0, "drafts: a step with 1 node"),
        (1.51, 9.0, "does not draft: a step with 1 node"),
        (1.6, 0.01, "drafts: a step with 32 nodes"),  # layers move for one node as for many
        (None, 0.0, "does not draft: it does not fit"),
    ],
)
def test_it_drafts_where_memory_allows_and_half_right_guesses_pay(base: float | None, node: float, said: str) -> None:
    def place(tree: TreeSettings) -> Any:
        if tree.policy != "none" and base is None:
            raise EdgespecError("E_MEMORY", "it does not fit.", "")
        return tree

    half = AssumedAcceptance(rates=power_law(0.5), about="half of the first guesses")
    found = weigh_own_layer(TreeSettings(), place, lambda placed: seconds_of(placed, base or 0.0, node), half)
    assert said in found.why
    assert found.drafts == ("does not" not in found.why)


def test_a_layer_that_takes_the_targets_memory_is_left_out(tmp_path: Path) -> None:
    pair = open_pair(write_target(tmp_path / "target", "qwen3_5_text")[0], None)
    alone = PairSizes(pair, RUN).place(TreeSettings(policy="none"), RUN).placement
    memory = Memory(device_budget_bytes=alone.planned_bytes, host_budget_bytes=0)
    setup = set_up(pair, RUN, sizes=PairSizes(pair, RUN, memory=memory))
    assert setup.pair.draft is None
    assert setup.placement.is_resident
    assert setup.tree.policy == "none"


def test_a_layer_that_cannot_be_read_stops_nobody(tmp_path: Path) -> None:
    folder, _ = write_target(tmp_path / "target", "qwen3_next")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mtp.other_proj.weight": torch.zeros(2, 2)}, path)
    pair = open_pair(folder, None)
    assert pair.draft is None
    assert any("cannot draft here" in note and "other_proj" in note for note in pair.target.notes)


@torch.no_grad()
def first_guess(engine: Engine) -> Tensor:
    """Q [3, V] after a text's root, and after two nodes below it."""
    _, drafter = drafter_at(engine, TEXT, sampling=DraftSampling(temperature=0.8))
    first = drafter.expand(torch.tensor([7]), torch.tensor([-1]))
    return torch.cat([first, drafter.expand(torch.tensor([11, 12]), torch.tensor([0, 0]))])


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_a_packed_layer_drafts_as_its_weights_say(model_type: str, tmp_path: Path) -> None:
    folder, _ = write_target(tmp_path / "target", model_type)
    plain = publish(folder, PUBLISHED["fp8-blocks"])
    with open_engine(folder, MTP) as engine:
        packed = first_guess(engine)
    with open_engine(plain, MTP) as engine:
        torch.testing.assert_close(packed, first_guess(engine))
    with open_engine(plain, MTP, quant="nf4", draft_quant="nf4") as engine:
        assert engine.draft_model is not None
        rough = first_guess(engine)
    assert not torch.equal(rough, packed)
    torch.testing.assert_close(rough, packed, atol=0.08, rtol=0.0)


def test_a_bare_config_is_planned(tmp_path: Path) -> None:
    config = tiny_config("glm4_moe")
    config.num_nextn_predict_layers = 1
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    draft = open_mtp(open_architecture(tmp_path))
    assert draft.checkpoint.tensors["fuse.eh_proj.weight"].shape == (config.hidden_size, 2 * config.hidden_size)
    assert not any("embed_tokens" in name for name in draft.checkpoint.tensors)


def test_the_first_of_several_layers_drafts_and_says_so(tmp_path: Path) -> None:
    folder, _ = write_target(tmp_path / "target", "glm4_moe")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}), encoding="utf-8")
    draft = open_pair(folder, MTP).draft
    assert draft.notes == ("is the target's own multi-token-prediction layer: the first of several",)


@pytest.mark.parametrize(
    ("change", "said"), [("none", "has no multi-token"), ("other", "'.*other_proj.weight'"), ("llama", "'llama'")]
)
def test_what_cannot_be_a_draft_is_refused_by_name(change: str, said: str, tmp_path: Path) -> None:
    if change == "llama":
        folder = save_folder(tmp_path / "target", make_model(tiny_config("llama")))
    else:
        folder, _ = write_target(tmp_path / "target", "qwen3_next")
        path = folder / "model.safetensors"
        tensors = load_file(path)
        if change == "none":
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
        else:
            tensors["mtp.other_proj.weight"] = torch.zeros(2, 2)
        save_file(tensors, path)
    with pytest.raises(EdgespecError, match=said) as caught:
        open_pair(folder, MTP)
    assert caught.value.code == "E_DRAFT_FORM"


def test_a_layer_is_listed_with_its_target(
    written: tuple[Path, PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, plain = written
    assert run(["models", str(folder)]) == 0
    layer = open_mtp(open_model(folder)).checkpoint.tensors
    own = sum(math.prod(entry.shape) for entry in layer.values())
    whole = sum(parameter.numel() for parameter in plain.parameters())
    ratio = f"{whole / own:.3g} times smaller"
    assert f"    draft: mtp, its own multi-token-prediction layer ({ratio})\n" in capsys.readouterr().out
    assert run(["models", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert found["drafts"] == ["mtp"]
