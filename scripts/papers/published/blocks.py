"""Small drafters of a target that guess blocks: two layers, in z-lab's container.

A DSpark drafter's places have a bias of the token before them, and its first row guesses too; a DFlash2 drafter mixes
neighbouring rows, and scores a place's candidates by the token before. At random places of each text a block of masks
is trained to have the target's distributions at its places. What later places add counts less and less, as tokens are
accepted in a row. Legend: B texts, S rows of a text, N blocks of a text, s rows of a block, h hidden size, V tokens.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from edgespec.draft.dflash import read_dflash
from edgespec.draft.dflash_network import GuessedBlock, own_parts
from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.markov import MarkovHead, bias_of
from edgespec.draft.selector import BlockConvolution, CandidateSelector
from edgespec.pair.folder import open_model
from edgespec.train.eagle3_head import default_aux_layers
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_losses import LogitsOf
from edgespec.train.head_model import lender, new_draft, own_tensors, write_draft
from edgespec.train.head_objective import head_logits
from edgespec.train.head_steps import known_states
from edgespec.train.training_loop import TrainingRun, train
from scripts.papers.published.timed import forget, train_timed
from tests.support.dflash_config import Kind, config_of

NUM_BLOCKS = 24
SLOT_DECAY = 0.8  # what a place counts against the one before it
STORED = re.compile(r"^(model\.|fuse\.|markov\.|selector\.)")  # which the folder names otherwise
CPU = torch.device("cpu")


def attended(layer: Any, rows: Tensor, context: Tensor, rotations: Sequence[Any], visible: Tensor) -> Tensor:
    """A layer's attention [B, N * s, h] of blocks' rows to the text and to their own block."""
    attention = layer.self_attn

    def keyed(of: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        heads = (*of.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(of).view(heads)).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, *rotation)[1], attention.v_proj(of).view(heads).transpose(1, 2)

    query = attention.q_norm(attention.q_proj(rows).view(*rows.shape[:-1], -1, attention.head_dim)).transpose(1, 2)
    query, _ = apply_rotary_pos_emb(query, query, *rotations[1])
    pairs = zip(keyed(context, rotations[0]), keyed(rows, rotations[1]), strict=True)
    keys, values = (torch.cat(pair, 2) for pair in pairs)
    found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
    return attention.o_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def mixed(layer: Any, name: str, normed: Tensor) -> tuple[Any, Any]:
    """What mixes rows [B, N * s, h] before and after a part of a layer; nothing where it has no convolutions."""
    if not layer.has_convolutions:
        return (lambda rows: rows), (lambda rows: rows)
    convolution: BlockConvolution = getattr(layer, name)
    kernels = convolution.kernels(normed.reshape(1, -1, normed.shape[-1]))
    return tuple(  # type: ignore[return-value]
        lambda rows, own=own: convolution(own, rows.reshape(1, -1, rows.shape[-1])).view(rows.shape) for own in kernels
    )


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
        normed = layer.input_layernorm(stream)
        before, after = mixed(layer, "attention_conv", normed)
        stream = stream + after(attended(layer, before(normed), context, rotations, visible))
        normed = layer.post_attention_layernorm(stream)
        before, after = mixed(layer, "mlp_conv", normed)
        stream = stream + after(layer.mlp(before(normed)))
    return decoder.norm(stream).view(*ids.shape, -1)  # type: ignore[no-any-return]


def slot_entropies(
    model: PreTrainedModel, batch: FeatureBatch, generator: torch.Generator, target_logits: LogitsOf, *, guesses: float
) -> Tensor:
    """The cross-entropies [n, places] of random blocks.

    With a selector, those of scores of all tokens, and of the guesses before, which choose candidates.
    """
    block = model.block
    assert isinstance(block, GuessedBlock)
    least = int(batch.lengths.min()) - block.size
    anchors = torch.stack([torch.randperm(least, generator=generator)[:NUM_BLOCKS] + 1 for _ in batch.lengths])
    hidden = guessed(model, batch, anchors)[:, :, block.first_slot :].flatten(0, 2)
    rows = (anchors[..., None] + torch.arange(block.num_places)).flatten(1)
    features = batch.features.gather(1, rows[..., None].expand(-1, -1, batch.features.shape[-1]))
    with torch.no_grad():
        p = target_logits(features.flatten(0, 1)).softmax(-1)
    before = batch.ids.gather(1, rows).flatten()
    logits = head_logits(model)(hidden)
    selector = getattr(model, "selector", None)
    if isinstance(selector, CandidateSelector):  # candidates of a drafter that has learned little lack half of p
        whole = logits + pair_scores(selector, hidden, before)
        entropy = guesses * _entropy(p, logits) + _entropy(p, whole)
    else:
        entropy = _entropy(p, scored(model, logits, hidden, before))
    return entropy.view(-1, block.num_places)


def pair_scores(selector: CandidateSelector, hidden: Tensor, before: Tensor) -> Tensor:
    """What a selector adds to the logits of all tokens [n, V] behind tokens [n], at places of states [n, h]."""
    weights: Tensor = selector.hidden_projection(hidden) * selector.predecessor_codebook(before)
    return weights @ selector.successor_codebook.weight.T


def scored(model: PreTrainedModel, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
    """The logits [n, V] behind tokens [n], as trees have them, of places of `logits` [n, V] and states [n, h]."""
    markov = getattr(model, "markov", None)
    if isinstance(markov, MarkovHead):  # of a form that keeps no state
        latent, _ = markov(before, hidden, hidden.new_zeros(0))
        return logits + bias_of(model, latent, logits.shape[-1])
    selector = getattr(model, "selector", None)
    return selector(logits, hidden, before) if isinstance(selector, CandidateSelector) else logits


def _entropy(p: Tensor, logits: Tensor) -> Tensor:
    return -(p * logits.log_softmax(-1)).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A drafter that is trained."""

    model: PreTrainedModel
    config: Mapping[str, Any]
    own: Mapping[str, Tensor]  # its own tensors


