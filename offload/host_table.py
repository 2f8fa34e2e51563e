"""Input embeddings that wait in RAM beside a device: a pass looks up few rows, which are gathered there and sent."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from offload.device import to_device
from offload.layer_store import LayerRecord
from offload.skeleton import Skeleton

TABLE_INDEX = -2  # of the record, beside that of everything else outside of the layers


def input_table(skeleton: Skeleton) -> LayerRecord | None:
    """Return the record of the input embeddings; None where they are more than a table, or also another parameter."""
    module = skeleton.model.get_input_embeddings()
    name = next((f"{path}.weight" for path, one in skeleton.model.named_modules() if one is module), "")
    tensor = skeleton.outside.tensors.get(name)
    if type(module) is not nn.Embedding or tensor is None or name in skeleton.ties.values():
        return None
    return LayerRecord(index=TABLE_INDEX, tensors={name: tensor})


def send_rows(module: nn.Module, device: torch.device, undo: ExitStack) -> None:
    """Let an embedding on the host give its rows on the device, until `undo` is closed.

    The host waits until the ids are there, once a pass.
    """

    def forward(ids: Tensor) -> Tensor:
        return to_device(embedding(ids.cpu(), module.get_parameter("weight")), device)

    module.forward = forward
    undo.callback(module.__dict__.pop, "forward", None)
