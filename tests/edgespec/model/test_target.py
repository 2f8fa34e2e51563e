"""A text's target: what is read of a prompt whose beginning has rows."""

import copy

import torch

from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from tests.support.families import FAMILIES, make_model


def test_only_of_the_very_prompt_whose_end_is_known_nothing_is_read() -> None:
    model = make_model(FAMILIES["llama"]())
    target = Target(CausalModel(copy.deepcopy(model), device=torch.device("cpu")))
    whole = list(range(1, 20))
    for prompt, num_read in ((whole, 19), (whole, 0), (whole[:12], 1), (whole[:12], 0), ([*whole[:11], 99], 1)):
        target.begin(prompt)
        assert target.num_unread == num_read
        if num_read:
            (hidden,) = target.read([target.text_rows(num_read)])
            target.took_in(num_read)
            target.end_prompt(hidden)
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1:]
        torch.testing.assert_close(target.logits(target.prompt_end), expected, rtol=1e-4, atol=2e-5)