def new_drafter(target: PreTrainedModel, kind: Kind, *, candidates: int, seed: int) -> Drafter:
    """A drafter with fresh weights; its convolutions change nothing at first."""
    of_target = target.config.get_text_config(decoder=True)
    inner = {"selector_top_k": candidates} if kind == "dflash2" else {}
    config = config_of(of_target, default_aux_layers(of_target), kind, **inner)
    facts, layers = read_dflash(config, {}, DraftKind(name=kind), named="the drafter")
    parts = own_parts(facts, facts.layers(config["num_target_layers"]))
    model = new_draft(target, layers, parts, named="the drafter", seed=seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BlockConvolution):
                module.base_kernel.zero_()[:, 0] = 1
                module.kernel_projection.weight.zero_()
    return Drafter(model=model, config=config, own=own_tensors(model, parts.modules))


def learn(drafter: Drafter, lent: PreTrainedModel, run: TrainingRun, guess_loss: float) -> None:
    """Train a drafter in place on the target's states; held-out texts say its loss."""
    logits = head_logits(lent)

    def weighed(batch: FeatureBatch, generator: torch.Generator) -> Tensor:
        entropy = slot_entropies(drafter.model, batch, generator, logits, guesses=guess_loss).mean(0)
        shares = SLOT_DECAY ** torch.arange(entropy.shape[0])
        return (entropy * shares).sum() / shares.sum()

    def objective(batch: FeatureBatch, generator: torch.Generator) -> dict[str, Tensor]:
        return {"loss": weighed(batch, generator)}

    @torch.no_grad()
    def evaluate(blocks: Sequence[int]) -> dict[str, float]:
        found = [
            float(weighed(run.files.batch([block], device=CPU), torch.Generator().manual_seed(block)))
            for block in blocks
        ]
        return {"loss": sum(found) / len(found)}

    train(drafter.own, objective, run=run, evaluate=evaluate)


def train_blocks(arguments: argparse.Namespace, kind: Kind) -> None:
    """Train a drafter on the target's states for so many seconds of a core, and write its folder."""
    changes = f"-{arguments.candidates}-{arguments.guess_loss:g}" if kind == "dflash2" else ""
    folder: Path = arguments.out / f"{kind}{changes}"
    if folder.exists():
        return
    with lender(open_model(arguments.model), device=CPU, dtype=torch.float32) as lent:
        drafter = train_timed(
            arguments,
            folder.name,
            lambda: new_drafter(lent, kind, candidates=arguments.candidates, seed=arguments.seed),
            lambda made, run: learn(made, lent, run, arguments.guess_loss),
            width=int(lent.config.hidden_size),
        )
        write_drafter(folder, drafter)
    forget(arguments, folder.name)


def write_drafter(folder: Path, drafter: Drafter) -> None:
    """Write a drafter's folder, under the published names."""
    write_draft(folder, drafter.config, {STORED.sub(_stored, name): tensor for name, tensor in drafter.own.items()})


def _stored(found: re.Match[str]) -> str:
    return {"markov.": "markov_head.", "selector.": "candidate_selector."}.get(found[0], "")
