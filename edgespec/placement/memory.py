"""The memory that a pair needs beside its decoder layers, in bytes, from shapes alone.

Estimates lean high: peak memory must stay within the limit that a user gave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from edgespec.draft.agreement import CHECK_TOKENS
from edgespec.draft.distributions import rows_made_at_once
from edgespec.draft.own_parts import aux_states_of, has_readings, lent_layers, reads_features
from edgespec.draft.readings import MOST_READINGS
from edgespec.model.attention import MIN_SHARED, has_kernel, uses_attention_registry
from edgespec.model.causal_model import CHUNK_ROWS, takes_more_rows_than_attention
from edgespec.model.context_limit import context_of
from edgespec.model.cuda_graphs import CAPACITY_ROWS
from edgespec.model.layer_kinds import num_chosen
from edgespec.model.mechanisms.keys_values import STEP_ROWS
from edgespec.model.mechanisms.known import attention_layers, key_shape
from edgespec.model.pass_rows import ALL_PROMPT_ROWS, MOST_PROMPT_ROWS
from edgespec.model.row_chunks import rows_at_once
from edgespec.model.supported import understanding
from edgespec.placement.cache_memory import cache_rows, held_rows, placed_cache_bytes, state_sizes
from edgespec.placement.drawing_memory import drawing_memory
from edgespec.placement.native import native_memory
from edgespec.placement.run_config import RunConfig
from edgespec.sampling.logprobs import ROWS_AT_ONCE
from edgespec.tree.settings import TreeSettings
from offload.allocated import allocated_bytes
from offload.layer_store import LayerRecord
from offload.placement import KEYS
from offload.skeleton import Skeleton
from offload.unpacked_once import lent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The rows of one forward, over prompts or over trees, and the keys that they see."""

    prompt_rows: int
    tree_rows: int
    keys: int  # that a tree's rows are masked for
    prompt_keys: int | None = None  # that a prompt's rows are masked for; None: all of the prompt
    probs_rows: int = 0  # rows of all texts whose distributions exist at once (`draft_probs_rows`)
    num_texts: int = 1
    scores_prompts: bool = False  # whether log-probabilities of a prompt's tokens may be made of its rows
    layer_rows: int = CHUNK_ROWS  # that pass a layer at once; attention takes no more than CHUNK_ROWS
    part_rows: int = MOST_PROMPT_ROWS  # of a long prompt, in a pass

    @property
    def all_prompt_rows(self) -> int:
        """The most rows of prompts that a pass reads."""
        one = min(self.prompt_rows, self.part_rows)
        return max(one, min(self.num_texts * self.prompt_rows, ALL_PROMPT_ROWS))


def block_rows(draft: Skeleton) -> int:
    """Return the rows of a draft's pass over a block, whose distributions all exist at once; 0 where it has none."""
    block = getattr(draft.model, "block", None)
    return 0 if block is None else int(block.size)


def least_rows(draft: Skeleton | None) -> int:
    """Return the rows of the pass in which a published draft is checked, where it is one."""
    return CHECK_TOKENS if draft is not None and has_readings(draft.model) else 0


def feature_memory(
    target: PretrainedConfig, draft: Skeleton, shape: PassShape, *, held_rows: int, dtype: torch.dtype
) -> dict[str, int]:
    """Return what the features of so many rows of all texts take, and the states that they are made of in a pass."""
    if not reads_features(draft.model):
        return {}
    aux_states = aux_states_of(draft.model)
    of_features = target if aux_states is None else draft.model.config.get_text_config(decoder=True)
    width = int(of_features.hidden_size)
    uses = {"target: features": held_rows * width * dtype.itemsize}
    num_aux_layers = (
        int(has_readings(draft.model)) if aux_states is None else len(aux_states.layers)
    )  # a reading may take one
    if num_aux_layers:
        rows = max(shape.all_prompt_rows, shape.num_texts * shape.tree_rows, MOST_READINGS * CHECK_TOKENS)
        numbers = num_aux_layers * (rows + CHUNK_ROWS) * int(target.hidden_size) + rows * width
        uses["target: states between layers"] = numbers * dtype.itemsize
    return uses


FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
PASS_SLACK = 1.5  # an allocator keeps freed blocks that fit nothing that comes next


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The bytes that a layer's forward takes."""

    row_bytes: int  # of a row
    mask_bytes: int  # of a row and a key: what all layers share
    pair_bytes: int  # of a row and a key in one layer

    def of_rows(self, rows: int, keys: int) -> int:
        """Return the bytes of so many rows that see so many keys."""
        return int(PASS_SLACK * rows * (self.row_bytes + keys * self.pair_bytes))


def pass_sizes(config: PretrainedConfig, dtype: torch.dtype) -> PassSizes:
    """Return the bytes of the widest of a model's layers."""
    with understanding(config):
        inner = max(_inner_size(of, layer) for layer, of in enumerate(config.per_layer_config))
        attending = [(layer, config.per_layer_config[layer]) for layer in attention_layers(config)]
        heads = max((of.num_attention_heads for _, of in attending), default=0)
        groups = max((of.num_attention_heads // key_shape(config, layer).heads for layer, of in attending), default=0)
    return PassSizes(
        # Norms compute in float32, the rest in the layers' own dtype. Experts' inputs and outputs exist for all chosen.
        row_bytes=num_chosen(config) * config.hidden_size * (dtype.itemsize + FLOAT32_BYTES)
        + (3 * inner + 6 * config.hidden_size) * dtype.itemsize
        + 2 * config.hidden_size * FLOAT32_BYTES,
        mask_bytes=2 * dtype.itemsize + 3,  # with a window and without
        # The mask is repeated for the heads of a group; capped scores exist for all heads.
        pair_bytes=groups * dtype.itemsize
        + (heads * (2 * dtype.itemsize + FLOAT32_BYTES) if has_scores(config) else 0),
    )


def has_scores(config: PretrainedConfig) -> bool:
    """Return whether attention computes its scores one by one: capped ones, and those beside sinks."""
    return bool(getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss")


def _inner_size(config: PretrainedConfig, layer: int) -> int:
    """Return the width inside a layer's network; some families state it for each layer."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = inner[layer] if isinstance(inner, list | tuple) else inner
    is_wide = getattr(config, "use_double_wide_mlp", False)  # Gemma 4's layers that share keys
    return int(2 * inner if is_wide else inner)


MIB = 1 << 20
LIBRARIES_BYTES = 192 * MIB  # model code and kernels that load with the first model
TOKEN_BYTES = 400  # of a tokenizer's memory, for each of its tokens
BITSANDBYTES_BYTES = 48 * MIB  # of that library, which loads with the first weight in a format of its own
BITSANDBYTES_FORMATS = {"nf4", "fp4", "nf4-cpu"}
CUDA_CONTEXT_BYTES = 600 * MIB
NUM_HIDDEN_COPIES = 4  # of a prompt's hidden states: before and after a layer, and positions
NUM_TEXTS_COPIES = 6  # of all texts' hidden states: those, the final norm's temporaries, the file that is written
NUM_LOGITS_COPIES = 5  # of one chunk of rows: logits, their float32, probabilities, temporaries
NUM_SCORED_COPIES = 3  # of one chunk of a prompt's logits, and of the rows of it that are made float64
NUM_DRAFT_PROBS_COPIES = 3  # a tree's q by layers and in one piece; while a layer is drawn, noise in float64 as well
LAYER_ROWS = 32  # of a tree that the draft expands at once
MIXTURE_ROWS_SHARE = 24  # of the budget, the part that rows of a prompt may take which pass a mixture's layer at once


def resident_bytes(record: LayerRecord, *, device: torch.device) -> int:
    """Return the bytes of a record that is loaded whole: as stored where nothing is converted or moved."""
    return record.flat_bytes if device.type == "cuda" else record.cpu_bytes


def placed_bytes(record: LayerRecord, *, device: torch.device) -> int:
    """Return what a device's memory gives for such a record: CUDA's allocator rounds up."""
    return allocated_bytes(record.flat_bytes) if device.type == "cuda" else record.cpu_bytes


def layer_rows(target: Skeleton, dtype: torch.dtype, budget_bytes: int) -> int:
    """Return how many rows pass a target's layer at once, within its budget.

    In a mixture they are more: for each chunk experts are read and unpacked again.
    """
    config = target.model.config.get_text_config(decoder=True)
    if not num_chosen(config) or not takes_more_rows_than_attention(target.model, config):
        return CHUNK_ROWS
    fitting = budget_bytes // MIXTURE_ROWS_SHARE // pass_sizes(config, dtype).of_rows(1, 0)
    return max(CHUNK_ROWS, min(ALL_PROMPT_ROWS, fitting // CHUNK_ROWS * CHUNK_ROWS))


def pass_bytes(config: PretrainedConfig, shape: PassShape, *, dtype: torch.dtype) -> int:
    """Return the bytes of the largest temporaries of one forward: over prompts, or over trees.

    A tree's temporaries include what is made of its rows. Logits exist for one chunk of rows at a time.
    """
    sizes = pass_sizes(config, dtype)
    row_bytes = NUM_HIDDEN_COPIES * config.hidden_size * dtype.itemsize
    prompt_rows = shape.all_prompt_rows
    prompt_keys = shape.prompt_keys or shape.prompt_rows
    prompt_bytes = _chunk_bytes(sizes, prompt_rows, prompt_keys, shape.layer_rows) + prompt_rows * row_bytes
    tree_rows = shape.num_texts * shape.tree_rows
    logits_rows = NUM_LOGITS_COPIES * min(tree_rows, rows_at_once(config.vocab_size))
    tree_bytes = _chunk_bytes(sizes, tree_rows, shape.keys, shape.layer_rows)
    tree_bytes += config.vocab_size * FLOAT32_BYTES * (logits_rows + NUM_DRAFT_PROBS_COPIES * shape.probs_rows)
    tree_bytes += tree_rows * (shape.keys * sizes.mask_bytes + row_bytes)
    scored_bytes = prompt_rows * row_bytes + _scored_bytes(config.vocab_size, prompt_rows) * shape.scores_prompts
    return int(PASS_SLACK * max(prompt_bytes, tree_bytes, scored_bytes))


def draft_probs_rows(vocab: int, tree: TreeSettings, run_config: RunConfig) -> int:
    """Return of how many rows of a draft, of all texts together, distributions exist at once.

    Those of sampled trees are kept until the tree is verified, and so are all of them for measurements. Others are
    looked at once.
    """
    if tree.children != "sampled" and not run_config.keeps_draft_probs:
        return min(run_config.num_texts * tree.num_drafted, rows_made_at_once(vocab))
    # Trees that share draft calls are smaller: of the others the nodes of a layer are expanded at the same time.
    return tree.num_drafted + (run_config.num_texts - 1) * min(tree.num_drafted, LAYER_ROWS)


def texts_bytes(config: PretrainedConfig, *, num_rows: int, text_rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the largest temporaries of one pass over texts of `text_rows` rows, `num_rows` in all."""
    sizes = pass_sizes(config, dtype)
    chunk_rows = max(text_rows, CHUNK_ROWS // text_rows * text_rows)
    chunk_bytes = chunk_rows * sizes.row_bytes + text_rows * text_rows * sizes.pair_bytes
    return int(PASS_SLACK * (chunk_bytes + NUM_TEXTS_COPIES * num_rows * config.hidden_size * dtype.itemsize))


def _scored_bytes(vocab: int, rows: int) -> int:
    """Return the bytes in which the log-probabilities of a prompt's rows are made, whose pass is over."""
    chunk_bytes = NUM_SCORED_COPIES * min(rows, rows_at_once(vocab)) * FLOAT32_BYTES
    return vocab * (chunk_bytes + NUM_SCORED_COPIES * min(rows, ROWS_AT_ONCE) * FLOAT64_BYTES)


def _chunk_bytes(sizes: PassSizes, rows: int, keys: int, layer_rows: int) -> int:
    """Return the bytes of a layer's forward over the first chunk of so many rows."""
    return min(rows, layer_rows) * sizes.row_bytes + min(rows, CHUNK_ROWS) * keys * sizes.pair_bytes


def masked_keys(of: Skeleton, keys: int, tail: int, *, run_config: RunConfig) -> int:
    """Return for how many keys the mask of a pass is made, where not all rows see the last `tail` ones."""
    config = of.model.config.get_text_config(decoder=True)
    with understanding(config):
        shapes = [key_shape(config, layer) for layer in attention_layers(config)]
    dims = {(shape.key_width, shape.value_width) for shape in shapes}
    has_kernels = (has_kernel(*of_head, dtype=run_config.dtype, device=run_config.device) for of_head in dims)
    splits = uses_attention_registry(of.model) and not has_scores(config) and all(has_kernels)
    return min(keys, MIN_SHARED + 2 * tail) if splits else keys


def _within(run_config: RunConfig, limit: int | None) -> RunConfig:
    """Return the run of a model that reads so many tokens of a text at most."""
    most = min(run_config.context_tokens, limit or run_config.context_tokens)
    return replace(run_config, context_tokens=most, prompt_tokens=min(run_config.prompt_tokens, most))


def device_memory(
    target: Skeleton,
    draft: Skeleton | None,
    *,
    tree: TreeSettings,
    run_config: RunConfig,
    budget_bytes: int,
    table: LayerRecord | None = None,
    on_demand: bool = False,
) -> dict[str, int]:
    """Return the bytes of each use of the device, all but the target's decoder layers: use -> bytes.

    `table` is that of the input embeddings, where they wait in RAM. With `on_demand` experts come one by one.
    """
    config = target.model.config.get_text_config(decoder=True)
    device, dtype = run_config.device, run_config.dtype
    context_tokens, num_texts = run_config.context_tokens, run_config.num_texts
    target_rows, _ = cache_rows(context_tokens, tree)
    tree_rows = target_rows - context_tokens

    target_shape = PassShape(
        prompt_rows=max(run_config.prompt_tokens, least_rows(draft)),
        tree_rows=tree_rows,
        keys=masked_keys(target, target_rows, tree_rows, run_config=run_config),
        prompt_keys=masked_keys(target, run_config.prompt_tokens, CHUNK_ROWS, run_config=run_config),
        num_texts=num_texts,
        scores_prompts=True,
        layer_rows=layer_rows(target, dtype, budget_bytes),
    )
    uses = always_memory(target, draft, table, device) | {
        KEYS: placed_cache_bytes(
            config, rows=held_rows(run_config, tree_rows), num_texts=num_texts, dtype=dtype, device=device
        ),
        "target: one pass": pass_bytes(config, target_shape, dtype=dtype),
    }
    uses |= _states_memory("target", target, tree_rows=tree_rows, run_config=run_config)
    if not on_demand:
        uses |= _native_memory("target", target, run_config, tree_rows, budget_bytes)
    if draft is not None:
        uses |= feature_memory(config, draft, target_shape, held_rows=held_rows(run_config, tree_rows), dtype=dtype)
        uses |= draft_memory(draft, tree=tree, run_config=run_config)
    unpack_bytes = target.unpack_bytes(dtype, device, on_demand=on_demand)
    unpack_bytes += draft.unpack_bytes(dtype, device) if draft else 0
    if unpack_bytes:
        uses["weights while unpacked"] = unpack_bytes
    return uses


def draft_memory(draft: Skeleton, *, tree: TreeSettings, run_config: RunConfig) -> dict[str, int]:
    """Return the bytes of each use of the device by a draft that grows these trees, but for a target's features."""
    device, dtype, num_texts = run_config.device, run_config.dtype, run_config.num_texts
    tree_rows = cache_rows(0, tree)[0]
    draft_config = draft.model.config.get_text_config(decoder=True)
    draft_run = _within(run_config, context_of(draft_config))  # it reads no more of a text
    _, draft_rows = cache_rows(draft_run.context_tokens, tree)
    block = block_rows(draft)
    draft_rows = max(draft_rows, draft_run.context_tokens + block)
    drafted_rows = draft_rows - draft_run.context_tokens
    uses = {"draft: weights": sum(placed_bytes(record, device=device) for record in (draft.outside, *draft.records))}
    step_rows = CAPACITY_ROWS if run_config.records_passes else STEP_ROWS
    is_lent_keys = bool(lent_layers(draft.model))  # an assistant reads no text, and keeps no rows
    held = 0 if is_lent_keys else held_rows(draft_run, drafted_rows, step_rows)
    uses["draft: keys and values"] = placed_cache_bytes(
        draft_config, rows=held, num_texts=num_texts, dtype=dtype, device=device
    )
    shape = PassShape(
        prompt_rows=0 if is_lent_keys else draft_run.prompt_tokens,
        tree_rows=max(tree_rows, block),
        keys=masked_keys(draft, draft_rows, drafted_rows, run_config=run_config),
        prompt_keys=masked_keys(draft, draft_run.prompt_tokens, CHUNK_ROWS, run_config=run_config),
        probs_rows=draft_probs_rows(draft_config.vocab_size, tree, run_config) + num_texts * block,
        num_texts=num_texts,
        # A head reads the rows of its text whole.
        part_rows=draft_run.prompt_tokens if reads_features(draft.model) else MOST_PROMPT_ROWS,
    )
    uses["draft: one pass"] = pass_bytes(draft_config, shape, dtype=dtype)
    uses |= drawing_memory(tree, draft_config, run_config, draft_rows, pass_sizes(draft_config, dtype).of_rows)
    uses |= _states_memory("draft", draft, tree_rows=drafted_rows, run_config=draft_run)
    return uses | _native_memory("draft", draft, draft_run, drafted_rows)


def always_memory(
    target: Skeleton, draft: Skeleton | None, table: LayerRecord | None, device: torch.device
) -> dict[str, int]:
    """Return what is needed however texts are decoded."""
    on_cuda = device.type == "cuda"
    return {
        **(
            {"CUDA context": CUDA_CONTEXT_BYTES} if on_cuda else {"libraries, tokenizer": _library_bytes(target, draft)}
        ),
        "target: embeddings, norms, head": placed_bytes(_outside(target, table), device=device)
        + lent_bytes(target, lends=draft is not None and bool(draft.lent)),
    }


def _library_bytes(target: Skeleton, draft: Skeleton | None = None) -> int:
    """Return the bytes of the libraries that load with the models, and of the target's tokenizer."""
    formats = {name for model in (target, draft) if model is not None for name in model.packed_formats}
    tokens_bytes = TOKEN_BYTES * int(target.model.config.get_text_config(decoder=True).vocab_size)
    return LIBRARIES_BYTES + tokens_bytes + (BITSANDBYTES_BYTES if formats & BITSANDBYTES_FORMATS else 0)


def _states_memory(name: str, model: Skeleton, *, tree_rows: int, run_config: RunConfig) -> dict[str, int]:
    """Return what recurrent layers need, if there are any."""
    sizes = state_sizes(model.model, run_config.dtype, keeps_row_bits=run_config.keeps_row_bits)
    if not sizes.row_bytes:
        return {}
    most_rows = max(run_config.num_texts * tree_rows, min(run_config.prompt_tokens, CHUNK_ROWS))
    pass_bytes = PASS_SLACK * sizes.pass_bytes(chunk_rows=min(most_rows, CHUNK_ROWS), rows=tree_rows)
    held_bytes = sizes.texts_bytes(num_texts=run_config.num_texts, rows=tree_rows)
    return {f"{name}: recurrent states": held_bytes + int(pass_bytes)}


def _native_memory(
    name: str, model: Skeleton, run_config: RunConfig, tree_rows: int, budget_bytes: int | None = None
) -> dict[str, int]:
    """Return what passes in one call hold, if the layers may be read so: within a budget, where they have one."""
    found = native_memory(model, run_config, tree_rows=tree_rows, budget_bytes=budget_bytes)
    return {f"{name}: passes in one call": found} if found else {}


def _outside(target: Skeleton, table: LayerRecord | None) -> LayerRecord:
    """Return what lies outside of the layers, less a table that waits in RAM."""
    return target.outside if table is None else target.outside.without(frozenset(table.tensors))


def host_memory(
    target: Skeleton, *, dtype: torch.dtype, table: LayerRecord | None = None, on_demand: bool = False
) -> dict[str, int]:
    """Return what an accelerator's program needs of RAM, beside layers and experts that wait there: use -> bytes."""
    records = target.dense_records if on_demand else target.records
    read_bytes = max(record.stored_bytes for record in (*records, _outside(target, table)))
    uses = {"libraries, tokenizer": _library_bytes(target), "pages while they are read": read_bytes}
    if table is not None:
        uses["target: input embeddings"] = table.cpu_bytes
    if on_demand:
        uses["experts while they are computed"] = target.expert_unpack_bytes(dtype)
    return uses
