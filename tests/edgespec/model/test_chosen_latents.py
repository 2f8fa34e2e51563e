"""Latent attention with an index: latents are expanded where some row chose them, and no others."""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from edgespec.model import chosen_latents
from edgespec.model.causal_model import CausalModel
from edgespec.model.chosen_latents import attend_latents
from edgespec.model.pass_cache import attended
from edgespec.model.pass_rows import PassRows, Span
from edgespec.model.text_cache import TextCache
from tests.conftest import make_model
from tests.edgespec.model import test_block_index as blocks
from tests.edgespec.model.reader import Reader
from tests.edgespec.model.refusal import check_refuses
from tests.edgespec.model.test_indexed import CHOSEN, FAMILIES, PROMPT, has_indexed

CPU = torch.device("cpu")
GLM5_NEXT = "glm-5-next"
MOST: dict[str, int] = dict.fromkeys(FAMILIES, CHOSEN)
if blocks.has_block_indexes():
    MOST[GLM5_NEXT] = blocks.CHOSEN * blocks.BLOCK + blocks.BLOCK - 1  # with the rest behind a row's whole blocks
HEADS, WIDTH = 4, 16

pytestmark = pytest.mark.skipif(not has_indexed(), reason="this transformers has no such layers in our form")


def reader_of(family: str, *, keeps_row_bits: bool = False) -> Reader:
    model = blocks.model_of(family) if family == GLM5_NEXT else make_model(FAMILIES[family]())
    return Reader(model, CausalModel(copy.deepcopy(model), device=CPU, keeps_row_bits=keeps_row_bits), 4)


def expanded_by(reader: Reader, read: Callable[[], object]) -> list[int]:
    """How many latents each layer expands."""
    counts: list[int] = []
    projections = [part for name, part in reader.causal.model.named_modules() if name.endswith("kv_b_proj")]
    hooks = [part.register_forward_pre_hook(lambda _, given: counts.append(given[0].shape[-2])) for part in projections]
    read()
    for hook in hooks:
        hook.remove()
    assert len(counts) == len(projections)
    return counts


@pytest.mark.parametrize("family", MOST)
def test_what_no_row_chose_is_not_expanded(family: str) -> None:
    """A row reads as many latents as it chooses, and a tree no more than each of its rows does."""
    reader = reader_of(family)
    reader.read_prompt(PROMPT)
    alone = expanded_by(reader, lambda: reader.look(0, nodes=1))
    assert 0 < min(alone) <= max(alone) <= MOST[family]
    num_nodes = 3
    counts = expanded_by(reader, lambda: reader.look(0, nodes=num_nodes))
    assert max(counts) <= num_nodes * MOST[family]
    assert max(counts) < len(reader.text) + num_nodes - 1


@pytest.mark.parametrize("family", MOST)
def test_a_context_that_is_seen_whole_is_expanded_whole(family: str) -> None:
    reader = reader_of(family)
    reader.read_prompt(3)
    assert set(expanded_by(reader, lambda: reader.look(0, nodes=1))) == {4}


@pytest.mark.parametrize("family", MOST)
def test_rows_that_are_read_one_by_one_have_the_logits_of_paths(family: str) -> None:
    reader = reader_of(family, keeps_row_bits=True)
    reader.read_prompt(PROMPT)
    for node in (5, 0, None):
        reader.look(node)


class _Latents:
    """A layer that only expands: each head has the latents times a number."""

    config = SimpleNamespace(index_topk=64)
    is_causal = True

    def __init__(self) -> None:
        self.latents = SimpleNamespace(attention=sdpa_attention_forward, keeps_row_bits=True)

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        factors = torch.arange(1, HEADS + 1, dtype=latents.dtype)[:, None, None]
        return torch.cat([latents * factors, rotated.expand(-1, HEADS, -1, -1)], 3), latents / factors


def test_a_trees_row_has_the_bits_that_it_has_alone() -> None:
    """With its siblings beside it, and without them; in float32, where the order of each sum shows."""
    context, num_rows, chosen = 700, 9, _Latents.config.index_topk
    generator = torch.Generator().manual_seed(1)
    random = functools.partial(torch.randn, generator=generator)
    query = random(1, HEADS, num_rows, 2 * WIDTH)
    latents, rotated = (random(1, 1, context + num_rows, WIDTH) for _ in range(2))
    indices = torch.stack([torch.randperm(context, generator=generator)[:chosen] for _ in range(num_rows)])
    indices[:, -1] = torch.arange(num_rows) + context  # itself
    least = torch.finfo(torch.float32).min
    mask = torch.zeros(num_rows, context + num_rows)
    mask[:, context:].fill_(least).fill_diagonal_(0)
    mask[:, :3] = least  # which some have chosen, for want of others

    def read(rows: list[int], places: Tensor, indices: Tensor) -> Tensor:
        part = PassRows(
            cache=TextCache(1), ids=torch.zeros(len(rows), dtype=torch.long), positions=torch.zeros(len(rows)),
            visible=torch.eye(len(rows), dtype=torch.bool),
        )  # fmt: skip
        of = (query[:, :, rows], latents[:, :, places], rotated[:, :, places], mask[rows][:, places][None, None])
        call = functools.partial(attend_latents, _Latents(), *of, indices=indices[None], scaling=0.2)
        return attended([Span(part, 0, len(rows))], call)[0]

    found = read(list(range(num_rows)), torch.arange(context + num_rows), indices)
    for row in range(num_rows):
        text = torch.cat([torch.arange(context), torch.tensor([context + row])])
        alone = read([row], text, indices[row : row + 1].clamp(max=context))
        assert torch.equal(found[:, row], alone[:, 0])


def test_a_closed_model_expands_by_itself_again() -> None:
    reader = reader_of("glm-5")
    modules: list[Any] = [*reader.causal._chosen_latents]
    assert all(part.config._attn_implementation == chosen_latents.NAME for part in modules)
    reader.causal.close()
    assert not any({"expand_kv", "latents"} & set(vars(part)) for part in modules)
    assert all(part.config is reader.causal.model.config for part in modules)


def _reads_the_first_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the places that rows chose were not the numbers of latents."""
    select = Tensor.index_select

    def shifted(whole: Tensor, dim: int, places: Any) -> Tensor:
        is_latents = whole.dim() == 4 and dim == 2 and whole.shape[1] == 1
        return select(whole, dim, places - places[0] if is_latents else places)

    monkeypatch.setattr(Tensor, "index_select", shifted)


def test_the_self_check_refuses_latents_that_no_row_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refuses(FAMILIES["deepseek-v3.2"], _reads_the_first_latents, monkeypatch)
