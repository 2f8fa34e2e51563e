"""An EAGLE-3 head is trained on the rows that drafting has, and its folder is read as what was trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from edgespec import Engine
from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.train.eagle3_head import Eagle3Head, default_aux_layers, most_frequent, new_eagle3
from edgespec.train.feature_files import Block, FeatureBatch, FeatureFiles
from edgespec.train.features import collect_features
from edgespec.train.head_model import own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_logits, head_losses
from edgespec.train.head_steps import head_steps, step_rows
from tests.edgespec.draft.eagle3_head import states_of
from tests.edgespec.train.heads import CPU, make_batch, random_texts, run_of
from tests.support.families import GROUPED, VOCAB, make_model, save_folder

STEPS = 3
AUX_LAYERS = (2, 4, 5)
PLAIN = Precision(is_mixed=False)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_model(LlamaConfig(**{**GROUPED, "num_hidden_layers": 8}))


@pytest.fixture
def head(target: PreTrainedModel) -> Eagle3Head:
    """A head of 100 tokens, whose weights are so large that every mistake shows."""
    generator = torch.Generator().manual_seed(2)
    known = torch.randperm(VOCAB, generator=generator)[:100].sort().values
    made = new_eagle3(target, AUX_LAYERS, known, named="target", seed=1)
    with torch.no_grad():
        for tensor in own_tensors(made.model, made.parts.modules).values():
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + 0.3 * drawn)
    return made


@pytest.mark.parametrize(
    ("rope", "stated"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}, True),
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "default"}, False),
    ],
)  # fmt: skip
def test_a_heads_positions_are_its_targets(rope: dict[str, Any], stated: bool, tmp_path: Path) -> None:
    """Those of a target whose rotation is longer too, in training and as the folder is read."""
    config = LlamaConfig(
        **{**GROUPED, "num_hidden_layers": 8, "max_position_embeddings": 512},
        rope_parameters={"rope_theta": 5e5, **rope},
    )
    target = make_model(config)
    made = new_eagle3(target, AUX_LAYERS, torch.arange(100), named="target", seed=1)
    made.save(tmp_path / "head")
    content = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    assert ("rope_scaling" in content) == stated
    pair = open_pair(save_folder(tmp_path / "target", target), tmp_path / "head")
    expected = target.model.rotary_emb.inv_freq
    assert torch.equal(made.model.model.rotary_emb.inv_freq, expected)
    with Engine.from_pair(pair, context_tokens=64, dtype="float32", self_check=False, draft_check=False) as engine:
        assert torch.equal(engine.draft_model.model.model.rotary_emb.inv_freq, expected)


def batch_of(target: PreTrainedModel, texts: list[list[int]]) -> FeatureBatch:
    """The texts with the states that the head reads."""
    batch = make_batch(target, texts)
    with torch.no_grad():
        states = [torch.cat([states_of(target, ids)[layer] for layer in AUX_LAYERS], -1) for ids in texts]
    padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    return FeatureBatch(ids=batch.ids, lengths=batch.lengths, features=batch.features.detach(), states=padded)


def test_step_k_at_a_row_is_the_draft_k_deep_of_the_head_that_was_written(
    target: PreTrainedModel, head: Eagle3Head, tmp_path: Path
) -> None:
    """Through the one door, by the published names, with the logits of all of the target's tokens."""
    head.save(tmp_path / "head")
    texts = random_texts([26, 19])
    with torch.no_grad():
        steps = head_steps(head.model, batch_of(target, texts), num_steps=STEPS)
    pair = open_pair(save_folder(tmp_path / "target", target), tmp_path / "head")
    with Engine.from_pair(pair, context_tokens=64, dtype="float32", self_check=False, draft_check=False) as engine:
        assert engine.draft_model is not None
        for block, ids in enumerate(texts):
            for root in (1, 2, 14):
                looked = Target(engine.target_model)
                looked.prefill(torch.tensor(ids[:root]))
                drafter = open_drafter(engine.draft_model, looked, sampling=DraftSampling(temperature=1.0))
                drafter.begin(ids[:root])
                for depth in range(STEPS):
                    q = drafter.expand(torch.tensor([ids[root + depth]]), torch.tensor([max(0, depth - 1)]))
                    trained = steps[depth][block, root + depth]
                    torch.testing.assert_close(drafter.hidden(torch.tensor([depth]))[0], trained, rtol=1e-3, atol=1e-4)
                    expected = head_logits(head.model)(trained[None]).softmax(-1)
                    torch.testing.assert_close(q, expected.detach(), rtol=1e-3, atol=1e-5)


