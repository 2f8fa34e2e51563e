"""Feature heads: q after every node is that of its path, routed or not, and texts keep the target's distribution."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.config import DraftSampling, SamplingSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import TextSettings
from edgespec.decode.start import start_sequence
from edgespec.doctor.inventory import Inspector, drafts_for
from edgespec.draft.feature_head import FeatureHeadDrafter
from edgespec.draft.head_router import HeadRouter, group_tokens, routed_log_probs
from edgespec.grow.policies import open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.placement.plan import placement_for
from edgespec.sampling.distribution import to_draft_probs
from edgespec.sampling.noise import TextNoise
from edgespec.train.head_model import new_head, own_tensors
from tests.edgespec.draft.contract import TEXT, facts, rounds_of, write_feature_head
from tests.support.families import FAMILIES, SMALL, VOCAB, make_model
from tests.support.lossless import law_p_value

CPU = torch.device("cpu")
SAMPLING = DraftSampling(temperature=0.8, top_p=0.95, tail_share=0.05)


def make_head(target: PreTrainedModel, *, seed: int = 3, **changes: Any) -> PreTrainedModel:
    """A random head whose features are spread, so that every mistake shows."""
    head = new_head(target, facts(**changes), seed=seed)
    with torch.no_grad():
        for tensor in own_tensors(head).values():
            if tensor.ndim > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


def head_features(head: PreTrainedModel, target: PreTrainedModel, text: list[int], path: list[int]) -> Tensor:
    """The literal chain: the head over text and path in plain passes, its own feature fed back: [path, h]."""
    decoder = head.base_model
    ids = torch.tensor([text + path])
    known = target(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    found: list[Tensor] = []
    for length in range(len(text) + 1, len(text) + len(path) + 1):
        features = torch.cat([torch.zeros(1, known.shape[1]), known, *(feature[None] for feature in found)])
        inputs = head.fuse(head.get_input_embeddings()(ids[:, :length]), features[None, :length])
        found.append(decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state[0, -1])
    return torch.stack(found)


def at_a_text(target: PreTrainedModel, head: PreTrainedModel, text: list[int]) -> tuple[Target, FeatureHeadDrafter]:
    causal = CausalModel(target, device=CPU, keeps_hidden=True, chunk_rows=7)
    looked = Target(causal)
    drafted = CausalModel(head, device=CPU, chunk_rows=7)
    drafter = FeatureHeadDrafter(drafted, looked.cache, vocab=causal.vocab, sampling=SAMPLING)
    looked.prefill(torch.tensor(text))
    drafter.begin(text)
    return looked, drafter


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2-window", "mistral-window", "gemma2", "gpt2", "opt"])
def test_q_in_a_tree_is_that_of_the_head_on_each_path(family: str) -> None:
    target = make_model(FAMILIES[family]())
    head = make_head(target)
    plain, plain_head = copy.deepcopy((target, head))
    looked, drafter = at_a_text(target, head, [*TEXT])
    for text, paths, found in rounds_of(looked, drafter, count=4):
        for q, path in zip(found, paths, strict=True):
            logits = looked.logits(head_features(plain_head, plain, text, path)[-1:])
            torch.testing.assert_close(q, to_draft_probs(logits, SAMPLING)[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("groups", "top"), [(8, 8), (8, 2), (5, 1)])
def test_routed_probabilities_are_the_papers_and_sum_to_one(groups: int, top: int) -> None:
    target = make_model(FAMILIES["llama"]())
    model = CausalModel(make_head(target, router_groups=groups, top_groups=top), device=CPU)
    router = model.model.router
    assert isinstance(router, HeadRouter)
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    log_probs, tokens = routed_log_probs(router, model, hidden)

    p_router = router(hidden).exp()
    wanted = sorted({group for row in p_router for group in row.topk(top).indices.tolist()})
    ranges = [group_tokens(group, vocab=VOCAB, num_groups=groups) for group in range(groups)]
    assert [ranges[group] for group in wanted] == tokens
    assert [token for which in ranges for token in range(which.start, which.stop)] == list(range(VOCAB))
    logits = model.logits(hidden)
    literal = torch.cat([p_router[:, group, None] * logits[:, ranges[group]].softmax(-1) for group in wanted], -1)
    torch.testing.assert_close(log_probs.exp(), literal)
    if top == groups:
        torch.testing.assert_close(literal.sum(-1), torch.ones(6))

    drafter = FeatureHeadDrafter(model, model.new_text(), vocab=VOCAB, sampling=DraftSampling(temperature=1.0))
    q = drafter.q_of(hidden, is_checked=True)
    torch.testing.assert_close(q.sum(-1), torch.ones(6))
    computed = torch.zeros(VOCAB, dtype=torch.bool)
    for which in tokens:
        computed[which] = True
    torch.testing.assert_close(q[:, computed], literal / literal.sum(-1, keepdim=True))
    assert not q[:, ~computed].any()


def tiny_vocabulary_p_value(*, policy: str, num_texts: int) -> float:
    """Chi-square of the two tokens behind the prompt's, drafted by a routed head, against the target's own."""
    vocab = 8
    config = LlamaConfig(**{**SMALL, "vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 1,
                            "eos_token_id": None, "pad_token_id": None})  # fmt: skip
    target = make_model(config)
    head = make_head(target, router_groups=4, top_groups=2)
    plain = copy.deepcopy(target)
    sampling = SamplingSettings(temperature=1.0)
    tree = TreeSettings(policy=policy, size=5, depth=2, max_children=3)
    causal = CausalModel(target, device=CPU, keeps_hidden=True)
    rows = causal.new_text()
    drafter = FeatureHeadDrafter(
        CausalModel(head, device=CPU), rows, vocab=vocab, sampling=tree.draft_sampling(sampling)
    )
    chosen = open_policy(tree)
    generator = torch.Generator().manual_seed(5)
    settings = TextSettings(sampling=sampling, max_new_tokens=4)
    prompt = [1, 5, 2, 3]

    def probabilities(ids: list[int]) -> Tensor:
        return plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].softmax(-1)

    expected = torch.zeros(vocab, vocab, vocab)
    for first in range(vocab):
        for second in range(vocab):
            text = [*prompt, first]
            expected[first, second] = probabilities([*text, second]) * probabilities(text)[second]
        expected[first] *= probabilities(prompt)[first]
    counts = torch.zeros_like(expected)
    for seed in range(num_texts):
        noise = TextNoise(seed=seed, key=0, vocab=vocab, device=CPU)
        draws = TextDraws(sampling=settings.sampling, device=CPU, generator=generator, noise=noise)
        steps = decode(start_sequence(Target(causal, rows), drafter, chosen, settings, draws), prompt)
        tokens = [token for step in steps for token in step.tokens]
        counts[tuple(tokens[:3])] += 1
    # Whatever the first token was
    return law_p_value(*(dict(enumerate(each.sum(0).flatten().tolist())) for each in (counts, expected)))


@pytest.mark.parametrize(("policy", "num_texts"), [("dyspec", 800), ("opt-tree", 300)])
def test_texts_through_a_routed_head_have_the_targets_distribution(policy: str, num_texts: int) -> None:
    """Only the rule of sampled children reads q: it takes more texts to see a wrong one."""
    assert tiny_vocabulary_p_value(policy=policy, num_texts=num_texts) > 1e-3


@pytest.fixture(scope="module")
def with_head(pair_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of random heads of the tiny target."""
    return lambda **changes: write_feature_head(tmp_path_factory.mktemp("head"), pair_folders[0], **changes)


