"""A trial that the text of a pass computes what a family's layers do, on a narrow random copy.

Rows of a text, and of trees of two texts in one pass, are read both ways; windows of the copy are short.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.self_check import Trial, random_model_and_text, trial_of
from edgespec.model.text_cache import TextCache
from edgespec.tree.token_tree import ancestors_mask, depths
from offload.native.compiler import is_available

TOLERANCE = 1e-3  # of the largest hidden number; correct passes differ by about 1e-6 of it
FEW = 5  # rows of a loaded model
NEAR = {torch.float32: 2e-3, torch.bfloat16: 0.05}  # of norms of what a head's own weights make
# Of what all layers make: those of published models differ by 1e-3 and 0.04 at most, which rounding does
NEAR_THROUGH_ALL = {torch.float32: 0.02, torch.bfloat16: 0.2}
PROMPT, OTHER_PROMPT = 41, 14  # tokens
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4)


def is_read_natively(config: PretrainedConfig) -> bool:
    """Return whether few rows of a family may be read by one text, on a processor."""
    if not is_available():
        return False
    try:
        return _is_right(trial_of(config, device=torch.device("cpu")))
    except Exception:  # a family's code may raise anything; then it is read as before
        return False


@functools.lru_cache
@torch.no_grad()
def _is_right(trial: Trial) -> bool:
    model, tokens = random_model_and_text(trial)
    usual = CausalModel(copy.deepcopy(model), device=trial.device)
    native = CausalModel(model, device=trial.device)
    native.use_native_passes()
    if not native.is_native:
        return False
    expected, found = (_states(causal, tokens) for causal in (usual, native))
    errors = [float((one - other).abs().max() / one.abs().max()) for one, other in zip(expected, found, strict=True)]
    return all(error < TOLERANCE for error in errors)


@torch.no_grad()
def try_weights(causal: CausalModel, *, takes_features: bool) -> None:
    """Read some rows of a loaded model both ways, and natively no more where what comes out differs.

    Where a norm's weight counts from, and how a router scores, is found by what trained weights do: the family's narrow
    copy has other ones. A head's first layer takes features, and is no family's.
    """
    if not causal.is_native:
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, causal.num_embeddings, (FEW + len(PARENTS),), generator=generator)
    features = torch.randn(len(ids), int(causal.config.hidden_size), generator=generator).to(causal.model.dtype)
    own = features if takes_features else None
    found = _states_of_weights(causal, ids, own)
    causal.drop_native_passes()
    expected = _states_of_weights(causal, ids, own)
    near = (NEAR if takes_features else NEAR_THROUGH_ALL)[causal.model.dtype]
    if all(float((one - other).norm()) < near * float(one.norm()) for one, other in zip(expected, found, strict=True)):
        causal.use_native_passes()


def _states_of_weights(causal: CausalModel, ids: Tensor, features: Tensor | None) -> list[Tensor]:
    """Return the last hidden states of a text's rows, and for a head of a tree's behind them."""
    cache, (text, nodes) = causal.new_text(), ids.split([FEW, len(PARENTS)])
    read = causal.read([next_rows(cache, text, previous=None if features is None else features[:FEW])])
    if features is not None:
        cache.commit_next(text.tolist())
        tree = replace(_tree_rows(cache, nodes), previous=features[FEW:])
        read += causal.read([tree])
    return [rows.float() for rows in read]


def _states(causal: CausalModel, tokens: Tensor) -> list[Tensor]:
    """Return the last hidden states of a text's rows, and of trees behind two texts."""
    texts = tokens[:PROMPT], tokens.flip(0)[:OTHER_PROMPT]
    caches = [causal.new_text() for _ in texts]
    read = causal.read([next_rows(cache, text) for cache, text in zip(caches, texts, strict=True)])
    for cache, text in zip(caches, texts, strict=True):
        cache.commit_next(text.tolist())
    nodes = tokens[PROMPT : PROMPT + len(PARENTS)]
    return [*read, *causal.read([_tree_rows(cache, nodes) for cache in caches])]


def _tree_rows(cache: TextCache, nodes: Tensor) -> PassRows:
    parents = torch.tensor(PARENTS)
    positions = cache.length + depths(parents)
    return PassRows(cache=cache, ids=nodes, positions=positions, visible=ancestors_mask(parents))
