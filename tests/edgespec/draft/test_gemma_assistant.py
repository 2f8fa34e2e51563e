"""Gemma 4 assistants: a node's q is the page's forward of its path, over the rows that the target keeps of the text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4Config, Gemma4TextConfig

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.draft import agreement, teacher_forcing
from edgespec.draft.agreement import compare_readings
from edgespec.draft.assistant import AssistantDrafter
from edgespec.draft.mtp import MtpFuse
from edgespec.draft.readings import AS_STATED, Reading
from edgespec.draft.teacher_forcing import Guessed
from edgespec.model.causal_model import CausalModel
from edgespec.pair.drafts import open_draft
from edgespec.pair.folder import open_model
from edgespec.pair.pair import open_pair
from edgespec.placement.pass_load import model_load
from edgespec.placement.weights import weights_by_size
from tests.edgespec.draft.contract import DRAFTED, GEMMAS_4, TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.gemma_assistant import (
    SEES_ALL,
    SLIDES,
    Assistant,
    node,
    of_paths,
    states_of,
    tensors_of,
    write_assistant,
)
from tests.edgespec.draft.gemma_assistant import (
    config_of as config_of_assistant,
)
from tests.edgespec.prefix_cache.test_prompt_cache import SYSTEM, contents, texts
from tests.support.families import FAMILIES, GROUPED, MIXED, TWO_SIZES, make_model, save_folder

PADDED = 264  # tokens of a target whose head is ordered
FORMS: dict[str, Assistant] = {
    "whole head": Assistant(),
    "ordered head": Assistant(vocab=PADDED, centroids=24, computed=5),
    "a window of more than the text": Assistant(window=60),
    "a window that the text just fills": Assistant(window=len(TEXT) - 1),
    "a window one shorter": Assistant(window=len(TEXT) - 2),
}
SAME_SIZES = Assistant(global_dim=8)


def config_of_target(family: str, form: Assistant) -> Any:
    config = FAMILIES[family]()
    if form == SAME_SIZES:
        sizes = {**TWO_SIZES, "global_head_dim": 8, "num_global_key_value_heads": 2}
        config = Gemma4TextConfig(**text_sizes(), **sizes, layer_types=MIXED[:2] * 2)
    config.vocab_size = form.vocab
    return config


def opened(place: Path, form: Assistant, family: str = "gemma4", **options: Any) -> Engine:
    target = save_folder(place / "target", make_model(config_of_target(family, form)))
    return open_engine(target, write_assistant(place / "draft", form), **options)


@torch.no_grad()
def compare(engine: Engine, form: Assistant, family: str = "gemma4") -> None:
    """Grow trees from a text, commit paths, and compare the q of every node with the page's forward."""
    looked, drafter = drafter_at(engine, TEXT)
    assert isinstance(drafter, AssistantDrafter)
    target, tensors = make_model(config_of_target(family, form)), tensors_of(form)
    for text, paths, found in rounds_of(looked, drafter, count=5):
        expected = of_paths(form, tensors, target, text, paths).softmax(-1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", GEMMAS_4)
@pytest.mark.parametrize("name", FORMS)
def test_a_nodes_distribution_is_the_pages_of_its_path(name: str, family: str, tmp_path: Path) -> None:
    with opened(tmp_path, FORMS[name], family) as engine:
        compare(engine, FORMS[name], family)


@pytest.mark.parametrize("kind", ["images", "unified"])
def test_targets_with_towers_and_of_the_unified_family_lend_the_same(kind: str, tmp_path: Path) -> None:
    form, text = Assistant(), config_of_target("gemma4", Assistant())
    if kind == "images":
        vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                  "hidden_size": 16, "intermediate_size": 16, "patch_size": 8,
                  "position_embedding_size": 64}  # fmt: skip
        config = Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=None)
    else:
        unified = pytest.importorskip("transformers.models.gemma4_unified", reason="of newer transformers")
        form = replace(form, model_type="gemma4_unified_assistant")
        sizes = {name: size for name, size in TWO_SIZES.items() if "per_layer" not in name}
        config = unified.Gemma4UnifiedTextConfig(**text_sizes(), **sizes, layer_types=MIXED[:2] * 2)
    plain: Any = make_model(config)
    target = save_folder(tmp_path / "target", plain)
    with open_engine(target, write_assistant(tmp_path / "draft", form)) as engine:
        looked, drafter = drafter_at(engine, TEXT)
        for read, paths, found in rounds_of(looked, drafter, count=3):
            expected = of_paths(form, tensors_of(form), plain, read, paths).softmax(-1)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def text_sizes() -> dict[str, Any]:
    return {**GROUPED, "num_hidden_layers": 4}


