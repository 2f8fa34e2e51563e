"""The multi-step forward of a feature head: training sees the rows that drafting will see.

In step 1 every row reads the target's feature of the position before it. In step k it reads the head's own
feature of step k - 1, and sees what a node at depth k of a draft would see: rows of step 1 up to the draft's
root, and below it one row of each later step. (HASS, as CORAL's section 2.3 describes it.) The steps' rows follow
each other in a transformers cache, so that positions, windows and kinds of layers are the family's
own. Legend: B blocks, S rows of a block, h hidden size; steps count from 1.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from edgespec.draft.own_parts import aux_states_of
from edgespec.model.family_logits import decoder_of
from edgespec.model.mechanisms.windows import WHOLE, AttentionWindow, layer_reaches
from edgespec.model.pass_cache import cache_argument
from edgespec.model.pass_rows import additive
from edgespec.train.feature_files import FeatureBatch


def head_steps(
    model: PreTrainedModel,
    batch: FeatureBatch,
    *,
    num_steps: int,
    mask_dtype: torch.dtype = torch.float32,
    feeds_gradient: bool = False,
) -> list[Tensor]:
    """Return the head's features [B, S, h] of every step; `step_rows` says which of them mean something.

    What is fed back carries no gradient, as in HASS, unless it `feeds_gradient`, as in EAGLE-3's training-time test;
    keys and values of earlier steps do. `mask_dtype` is what attention computes in.
    """
    num_rows = batch.ids.shape[1]
    device = batch.ids.device
    reach = replace(_reach(model.config.get_text_config(decoder=True)), first=first_row(model))
    decoder = decoder_of(model)
    embedded = model.get_input_embeddings()(batch.ids)  # [B, S, h]
    positions = torch.arange(num_rows, device=device)
    cached = {cache_argument(decoder.forward): DynamicCache()}  # of full length: windows are in the masks
    features: list[Tensor] = []
    aux_states = aux_states_of(model)
    before = batch.features if aux_states is None else aux_states.make(known_states(batch))
    for step in range(1, num_steps + 1):
        previous = torch.nn.functional.pad(before[:, :-1], (0, 0, 1, 0))  # zeros before the first row
        visible = visible_rows(step, num_rows, device=device)
        if reach != WHOLE:
            visible &= reach.sees(positions[:, None], positions.repeat(step))
        mask = additive(visible, mask_dtype)[None, None]
        output = decoder(
            inputs_embeds=model.fuse(embedded, previous),  # type: ignore[operator]
            attention_mask=mask,
            position_ids=positions[None],
            use_cache=True,
            **cached,
        )
        features.append(output.last_hidden_state)
        before = features[-1] if feeds_gradient else features[-1].detach()
    return features


def known_states(batch: FeatureBatch) -> Tensor:
    """Return the hidden states from between the target's layers, which the batch must have."""
    assert batch.states is not None, "a run of these features comes first"
    return batch.states


def _reach(config: PretrainedConfig) -> AttentionWindow:
    """Return how far a head's only layer sees; families without kinds of layers have one window for all."""
    if getattr(config, "layer_types", None):
        return layer_reaches(config)[0]
    return AttentionWindow(getattr(config, "sliding_window", None))


def first_row(model: PreTrainedModel) -> int:
    """Return the first row of a text that a head has: published ones have none of the first token."""
    return int(getattr(model, "hides_first_row", False))


def visible_rows(step: int, num_rows: int, *, device: torch.device) -> Tensor:
    """Return which rows of all steps a row of this step sees: [S, step * S] bool.

    Row s sees rows of step 1 up to s - (step - 1), and of each later step i the one at s - (step - i).
    """
    rows = torch.arange(num_rows, device=device)
    distance = rows[:, None] - rows[None, :]  # [S, S]: from a key to a later row
    parts = [distance >= step - 1] + [distance == step - later for later in range(2, step + 1)]
    return torch.cat(parts, -1)


def step_rows(batch: FeatureBatch, step: int, *, first: int = 0) -> Tensor:
    """Return which rows [B, S] of a step mean something: those that have inputs and are not padding.

    `first` is the first row of a text that the head has.
    """
    rows = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return (rows >= first + step - 1) & (rows < batch.lengths[:, None])