def test_a_folder_has_the_published_layout(head: Eagle3Head, tmp_path: Path) -> None:
    head.save(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, 100)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    names = {f"self_attn.{part}_proj" for part in "qkvo"} | {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names |= {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    own = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == own | {f"midlayer.{name}.weight" for name in names}
    assert torch.equal(torch.arange(100) + tensors["d2t"], head.known)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], head.known)
    with_all = new_eagle3(make_model(LlamaConfig(**GROUPED)), (0, 1, 2), torch.arange(VOCAB), named="t", seed=1)
    with_all.save(tmp_path / "all")
    lent = set(load_file(tmp_path / "all" / "model.safetensors"))
    assert not lent & {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}, "all tokens: the target's own head"


def test_the_loss_is_the_cross_entropy_over_known_tokens_of_rows_that_drafts_have(
    target: PreTrainedModel, head: Eagle3Head
) -> None:
    """A later step counts 0.8 of the one before it, and its gradient reaches `fc` through what was fed back."""
    batch = batch_of(target, random_texts([12, 9]))
    losses = head_losses(
        head.model, batch, num_steps=STEPS, precision=PLAIN, target_logits=head_logits(target),
        weights=LossWeights(regression=0.0, distribution=1.0, step_decay=0.8, feeds_gradient=True),
    )  # fmt: skip
    steps = head_steps(head.model, batch, num_steps=STEPS)
    p = target.lm_head(batch.features).softmax(-1)
    means = []
    for step in range(STEPS):
        found: list[Tensor] = []
        for block, length in enumerate(batch.lengths.tolist()):
            for row in range(1 + step, length):
                log_q = head.model.lm_head(steps[step][block, row])[head.known].log_softmax(-1)
                found.append(-(p[block, row, head.known] * log_q).sum())
        means.append(torch.stack(found).mean())
    expected = sum(0.8**step * mean for step, mean in enumerate(means)) / (1 + 0.8 + 0.64)
    torch.testing.assert_close(losses["loss"], expected)
    assert "regression" not in losses, "its features are not the target's"
    last = torch.autograd.grad(
        head_steps(head.model, batch, num_steps=2, feeds_gradient=True)[1][0, 5].sum(), head.model.fuse.fc.weight
    )
    cut = torch.autograd.grad(head_steps(head.model, batch, num_steps=2)[1][0, 5].sum(), head.model.fuse.fc.weight)
    assert not torch.equal(last[0], cut[0])
    assert step_rows(batch, 2, first=1)[1].nonzero()[:, 0].tolist() == list(range(2, 9))


def test_states_are_collected_beside_features(target: PreTrainedModel, tmp_path: Path) -> None:
    """In groups of two texts, what leaves the layers of each text alone."""
    texts = random_texts([20, 17, 9])
    blocks = [Block(text=number, ids=ids) for number, ids in enumerate(texts)]
    run = run_of(blocks, hidden_size=int(target.config.hidden_size), aux_layers=AUX_LAYERS)
    collect_features(CausalModel(make_model(target.config), device=CPU), blocks, tmp_path, run, group_rows=40)
    batch = FeatureFiles(tmp_path).batch([2, 0], device=CPU)
    expected = batch_of(target, [texts[2], texts[0]])
    torch.testing.assert_close(batch.features, expected.features, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.states, expected.states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layers", "aux_layers"), [(32, (2, 16, 29)), (8, (2, 4, 5)), (7, (2, 3, 4)), (4, (0, 2, 4))])
def test_layers_are_those_of_published_heads_where_they_fit(layers: int, aux_layers: tuple[int, ...]) -> None:
    assert default_aux_layers(LlamaConfig(num_hidden_layers=layers)) == aux_layers


def test_a_head_knows_the_most_frequent_tokens_in_their_order() -> None:
    assert most_frequent(torch.tensor([5, 0, 9, 1, 9]), 3).tolist() == [0, 2, 4]
