"""A multi-token-prediction layer in a GGUF file of its own, as llama.cpp's converter writes it with `--mtp`.

The file has its target's architecture and settings, and of the blocks those behind the last one alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from edgespec.draft.draft_kind import NAMES
from edgespec.draft.published import PublishedDraft
from edgespec.errors import offload_errors
from edgespec.pair.folder import ModelFolder
from offload.checkpoint import Checkpoint
from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.files import is_gguf, side_layer_of
from offload.gguf.header import read_gguf
from offload.gguf.settings import config_fields

# What a layer shares with its target, by the names of config.json
SAME = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "kv_lora_rank", "num_experts", "n_routed_experts", "moe_intermediate_size", "intermediate_size", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SideLayer:
    """A layer's file."""

    checkpoint: Checkpoint  # under the names that the layer has in a whole file
    fields: dict[str, Any]  # of the target's config.json
    num_parameters: int  # of the layer

    def check_fits(self, text: PretrainedConfig) -> None:
        """Raise EdgespecError for a target that states otherwise what the layer shares with its own."""
        for name in SAME:
            theirs = getattr(text, name, None)
            ours = self.fields.get(name) or theirs  # a file may lack the target's table of tokens
            if theirs is not None and ours != theirs:
                layer = PublishedDraft(NAMES["mtp"].removeprefix("a "), str(self.checkpoint.folder))
                raise layer.wrong(f"is of a target with {name} = {ours}, and this one has {theirs}")


def read_side_layer(path: Path) -> SideLayer:
    """Read a layer's file; raises EdgespecError for one that is not understood."""
    with offload_errors():
        header = read_gguf(path)
        fields = config_fields(header)
        num_parameters = sum(math.prod(one.shape) for name, one in header.tensors.items() if name.startswith("blk."))
        return SideLayer(checkpoint=gguf_checkpoint(header, fields), fields=fields, num_parameters=num_parameters)


def layer_beside(target: ModelFolder) -> Path | None:
    """Return the file of a target's layer that lies beside the target's own, by both names."""
    return side_layer_of(target.folder) if is_gguf(target.folder) else None