def test_a_head_borrows_the_targets_tables_and_owns_its_layer(
    pair_folders: tuple[Path, Path], with_head: Callable[..., Path]
) -> None:
    with Engine.from_pair(open_pair(pair_folders[0], with_head()), context_tokens=128, self_check=False) as engine:
        target, head = engine.target_model.model, engine.draft_model.model
        assert head.get_input_embeddings().weight is target.get_input_embeddings().weight
        assert head.model.norm.weight is target.model.norm.weight
        assert head.model.layers[0].mlp.up_proj.weight is not target.model.layers[0].mlp.up_proj.weight
        assert "target: features" in str(engine.placement)


def test_a_head_of_another_target_is_refused_by_name(
    pair_folders: tuple[Path, Path], with_head: Callable[..., Path]
) -> None:
    head = with_head(target="Llama-9", target_fingerprint="0123456789abcdef")
    with pytest.raises(EdgespecError, match=r"is a head of 'Llama-9' .* and the target is 'target'") as error:
        open_pair(pair_folders[0], head)
    assert error.value.code == "E_HEAD_TARGET"


@pytest.mark.parametrize("change", [{"format": 2}, {"top_groups": 0}, {"surplus": 1}, {"method": None}])
def test_a_head_of_another_format_is_refused(
    pair_folders: tuple[Path, Path], with_head: Callable[..., Path], change: dict[str, Any]
) -> None:
    folder = with_head()
    config = json.loads((folder / "config.json").read_text())
    config["edgespec_head"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EdgespecError, match="does not describe a feature head"):
        open_pair(pair_folders[0], folder)


def test_a_head_whose_layer_is_missing_names_the_tensor(
    pair_folders: tuple[Path, Path], with_head: Callable[..., Path]
) -> None:
    folder = with_head()
    tensors = load_file(folder / "model.safetensors")
    del tensors["fuse.linear.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EdgespecError, match=r"fuse\.linear\.bias"):
        Engine.from_pair(open_pair(pair_folders[0], folder), context_tokens=128, self_check=False)


def test_a_head_is_listed_as_the_draft_of_its_own_target_alone(
    pair_folders: tuple[Path, Path], with_head: Callable[..., Path]
) -> None:
    own, strange = with_head(), with_head(target_fingerprint="0123456789abcdef")
    inspector = Inspector()
    models = [inspector.inspect(folder.name, folder) for folder in (*pair_folders, own, strange)]
    target, draft, head, other = models
    assert [model.problem for model in models] == [None] * 4
    assert head.num_parameters == sum(tensor.numel() for tensor in load_file(own / "model.safetensors").values())
    found = drafts_for(target, models)
    assert head in found
    assert other not in found
    assert drafts_for(head, models) == []
    assert head not in drafts_for(draft, models)


def test_memory_of_a_pair_with_a_head_is_planned_without_loading(
    pair_folders: tuple[Path, Path], with_head: Callable[..., Path]
) -> None:
    assert "target: features" in str(placement_for(pair_folders[0], draft=with_head(), context_tokens=128))
    assert "target: features" not in str(placement_for(*pair_folders[:1], draft=pair_folders[1], context_tokens=128))
