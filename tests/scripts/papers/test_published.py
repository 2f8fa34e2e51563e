"""Block drafters are trained by the forward that they draft with: a node's q is what training gave its place."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.model.target import Target
from edgespec.pair.folder import open_model
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_model import lender
from edgespec.train.head_objective import head_logits
from scripts.papers.heads.heads import CPU, TARGET
from scripts.papers.published import blocks
from tests.edgespec.draft.contract import open_engine
from tests.support.dflash_config import OWN, Kind

TEXT = [11, 40, 7, 300, 25, 90, 3, 512, 77, 8, 61, 240, 19, 33]
AT = 9  # the row of the text behind which a block stands


@pytest.mark.parametrize("kind", OWN)
@torch.no_grad()
def test_a_place_is_guessed_in_training_as_in_drafting(kind: Kind, tmp_path: Path) -> None:
    with lender(open_model(TARGET), device=CPU, dtype=torch.float32) as lent:
        drafter = blocks.new_drafter(lent, kind, candidates=16, seed=0)
        for number, (name, weight) in enumerate(drafter.own.items()):  # convolutions and scores that count
            if "norm" not in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)
        states, layers = states_of(TARGET), [1 + layer for layer in drafter.config["dflash_config"]["target_layer_ids"]]
        batch = FeatureBatch(
            ids=torch.tensor([TEXT]), lengths=torch.tensor([len(TEXT)]), features=states[-1],
            states=torch.cat([states[layer] for layer in layers], -1),
        )  # fmt: skip
        hidden = blocks.guessed(drafter.model, batch, torch.tensor([[AT]]))[0, 0]
        first = drafter.model.block.first_slot
        places, before = hidden[first : first + 2], torch.tensor(TEXT[AT : AT + 2])
        expected = blocks.scored(drafter.model, head_logits(drafter.model)(places), places, before)
        blocks.write_drafter(tmp_path / "draft", drafter)
    with open_engine(TARGET, tmp_path / "draft") as engine:
        looked = Target(engine.target_model)
        assert engine.draft_model is not None
        drafted = open_drafter(engine.draft_model, looked, sampling=DraftSampling(temperature=1.0))
        looked.prefill(torch.tensor(TEXT[:AT]))
        drafted.begin(TEXT[:AT])
        q = [drafted.expand(torch.tensor(TEXT[AT : AT + 1]), torch.tensor([-1]))]
        q.append(drafted.expand(torch.tensor(TEXT[AT + 1 : AT + 2]), torch.tensor([0])))
    torch.testing.assert_close(torch.cat(q), expected.softmax(-1), rtol=1e-3, atol=1e-5)


def states_of(target: Path) -> tuple[torch.Tensor, ...]:
    """What the target's layers leave of the text."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    found: tuple[torch.Tensor, ...] = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    return found