@pytest.mark.parametrize("name", ["whole head", "ordered head"])
def test_nodes_at_once_are_what_each_is_alone(name: str, tmp_path: Path) -> None:
    with opened(tmp_path, FORMS[name]) as engine:
        _, drafter = drafter_at(engine, TEXT)
        root, children = torch.tensor([7]), torch.tensor([5, 9, 80, 81, 82, 83])
        drafter.expand(root, torch.tensor([-1]))
        at_once = drafter.expand(children, torch.zeros(len(children), dtype=torch.long))
        for child, expected in zip(children, at_once, strict=True):
            drafter.rewind()
            drafter.expand(root, torch.tensor([-1]))
            alone = drafter.expand(child[None], torch.tensor([0]))
            torch.testing.assert_close(alone[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["whole head", "ordered head"])
def test_its_layers_can_be_rounded_when_they_are_loaded(name: str, quant: str, tmp_path: Path) -> None:
    found = []
    for place, options in (("a", {}), ("b", {"draft_quant": quant})):
        with opened(tmp_path / place, FORMS[name], **options) as engine:
            _, drafter = drafter_at(engine, TEXT)
            found.append(drafter.expand(torch.tensor([7]), torch.tensor([-1])))
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, atol=0.1, rtol=0.0)


def test_a_texts_first_token_has_nothing_to_attend(tmp_path: Path) -> None:
    with opened(tmp_path, Assistant()) as engine:
        _, drafter = drafter_at(engine, [7])
        drafter.begin([])
        q = drafter.expand(torch.tensor([7]), torch.tensor([-1]))
    tensors, target = tensors_of(Assistant()), make_model(config_of_target("gemma4", Assistant()))
    nothing = {SLIDES: (torch.zeros(1, 2, 0, 8),) * 2, SEES_ALL: (torch.zeros(1, 1, 0, 24),) * 2}
    embedded = target.get_input_embeddings()(torch.tensor(7))
    logits, _ = node(Assistant(), tensors, embedded, torch.zeros(32), nothing, place=0)
    torch.testing.assert_close(q[0], logits.softmax(-1), rtol=0, atol=1e-5)


def test_the_sizes_of_one_kinds_heads_may_be_the_others(tmp_path: Path) -> None:
    with opened(tmp_path, SAME_SIZES) as engine:
        compare(engine, SAME_SIZES)


@pytest.mark.parametrize("reading", [AS_STATED, *(Reading(**{name: True}) for name in
                                                  ("before_norm", "swaps_inputs", "flips_output"))])  # fmt: skip
