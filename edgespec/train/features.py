"""Collect features: the target's last hidden states after the final norm, for every token of some texts.

Heads that read hidden states from between the layers have those collected beside them.

Texts are cut into blocks that the target reads on their own. Blocks pass it in groups as large as the memory
allows, so that one pass over streamed weights serves a whole group; each group is one shard on disk, and what
was written before an interruption is not computed again. Legend: h the target's hidden size.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.pair.folder import ModelFolder, fingerprint
from edgespec.placement.memory import texts_bytes
from edgespec.placement.place import Memory, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.train.feature_files import Block, FeatureFiles, FeatureRun, begin_run, save_shard

MIN_BLOCK_TOKENS = 8  # shorter ends of texts teach too little of later steps
GROUP_SHARE = 0.25  # of the memory, for the hidden states of a group
MAX_GROUP_BYTES = 1 << 30  # a pass over these tokens computes for longer than it reads weights
ID_BYTES = 4
LENGTH_BYTES = 8  # of a block: its length and its text's number

Announce = Callable[[Path, int, int], None]  # folder, bytes that will be written there, bytes free
Progress = Callable[[int, int], None]  # tokens done, tokens in all


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The rows that pass the target at once, and the memory that they leave for the target."""

    rows: int  # of a group, padding included
    memory: Memory


def cut_blocks(texts: Sequence[Sequence[int]], *, block_tokens: int, max_tokens: int | None = None) -> list[Block]:
    """Cut texts into blocks, the longest first, so that a group has little padding; ends shorter than 8 are dropped.

    With `max_tokens` only the first blocks are cut, of that many tokens. Raises EdgespecError where none are left.
    """
    blocks: list[Block] = []
    left = max_tokens
    for number, ids in enumerate(texts):
        for start in range(0, len(ids), block_tokens):
            piece = list(ids[start : start + block_tokens][:left])
            if len(piece) >= MIN_BLOCK_TOKENS:
                blocks.append(Block(text=number, ids=piece))
                left = None if left is None else left - len(piece)
    if not blocks:
        raise EdgespecError(
            "E_FEATURES", f"no text has {MIN_BLOCK_TOKENS} tokens to learn from.", "Give longer texts, or more tokens."
        )
    return sorted(blocks, key=lambda block: -len(block.ids))


def feature_run(
    target: ModelFolder,
    blocks: Sequence[Block],
    *,
    block_tokens: int,
    dtype: torch.dtype,
    quant: str | None,
    aux_layers: tuple[int, ...] = (),
) -> FeatureRun:
    """Describe the source of these blocks' features; `aux_layers` are numbers of layers whose output is taken, too."""
    content = json.dumps([[block.text, block.ids] for block in blocks])
    return FeatureRun(
        target=target.folder.name,
        target_fingerprint=fingerprint(target),
        quant=quant,
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=int(target.config.get_text_config(decoder=True).hidden_size),
        block_tokens=block_tokens,
        num_blocks=len(blocks),
        num_tokens=sum(len(block.ids) for block in blocks),
        blocks_sha256=hashlib.sha256(content.encode()).hexdigest(),
        aux_layers=aux_layers,
    )


def dataset_bytes(run: FeatureRun) -> int:
    """Return the bytes of the features' files, without their headers."""
    itemsize = int(getattr(torch, run.dtype).itemsize)
    token_bytes = (1 + len(run.aux_layers)) * run.hidden_size * itemsize + ID_BYTES
    return run.num_tokens * token_bytes + run.num_blocks * LENGTH_BYTES


def place_groups(config: PretrainedConfig, run_config: RunConfig, *, num_aux_layers: int = 0) -> GroupPlace:
    """Read the memory, and share it between a group of blocks and the target.

    At least one block of `run_config.context_tokens` passes at a time; the target's own plan says whether it then fits.
    Hidden states at `num_aux_layers` places are kept until a group has passed.
    """
    config = config.get_text_config(decoder=True)
    aux_bytes = (
        2 * num_aux_layers * int(config.hidden_size) * run_config.dtype.itemsize
    )  # a row; side by side once more
    block_tokens, dtype = run_config.context_tokens, run_config.dtype
    memory = read_memory(run_config.limits, run_config.device)
    budget_bytes = memory.device_budget_bytes

    def rows_bytes(rows: int) -> int:
        return texts_bytes(config, num_rows=rows, text_rows=block_tokens, dtype=dtype) + rows * aux_bytes

    least_bytes = rows_bytes(block_tokens)
    one_more_bytes = rows_bytes(2 * block_tokens) - least_bytes
    group_bytes = min(MAX_GROUP_BYTES, int(GROUP_SHARE * budget_bytes))
    num_blocks = 1 + max(0, group_bytes - least_bytes) // one_more_bytes
    rows = num_blocks * block_tokens
    left_bytes = max(0, budget_bytes - rows_bytes(rows))
    host_bytes = left_bytes if run_config.device.type == "cpu" else memory.host_budget_bytes
    return GroupPlace(rows=rows, memory=Memory(device_budget_bytes=left_bytes, host_budget_bytes=host_bytes))


def collect_features(
    model: CausalModel,
    blocks: Sequence[Block],
    folder: Path,
    run: FeatureRun,
    *,
    group_rows: int,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the features of all blocks to a folder, going on where an earlier run was interrupted.

    `announce` is called before anything is written. Raises EdgespecError: a folder of another run, a
    disk without room, features that are not finite.
    """
    begin_run(folder, run)
    files = FeatureFiles(folder)
    num_done, tokens_done = files.num_blocks, files.num_tokens
    left_bytes = int(dataset_bytes(run) * (1 - tokens_done / run.num_tokens))
    free_bytes = shutil.disk_usage(folder).free
    if left_bytes and announce:
        announce(folder, left_bytes, free_bytes)
    if left_bytes > free_bytes:
        what = f"features take {left_bytes / 1e9:.2f} GB in '{folder}', where {free_bytes / 1e9:.2f} GB are free."
        raise EdgespecError("E_OUTPUT", what, "Name a folder on another disk, or learn from fewer tokens.")
    for group in _groups(blocks[num_done:], group_rows):
        ids = [torch.tensor(block.ids, device=model.device) for block in group]
        features, found = model.states_of_texts(ids, run.aux_layers)
        states = torch.cat([found[layer] for layer in run.aux_layers], -1) if run.aux_layers else None
        is_finite = features.isfinite().all() & (True if states is None else states.isfinite().all())
        if not bool(is_finite):  # a wait for the pass, which the file needs anyway
            raise EdgespecError(
                "E_NAN_LOGITS", "the target's features are NaN or infinite.", "Use `dtype=float32` or bfloat16."
            )
        save_shard(folder, group, features.cpu(), None if states is None else states.cpu())
        tokens_done += features.shape[0]
        if progress:
            progress(tokens_done, run.num_tokens)


def _groups(blocks: Sequence[Block], group_rows: int) -> Iterator[Sequence[Block]]:
    """Yield groups of blocks that have at most `group_rows` rows when padded to the longest, which is the first."""
    start = 0
    while start < len(blocks):
        end = start + max(1, group_rows // len(blocks[start].ids))
        yield blocks[start:end]
        start = end
