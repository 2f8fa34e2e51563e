"""A family's own outer forward, up to its decoder: what the decoder would get of a prompt with pictures is recorded.

So the family's own code runs its tower, puts the tower's rows in the place of placeholders, and makes positions,
features of layers and inputs a layer: no family's code is written again. What is recorded and is not known here is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.family_logits import decoder_of, with_forward
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seen_prompt import SeenPrompt, keys_of
from edgespec.model.seen_rows import NO_BLOCK

AXES = 3  # of rotations by time, height and width; a fourth, before them, is of the mask
OF_BLOCKS = (1, 2)  # kinds of tokens whose runs see each other: of images, and of videos
KNOWN = {
    "inputs_embeds", "position_ids", "attention_mask", "per_layer_inputs", "visual_pos_masks",
    "deepstack_visual_embeds",
}  # fmt: skip


class _Recorded(Exception):  # noqa: N818 - it is no error
    """Ends a family's forward at its decoder, with what that was given."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


@torch.no_grad()
def see(model: PreTrainedModel, prompt: PicturePrompt) -> SeenPrompt:
    """Return what the decoder of a family's whole model gets of a prompt with pictures.

    Raises EdgespecError for a family that hands its decoder what is not known here.
    """
    table: Any = model.get_input_embeddings()
    device: torch.device = table.weight.device
    inputs = {name: value.to(device) for name, value in prompt.inputs.items()}
    given, shift = _given_to_decoder(model, torch.tensor([prompt.ids], device=device), inputs)
    unknown = [name for name, value in given.items() if isinstance(value, Tensor) and name not in KNOWN]
    embedded = given.get("inputs_embeds")
    if unknown or embedded is None:
        raise refused(model.config, f"its decoder gets {', '.join(unknown) or 'no embedded rows'}")
    positions, per_layer = given.get("position_ids"), given.get("per_layer_inputs")
    deepstacked, deepstack = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")
    return SeenPrompt(
        keys=keys_of(prompt),
        ids=list(prompt.ids),
        runs=list(prompt.image_rows),
        embedded=embedded[0],
        rotated=None if positions is None or positions.dim() != AXES else positions[-AXES:, 0],
        shift=shift,
        deepstacked=None if deepstacked is None else deepstacked[0],
        deepstack=() if deepstack is None else tuple(deepstack),
        per_layer=None if per_layer is None else per_layer[0],
        blocks=blocks_of(model.config, prompt.inputs),
        blocks_only_in_windows=model.config.model_type.startswith("gemma4"),
    )


def _given_to_decoder(model: PreTrainedModel, ids: Tensor, inputs: dict[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Return what the decoder gets of ids [1, n], by its arguments' names, and the shift of the rows behind them."""
    outer: Any = model.base_model
    decoder = decoder_of(model)
    parts: list[Any] = list(model.modules())
    for part in parts:  # which keep the shift of the last prompt, also for one without pictures
        if hasattr(part, "rope_deltas"):
            part.rope_deltas = None
    taken = inspect.signature(type(outer).forward).parameters
    named = {name: value for name, value in inputs.items() if name != "attention_mask"}
    if "mm_token_type_ids" not in taken:
        named.pop("mm_token_type_ids", None)

    def record(*arguments: Any, **given: Any) -> NoReturn:
        raise _Recorded({**({"input_ids": arguments[0]} if arguments else {}), **given})

    try:
        with_forward(decoder, record, lambda: outer(input_ids=ids, **named, use_cache=False))
    except _Recorded as recorded:
        given = recorded.given
    else:
        raise refused(model.config, "its forward does not come to its decoder")
    deltas = [deltas for part in parts if (deltas := getattr(part, "rope_deltas", None)) is not None]
    return given, int(deltas[0]) if deltas else 0


def refused(config: PretrainedConfig, why: str) -> EdgespecError:
    """Return the error for a family whose pictures are not read."""
    what = f"pictures for model type '{config.model_type}' are not read: {why}."
    return EdgespecError("E_PICTURE", what, "Leave the pictures out, or use a model of another family.")


def has_blocks(config: PretrainedConfig) -> bool:
    """Return whether rows of a picture see each other in some layers."""
    text = config.get_text_config(decoder=True)
    is_vision = getattr(text, "use_bidirectional_attention", None) == "vision"
    return config.model_type == "gemma3" or (config.model_type.startswith("gemma4") and is_vision)


def blocks_of(config: PretrainedConfig, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of each row's block [n], on the host; None in families whose rows see earlier ones alone."""
    kinds = inputs.get("token_type_ids", inputs.get("mm_token_type_ids"))
    if kinds is None or not has_blocks(config):
        return None
    of_blocks = OF_BLOCKS[:1] if config.model_type == "gemma3" else OF_BLOCKS
    inside = torch.isin(kinds[0].cpu(), torch.tensor(of_blocks))
    starts = inside & ~torch.cat([inside.new_zeros(1), inside[:-1]])
    return torch.where(inside, starts.long().cumsum(0) - 1, NO_BLOCK)
