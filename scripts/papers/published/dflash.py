"""A small DFlash or DSpark drafter of the built-in target: two layers that guess blocks of eight, in z-lab's container.

A DSpark drafter's places have a bias of the token before them, and its first row guesses too. At random places of each
text a block of masks is trained to have the target's distributions at its places. What later places add counts less and
less, as tokens are accepted in a row. Legend: B texts, S rows of a text, N blocks of a text, s rows of a block, h
hidden size.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from edgespec.draft.dflash import read_dflash
from edgespec.draft.dflash_network import GuessedBlock, own_parts
from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.markov import MarkovHead, bias_of
from edgespec.pair.folder import open_model
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_losses import LogitsOf
from edgespec.train.head_model import lender, new_draft, own_tensors, write_draft
from edgespec.train.head_objective import head_logits
from edgespec.train.head_steps import known_states
from edgespec.train.training_loop import TrainingRun, train
from scripts.papers.published.data import TARGET
from tests.support.dflash_config import BLOCK, config_of

NUM_BLOCKS = 24
SLOT_DECAY = 0.8  # what a place counts against the one before it


def guessed(model: PreTrainedModel, batch: FeatureBatch, anchors: Tensor) -> Tensor:
    """The last hidden states [B, N, s, h] of blocks behind these rows [B, N], whose tokens are known."""
    fuse: Any = model.fuse
    decoder: Any = model.model
    block = model.block
    assert isinstance(block, GuessedBlock)
    context = fuse.features(known_states(batch))  # [B, S, h]
    num_rows, count = batch.ids.shape[1], anchors.shape[1] * block.size
    ids = torch.full((*anchors.shape, block.size), block.mask_token)
    ids[..., 0] = batch.ids.gather(1, anchors)
    positions = (anchors[..., None] + torch.arange(block.size)).flatten(1)  # [B, N * s]
    sees_text = torch.arange(num_rows) < anchors.repeat_interleave(block.size, 1)[..., None]  # [B, N * s, S]
    own = torch.arange(count) // block.size
    visible = torch.cat([sees_text, (own[:, None] == own).expand(len(anchors), -1, -1)], -1)[:, None]
    stream = model.get_input_embeddings()(ids.flatten(1))  # [B, N * s, h]
    rotations = decoder.rotary_emb(stream, torch.arange(num_rows)[None]), decoder.rotary_emb(stream, positions)
    for layer in decoder.layers:
        attention = layer.self_attn

        def keyed(rows: Tensor, rotation: tuple[Tensor, Tensor], of: Any = attention) -> tuple[Tensor, Tensor]:
            heads = (*rows.shape[:-1], -1, of.head_dim)
            keys = of.k_norm(of.k_proj(rows).view(heads)).transpose(1, 2)
            return apply_rotary_pos_emb(keys, keys, *rotation)[1], of.v_proj(rows).view(heads).transpose(1, 2)

        normed = layer.input_layernorm(stream)
        query = attention.q_norm(attention.q_proj(normed).view(*normed.shape[:-1], -1, attention.head_dim))
        query = query.transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query, *rotations[1])
        pairs = zip(keyed(context, rotations[0]), keyed(normed, rotations[1]), strict=True)
        keys, values = (torch.cat(pair, 2) for pair in pairs)
        found = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, enable_gqa=True
        )
        stream = stream + attention.o_proj(found.transpose(1, 2).flatten(2))
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
    return decoder.norm(stream).view(*ids.shape, -1)  # type: ignore[no-any-return]


def slot_terms(
    model: PreTrainedModel, batch: FeatureBatch, generator: torch.Generator, target_logits: LogitsOf
) -> tuple[Tensor, Tensor]:
    """The cross-entropy [n, places] of random blocks, and whether the likeliest token is the target's."""
    block = model.block
    assert isinstance(block, GuessedBlock)
    least = int(batch.lengths.min()) - BLOCK
    anchors = torch.stack([torch.randperm(least, generator=generator)[:NUM_BLOCKS] + 1 for _ in batch.lengths])
    hidden = guessed(model, batch, anchors)[:, :, block.first_slot :]
    rows = (anchors[..., None] + torch.arange(block.num_places)).flatten(1)
    features = batch.features.gather(1, rows[..., None].expand(-1, -1, batch.features.shape[-1]))
    with torch.no_grad():
        p = target_logits(features.flatten(0, 1)).softmax(-1)
    logits = head_logits(model)(hidden.flatten(0, 2))
    markov = getattr(model, "markov", None)
    if isinstance(markov, MarkovHead):  # of a form that keeps no state
        latent, _ = markov(batch.ids.gather(1, rows).flatten(), hidden.flatten(0, 2), hidden.new_zeros(0))
        logits = logits + bias_of(model, latent, logits.shape[-1])
    entropy = -(p * logits.log_softmax(-1)).sum(-1)
    return entropy.view(-1, block.num_places), (logits.argmax(-1) == p.argmax(-1)).view(-1, block.num_places)


def train_dflash(
    arguments: argparse.Namespace, run: TrainingRun, taps: Sequence[int], *, is_dspark: bool = False
) -> Path:
    """Train a drafter on the target's states, and write its folder."""
    kind = "dspark" if is_dspark else "dflash"
    folder: Path = arguments.out / kind
    if folder.exists():
        return folder
    config = config_of(AutoConfig.from_pretrained(TARGET), taps, is_dspark=is_dspark)
    facts, layers = read_dflash(config, {}, DraftKind(name=kind), named="the drafter")
    parts = own_parts(facts, facts.layers(config["num_target_layers"]))
    shares = SLOT_DECAY ** torch.arange(facts.num_slots)
    with lender(open_model(TARGET), device=torch.device("cpu"), dtype=torch.float32) as lent:
        model = new_draft(lent, layers, parts, named="the drafter", seed=arguments.seed)
        logits = head_logits(lent)

        def objective(batch: FeatureBatch, generator: torch.Generator) -> dict[str, Tensor]:
            entropy, _ = slot_terms(model, batch, generator, logits)
            return {"loss": (entropy.mean(0) * shares).sum() / shares.sum()}

        @torch.no_grad()
        def evaluate(held_out: Sequence[int]) -> dict[str, float]:
            blocks = [block for block in held_out if int(run.files.lengths[block]) > 2 * BLOCK]
            batches = [run.files.batch([block], device=torch.device("cpu")) for block in blocks]
            terms = [slot_terms(model, batch, torch.Generator().manual_seed(0), logits) for batch in batches]
            agree = torch.cat([same for _, same in terms]).float()  # [n, s - 1]
            in_a_row = {"acceptance_length": 1 + float(agree[:, :4].cumprod(-1).sum(-1).mean())}
            return in_a_row | {f"agreement_{slot + 1}": float(agree[:, slot].mean()) for slot in range(4)}

        own = own_tensors(model, parts.modules)
        report = train(own, objective, run=run, evaluate=evaluate)
        print(kind, {name: round(value, 3) for name, value in report.held_out.items()})
        tensors = {
            re.sub(r"^markov\.", "markov_head.", name.removeprefix("fuse.").removeprefix("model.")): tensor
            for name, tensor in own.items()
        }
        write_draft(folder, config, tensors)
    return folder
