"""The multi-step forward computes in training what the drafter computes in decoding."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from edgespec.config import DraftSampling
from edgespec.draft.feature_head import FeatureHeadDrafter
from edgespec.model.causal_model import CausalModel
from edgespec.model.family_logits import decoder_of
from edgespec.model.target import Target
from edgespec.train.head_model import own_tensors
from edgespec.train.head_steps import head_steps, step_rows, visible_rows
from tests.edgespec.train.heads import CPU, make_batch, make_head, make_target, random_texts

FAMILIES = ["llama", "llama-bias", "mistral-window", "qwen2-window", "gemma2", "gemma3", "gpt2", "opt"]
STEPS = 4


@pytest.mark.parametrize("family", FAMILIES)
def test_step_k_at_a_row_is_the_draft_k_deep_that_ends_there(family: str) -> None:
    """The windows of some families are shorter than the texts."""
    target = make_target(family)
    head = make_head(target, spread=True)
    texts = random_texts([26, 19])
    with torch.no_grad():
        steps = head_steps(head, make_batch(target, texts), num_steps=STEPS)
    for block, ids in enumerate(texts):
        for root in (0, 1, 7, 14):
            for depth, expected in enumerate(features_of_a_chain(target, head, ids, root=root)):
                torch.testing.assert_close(steps[depth][block, root + depth], expected, rtol=1e-4, atol=1e-4)


def features_of_a_chain(target: PreTrainedModel, head: PreTrainedModel, ids: list[int], *, root: int) -> torch.Tensor:
    """What the drafter's rows are that draft the text's own tokens behind `root`: [STEPS, h]."""
    target, head = copy.deepcopy((target, head))
    causal = CausalModel(target, device=CPU, keeps_hidden=True)
    looked = Target(causal)
    drafter = FeatureHeadDrafter(
        CausalModel(head, device=CPU), looked.cache, vocab=causal.vocab, sampling=DraftSampling(temperature=1.0)
    )
    # The root's row has no hidden state of the target yet: only what lies before it is read.
    if root:
        looked.prefill(torch.tensor(ids[:root]))
    else:
        looked.cache.write_hidden(0, torch.zeros(1, causal.config.hidden_size))
    drafter.begin(ids[:root])
    for depth in range(STEPS):
        drafter.expand(torch.tensor(ids[root + depth : root + depth + 1]), torch.tensor([max(0, depth - 1)]))
    return drafter.hidden(torch.arange(STEPS))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_masks_by_brute_force(step: int) -> None:
    """A draft k deep that ends at s: its root at s - k + 1 sees the text, each node its ancestors and itself."""
    rows = 7
    found = visible_rows(step, rows, device=CPU)
    assert found.shape == (rows, step * rows)
    for row in range(step - 1, rows):
        root = row - (step - 1)
        expected = {(1, at) for at in range(root + 1)} | {(depth, root + depth - 1) for depth in range(2, step + 1)}
        assert {divmod(int(key), rows) for key in found[row].nonzero()[:, 0]} == {(i - 1, at) for i, at in expected}


def test_windows_count_positions_and_not_rows() -> None:
    """Step 2's rows lie behind all of step 1's: what is in the window goes by position."""
    target = make_target("mistral-window")
    head, window = make_head(target), target.config.sliding_window
    masks: list[torch.Tensor] = []

    def remember(_decoder: Any, _arguments: Any, named: dict[str, Any]) -> None:
        masks.append(named["attention_mask"][0, 0])

    decoder_of(head).register_forward_pre_hook(remember, with_kwargs=True)
    head_steps(head, make_batch(target, random_texts([30])), num_steps=2)
    assert (masks[0][29] == 0).nonzero()[:, 0].tolist() == [*range(29 - window + 1, 30)]
    assert (masks[1][29] == 0).nonzero()[:, 0].tolist() == [*range(29 - window + 1, 29), 59]


def test_rows_without_inputs_and_padding_do_not_count() -> None:
    batch = make_batch(make_target(), random_texts([5, 3]))
    assert step_rows(batch, 1).tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert step_rows(batch, 3).tolist() == [[False, False, True, True, True], [False, False, True, False, False]]


def test_padding_changes_nothing_and_what_is_fed_back_carries_no_gradient() -> None:
    target = make_target()
    head = make_head(target)
    long, short = random_texts([20, 9])
    both = head_steps(head, make_batch(target, [long, short]), num_steps=3)
    alone = head_steps(head, make_batch(target, [short]), num_steps=3)
    for step, other in zip(both, alone, strict=True):
        torch.testing.assert_close(step[1, :9], other[0], rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(alone[1][0, 5].sum(), alone[0], allow_unused=True) == (None,)
    weights = own_tensors(head)
    assert all(found is not None for found in torch.autograd.grad(alone[2][0, 5].sum(), list(weights.values())))