@pytest.mark.parametrize("family", GEMMAS_4)
@torch.no_grad()
def test_both_depths_that_the_check_compares_are_the_pages_in_each_reading(
    reading: Reading, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, text = Assistant(), list(range(40, 70))
    compared: dict[tuple[Reading, int, int], list[Tensor]] = {}
    seen: list[Tensor] = []
    right, right_compared = agreement._guesses, teacher_forcing._compared

    def each(draft: CausalModel, hidden: Tensor, *more: Any) -> Guessed:
        seen.append(draft.logits(hidden))
        return right_compared(draft, hidden, *more)

    def guesses(draft: CausalModel, ids: Tensor, features: Tensor, wanted: Any, *, late: int) -> Any:
        seen.clear()
        found = right(draft, ids, features, wanted, late=late)
        model: Any = draft.model
        is_normed = not isinstance(model.model.norm, torch.nn.Identity)
        key = Reading(before_norm=hasattr(model.fuse, "aux_states") and model.fuse.aux_states is not None,
                      swaps_inputs=model.fuse.has_feature_first, flips_output=not is_normed)  # fmt: skip
        compared.setdefault((key, late, len(compared)), list(seen))
        return found

    monkeypatch.setattr(teacher_forcing, "_compared", each)
    monkeypatch.setattr(agreement, "_guesses", guesses)
    with opened(tmp_path, form, family, draft_check=False) as engine:
        assert isinstance(engine.draft_model.model.fuse, MtpFuse)
        compare_readings(engine.target_model, engine.draft_model, torch.tensor(text))
    first, second = next(found for (key, late, _), found in compared.items() if key == reading and not late)
    target, tensors = make_model(config_of_target(family, form)), tensors_of(form)
    for row in (1, 2, 13, 14, 28):
        lent, feature = states_of(target, text[:row], is_normed=not reading.before_norm)
        embedded = target.get_input_embeddings()(torch.tensor(text[row : row + 2]))
        for token, found in zip(embedded, (first, second), strict=True):
            logits, feature = node(form, tensors, token, feature[-1] if feature.dim() > 1 else feature, lent,
                                   place=row, reading=reading)  # fmt: skip
            torch.testing.assert_close(found[row - 1], logits, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_an_assistant_that_reads_the_feature_first_is_found(is_exchanged: bool, tmp_path: Path) -> None:
    """It guesses what a target does whose layers add next to nothing: the next token follows the embedding."""
    target = make_model(config_of_target("gemma4", Assistant()))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.mul_(0.02 if "layers" in name and "norm" in name and "post" in name else 1)
    form = Assistant(width=32)
    tensors = tensors_of(form)
    for name in tensors:
        if "post_attention" in name or "post_feedforward" in name:
            tensors[name] *= 0
        elif "layer_scalar" in name:
            tensors[name] = torch.ones(1)
    halves = [torch.eye(32), torch.zeros(32, 32)]
    tensors["pre_projection.weight"] = torch.cat(halves[::-1] if is_exchanged else halves, 1)
    tensors["model.norm.weight"] = target.model.norm.weight.detach().clone()
    tensors["model.embed_tokens.weight"] = target.get_output_embeddings().weight.detach().clone()
    folder = write_assistant(tmp_path / "draft", form, tensors=tensors)
    pair = open_pair(save_folder(tmp_path / "target", target), folder)
    with Engine.from_pair(pair, context_tokens=320, dtype="float32", self_check=False, tree=TreeSettings()) as engine:
        found = engine.draft_check
    assert found.comparison.best.first > 0.7
    assert found.comparison.reading == (Reading(swaps_inputs=True) if is_exchanged else AS_STATED)
    assert ("reads the feature before the embedding" in found.in_words) == is_exchanged


ROTATIONS: dict[str, dict[str, Any]] = config_of_assistant(Assistant())["text_config"]["rope_parameters"]
REFUSED: dict[str, tuple[Assistant, str, str]] = {
    "another width": (Assistant(target_width=48), "gemma4", "hidden states of 48 numbers, and the target has hidden"),
    "another vocabulary": (Assistant(vocab=300), "gemma4", "vocabulary of 300 tokens, and the target has one of 257"),
    "other heads": (Assistant(global_dim=16), "gemma4", "full_attention heads of 16 numbers, and the target has such"),
    "other groups": (
        Assistant(inner=(("num_attention_heads", 5),)), "gemma4", "5 heads, and the target has 2 heads of sliding",
    ),
    "another base of the rotation": (
        Assistant(inner=(("rope_parameters", {**ROTATIONS, SLIDES: {**ROTATIONS[SLIDES], "rope_theta": 5e5}}),)),
        "gemma4", "rotates sliding_attention heads by rope_theta = 500000.0, and the target has keys that were rotated "
        "by 10000.0",
    ),
    "another share that rotates": (
        Assistant(inner=(("rope_parameters", {**ROTATIONS, SEES_ALL: {**ROTATIONS[SEES_ALL],
                                                                      "partial_rotary_factor": 0.5}}),)),
        "gemma4", "rotates full_attention heads by partial_rotary_factor = 0.5, and the target has keys that were",
    ),
    "another rotation": (
        Assistant(inner=(("rope_parameters", dict.fromkeys(ROTATIONS, ROTATIONS[SLIDES])),)), "gemma4",
        "rotates full_attention heads by partial_rotary_factor = 1.0",
    ),
    "another family": (Assistant(), "gemma3", "keys of a Gemma 4, and the target has the type 'gemma3_text'"),
    "no model of ours": (Assistant(inner=(("model_type", "llama"),)), "gemma4", "of the model type 'llama'"),
    "inputs of layers": (
        Assistant(inner=(("hidden_size_per_layer_input", 8),)), "gemma4", "hidden_size_per_layer_input = 8",
    ),
    "experts": (Assistant(inner=(("enable_moe_block", True),)), "gemma4", "enable_moe_block = True, which no"),
    "keys of its own": (Assistant(inner=(("num_kv_shared_layers", 1),)), "gemma4", "num_kv_shared_layers = 1"),
    "another activation": (Assistant(inner=(("hidden_activation", "silu"),)), "gemma4", "activation 'silu'"),
    "no width": (Assistant(keys=(("backbone_hidden_size", None),)), "gemma4", "backbone_hidden_size = None"),
    "groups that are not equal": (Assistant(centroids=24, computed=5), "gemma4", "num_centroids = 24 of 257 tokens"),
    "packed": (Assistant(keys=(("quantization_config", {}),)), "gemma4", "has packed weights"),
    "no config": (Assistant(keys=(("text_config", 3),)), "gemma4", "a text_config that is none"),
    "a field of another type": (Assistant(inner=(("layer_types", 3),)), "gemma4", "transformers cannot use"),
}  # fmt: skip


def refused(place: Path, form: Assistant, family: str, *, tensors: dict[str, Tensor] | None = None) -> str:
    """What an assistant is refused for, before any weight is read: its files have none."""
    target = save_folder(place / "target", make_model(FAMILIES[family]()))
    folder = write_assistant(place / "draft", form, tensors=tensors)
    with pytest.raises(EdgespecError) as error:
        open_pair(target, folder)
    return str(error.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_targets_or_not_understood_is_refused_by_name(case: str, tmp_path: Path) -> None:
    form, family, said = REFUSED[case]
    assert said in refused(tmp_path, form, family, tensors=tensors_of(Assistant()))


def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(Assistant())
    wrong = {
        "lacks it": {name: one for name, one in tensors.items() if name != "pre_projection.weight"},
        "has [32, 19]": {**tensors, "post_projection.weight": torch.zeros(32, 19)},
        "'model.layers.0.self_attn.k_proj.weight'": {
            **tensors, "model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 20),
        },
        "'masked_embedding.centroids.weight'": {**tensors, "masked_embedding.centroids.weight": torch.zeros(24, 20)},
        "'surplus.weight'": {**tensors, "surplus.weight": torch.zeros(3)},
    }  # fmt: skip
    for number, (said, own) in enumerate(wrong.items()):
        assert said in refused(tmp_path / str(number), Assistant(), "gemma4", tensors=own)


def test_an_order_that_names_a_token_twice_is_refused(tmp_path: Path) -> None:
    form = FORMS["ordered head"]
    tensors = tensors_of(form)
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]
    target = save_folder(tmp_path / "target", make_model(config_of_target("gemma4", form)))
    with pytest.raises(EdgespecError, match="that is no order of 264 tokens"):
        open_pair(target, write_assistant(tmp_path / "draft", form, tensors=tensors))


@pytest.mark.parametrize("name", ["whole head", "ordered head"])
def test_a_bare_config_is_planned_as_its_folder_is(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    target = open_model(save_folder(tmp_path / "target", make_model(config_of_target("gemma4", form))))
    folder = write_assistant(tmp_path / "draft", form)
    whole = open_draft(folder, target)
    (folder / "model.safetensors").unlink()
    planned = open_draft(folder, target, is_planned=True)
    shapes = [{key: one.shape for key, one in of.checkpoint.tensors.items()} for of in (whole, planned)]
    assert shapes[0] == shapes[1]


def test_what_is_not_known_of_a_config_is_named(tmp_path: Path) -> None:
    form = Assistant(keys=(("block_size", 4), ("future", 1)), inner=(("later", 2),))
    target = save_folder(tmp_path / "target", make_model(FAMILIES["gemma4"]()))
    draft = open_pair(target, write_assistant(tmp_path / "draft", form)).draft
    assert draft.notes[0] == "is a Gemma 4 assistant, which reads what the target's layers 3 and 4 keep of the text"
    assert "states future, later in its config.json" in draft.notes[1]


def test_a_file_of_rows_has_the_targets_alone(tmp_path: Path) -> None:
    """The assistant has none, and goes on from the target's."""
    target = save_folder(tmp_path / "target", make_model(FAMILIES["gemma4"]()))
    draft, path = write_assistant(tmp_path / "draft", Assistant()), tmp_path / "rows.safetensors"
    with open_engine(target, draft, tree=DRAFTED) as engine:
        texts(engine, path)
    tensors, header = contents(path)
    assert (header["ids"]["target"], header["ids"]["draft"]) == (SYSTEM, [])
    assert {name.split(".")[0] for name in tensors} == {"target"}
    assert "target.hidden" in tensors


def test_a_pass_reads_the_targets_keys_that_it_sees(tmp_path: Path) -> None:
    target = save_folder(tmp_path / "target", make_model(FAMILIES["gemma4"]()))
    draft = open_pair(target, write_assistant(tmp_path / "draft", Assistant())).draft
    assert draft is not None
    weights = weights_by_size(draft, dtype=torch.float32, quant=None)
    load = model_load(weights, None, keys=1000, num_texts=3, device=torch.device("cpu"))
    assert load.cache_bytes == 3 * 4 * (2 * 12 * 2 * 16 + 1000 * 48), "two layers with a window, and one without"


def test_its_memory_has_no_keys_and_the_features_are_the_targets(tmp_path: Path) -> None:
    with opened(tmp_path, Assistant(), context_tokens=4096) as engine:
        long, limit = engine.planned.device_bytes, engine.draft_model and engine.draft_model.max_context
    with opened(tmp_path / "short", Assistant(), context_tokens=160) as engine:
        short = engine.planned.device_bytes
        engine.generate("def read(path):", max_new_tokens=8, temperature=0.0)
    assert limit == 256
    assert long["draft: keys and values"] == short["draft: keys and values"] == 0
    assert long["draft: one pass"] < 2 * short["draft: one pass"], "it reads no prompt"
    assert "draft: passes in one call" not in short
    assert short["target: features"] % (32 * 4) == 0
