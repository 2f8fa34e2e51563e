"""The memory of texts that are read by transformers' own forward: its cache, which is measured, and whole prompts."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from edgespec.model.own_pass_model import UNCACHED, OwnPassModel
from edgespec.model.pass_rows import next_rows
from edgespec.model.row_chunks import rows_at_once
from edgespec.model.self_check import random_model_and_text, trial_of
from edgespec.placement.cache_memory import cache_rows
from edgespec.placement.memory import NUM_LOGITS_COPIES, always_memory, draft_memory
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings
from offload.layer_store import LayerRecord
from offload.skeleton import Skeleton

FLOAT32_BYTES = 4
ROWS = (8, 16)  # that are read to measure a cache
NUM_HIDDEN_COPIES = 4  # of a prompt's hidden states: before and after a layer, and positions
SLACK = 1.5  # an allocator keeps freed blocks that fit nothing that comes next
HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
INNER_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")


def plain_device_memory(
    target: Skeleton,
    draft: Skeleton | None,
    *,
    tree: TreeSettings,
    run_config: RunConfig,
    table: LayerRecord | None,
    on_demand: bool,
) -> dict[str, int]:
    """Return the bytes of each use of the device, all but the target's decoder layers, as `device_memory` does."""
    dtype, device = run_config.dtype, run_config.device
    uses = always_memory(target, draft, table, device) | plain_memory(target.model, tree, run_config)
    unpack_bytes = target.unpack_bytes(dtype, device, on_demand=on_demand)
    if draft is not None:
        uses |= draft_memory(draft, tree=tree, run_config=run_config)
        unpack_bytes += draft.unpack_bytes(dtype, device)
    return uses | ({"weights while unpacked": unpack_bytes} if unpack_bytes else {})


def plain_memory(model: PreTrainedModel, tree: TreeSettings, run_config: RunConfig) -> dict[str, int]:
    """Return the bytes of the caches of all texts, and of the temporaries of a pass.

    It reads prompts whole, or chains as long as the trees; without a cache, whole texts.
    """
    config = model.config.get_text_config(decoder=True)
    widest = getattr(config, "global_config", config)  # of BLT's stacks
    whole_rows = run_config.context_tokens if config.model_type in UNCACHED else run_config.prompt_tokens
    text_rows, _ = cache_rows(run_config.context_tokens, tree)
    tree_rows = text_rows - run_config.context_tokens
    fixed_bytes, row_bytes = cache_sizes(model, run_config.dtype)
    caches_bytes = run_config.num_texts * fixed_bytes
    caches_bytes += (run_config.all_tokens + run_config.num_texts * (tree_rows - 1)) * row_bytes
    # Rows that are added to a layer's keys make a new tensor, while the old one is still there.
    caches_bytes += int(SLACK * caches_bytes / max(1, widest.num_hidden_layers))
    rows, item = max(whole_rows, tree_rows), run_config.dtype.itemsize
    heads, hidden = _first(widest, HEAD_COUNTS) or 1, widest.hidden_size
    inner = _first(widest, INNER_WIDTHS) or 4 * hidden
    layer_bytes = rows * ((3 * inner + 8 * hidden) * item + 2 * hidden * FLOAT32_BYTES)
    pairs = max(whole_rows**2, tree_rows * text_rows if tree_rows > 1 else 0)  # of a row and a key
    layer_bytes += pairs * heads * (2 * item + FLOAT32_BYTES)
    held_bytes = run_config.num_texts * (rows * NUM_HIDDEN_COPIES * hidden * item + pairs * FLOAT32_BYTES)
    # Of a chain the logits of all rows stay until it is verified, some rows at a time.
    logits_rows = run_config.num_texts * tree_rows
    logits_rows += NUM_LOGITS_COPIES * min(logits_rows, rows_at_once(config.vocab_size)) if tree_rows > 1 else 0
    logits_bytes = logits_rows * config.vocab_size * FLOAT32_BYTES
    return {
        "target: its own cache": caches_bytes,
        "target: one pass": int(SLACK * (layer_bytes + held_bytes + logits_bytes)),
    }


@torch.no_grad()
def cache_sizes(model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a text's cache without rows, and those of each row; a window is counted as if it had no end.

    The model itself is asked, without numbers; where its code looks at numbers, a narrow copy, whose sizes are scaled.
    """
    if model.config.model_type in UNCACHED:
        return 0, 0
    try:
        bare = copy.deepcopy(model)
        nn.Module.to(bare, "meta", dtype)
        return _measured(bare, torch.device("meta"))
    except Exception:  # a family's code may raise anything where tensors have no numbers
        narrow, _ = random_model_and_text(trial_of(model.config, device=torch.device("cpu")))
        nn.Module.to(narrow, dtype)
        fixed_bytes, row_bytes = _measured(narrow, torch.device("cpu"))
        ours, theirs = (of.config.get_text_config(decoder=True) for of in (model, narrow))
        width = -(-ours.hidden_size // theirs.hidden_size)
        layers = -(-ours.num_hidden_layers // theirs.num_hidden_layers)
        return fixed_bytes * layers * width * width, row_bytes * layers * width


def _measured(model: PreTrainedModel, device: torch.device) -> tuple[int, int]:
    plain = OwnPassModel(model, device=device, reads_on=False)
    sizes = []
    for rows in ROWS:
        text = plain.new_text()
        plain.read([next_rows(text, torch.zeros(rows, dtype=torch.long, device=device))])
        sizes.append(text.num_bytes)
    plain.close()
    row_bytes = -(-(sizes[1] - sizes[0]) // (ROWS[1] - ROWS[0]))
    return max(0, sizes[0] - ROWS[0] * row_bytes), row_bytes


def _first(config: object, names: tuple[str, ...]) -> int:
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)
