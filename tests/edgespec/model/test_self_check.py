"""The load-time self-check: right readings pass, and every way of reading trees wrongly is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.machine.torch_threads import torch_threads
from edgespec.model import attention, causal_model, layer_major, self_check
from edgespec.model.mechanisms import by_depth
from edgespec.model.mechanisms.keys_values import LayerCache
from edgespec.model.mechanisms.recurrent import causal_mask
from edgespec.model.mechanisms.short_convolution import Convolution
from edgespec.model.mechanisms.state_cache import StateCache, StateRows
from edgespec.model.mechanisms.windows import WHOLE, AttentionWindow, QueryGrowth
from edgespec.model.narrow_copy import narrow_copy, random_model
from edgespec.model.pass_rows import SeenKeys, Span
from edgespec.model.self_check import OTHER_TOKENS, TEXT_TOKENS, _failure, check_tree_reading
from offload.skeleton import build_on_meta
from tests.edgespec.placement.test_place import small_deepseek
from tests.support.families import EAGER_ONLY, FAMILIES, GROUPED, RECURRENT
from tests.support.tiny_configs import tiny_config

CPU = torch.device("cpu")
# Families that count cache slots, and how it shows: wrong logits, or code that cannot take our masks
BLIND: dict[str, tuple[PretrainedConfig, str]] = {
    "bloom": (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4), "could not be shown"),
    "falcon-alibi": (
        transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
        "could not be shown",
    ),
    "gpt-neo": (
        transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4
        ),
        "are off by",
    ),
    "mpt": (transformers.MptConfig(d_model=32, n_layers=2, n_heads=4), "do not take the mask"),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _failure.cache_clear()


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_families_that_read_trees_rightly_pass(family: str) -> None:
    config = {**FAMILIES, **RECURRENT}[family]()
    config._attn_implementation = "eager" if family in EAGER_ONLY else "sdpa"
    check_tree_reading(config, device=CPU)


def test_a_text_part_whose_code_has_fewer_attentions_than_its_towers_keeps_its_own() -> None:
    """As gpt-oss below InternVL: the whole has sdpa, which transformers has not written for the part."""
    config = tiny_config("internvl")
    config.text_config = tiny_config("gpt_oss")
    config = build_on_meta(config, "a model", dtype=torch.float32).config
    assert (config._attn_implementation, config.text_config._attn_implementation) == ("sdpa", "eager")
    check_tree_reading(config, device=CPU)


def test_folders_of_one_family_share_a_trial() -> None:
    for folder in ("/one", "/two"):
        config = FAMILIES["llama"]()
        config.name_or_path = folder
        check_tree_reading(config, device=CPU)
    assert _failure.cache_info().misses == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_latent_attention_is_read_rightly_too(attention: str) -> None:
    """Its cache has latents, of which each layer makes keys of all rows anew."""
    config = small_deepseek()
    config._attn_implementation = attention
    check_tree_reading(config, device=CPU)


@pytest.mark.parametrize("family", BLIND)
def test_families_that_do_not_are_refused_by_name(family: str) -> None:
    config, reason = BLIND[family]
    with pytest.raises(EdgespecError, match=reason) as caught:
        check_tree_reading(config, device=CPU)
    assert caught.value.code == "E_SELF_CHECK"
    assert config.model_type in caught.value.what


def no_window(self: Span, seen: SeenKeys, _reach: AttentionWindow, blocks: Tensor | None) -> Tensor:
    return visible_of(self, seen, WHOLE, blocks)


def as_if_it_were_text(self: Span, seen: SeenKeys, _window: AttentionWindow, _blocks: Tensor | None) -> Tensor:
    return causal_mask(self.count, seen.end, device=CPU)[:, seen.first :]


def forgotten_rows(self: LayerCache, committed: int, rows: Tensor, **_: int) -> None:
    self.length = committed + rows.shape[0]


def rows_of_another_path(self: StateCache, committed: int, rows: Tensor, **_: int) -> None:
    keep(self, committed, torch.arange(committed, committed + len(rows)))


def siblings_inputs(self: Convolution, first: int, held: StateRows, visible: Tensor) -> Any:
    return beside(self, first, held, causal_mask(*visible.shape, device=CPU))


def states_of_the_first_node(visible: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(rows, torch.zeros_like(parents)) for rows, parents in levels(visible)]


def rows_of_the_first_text(spans: Sequence[Span], call: Callable[[], Any]) -> Any:
    return attended([Span(spans[0].rows, span.first, span.end) for span in spans], call)


def borders_off_by_one(self: AttentionWindow, rows: Tensor, keys: Tensor) -> Tensor:
    return sees(self, rows + 1, keys + 1) if self.in_chunks else sees(self, rows, keys)


def of_the_layer_before(config: PretrainedConfig) -> list[Any]:
    return [*windows(config)[-1:], *windows(config)[:-1]]


def rows_of_later_chunks_too(self: LayerCache, _count: int) -> tuple[Tensor, Tensor]:
    return rows_of(self, self.length)


def by_slots(self: QueryGrowth, positions: Tensor) -> Tensor:
    return growth(self, torch.arange(positions.shape[0]))


visible_of, attended = Span._visible, layer_major.attended
sees, growth, windows, rows_of = AttentionWindow.sees, QueryGrowth.of, attention.layer_reaches, LayerCache.rows
beside, keep, levels = Convolution.beside, StateCache.keep, by_depth._levels


@pytest.mark.parametrize(
    ("family", "place", "name", "wrong"),
    [
        ("gemma3", Span, "_visible", no_window),
        ("mistral-window", Span, "_visible", no_window),
        ("llama", Span, "_visible", as_if_it_were_text),
        ("llama", LayerCache, "keep", forgotten_rows),
        ("llama", layer_major, "attended", rows_of_the_first_text),
        ("llama4", AttentionWindow, "sees", borders_off_by_one),
        ("llama4", causal_model, "layer_reaches", of_the_layer_before),
        ("llama4", QueryGrowth, "of", by_slots),
        ("gemma4-shared", LayerCache, "rows", rows_of_later_chunks_too),
        ("qwen3-next", StateCache, "keep", rows_of_another_path),
        ("mamba2", StateCache, "keep", rows_of_another_path),
        ("lfm2", Convolution, "beside", siblings_inputs),
        ("jamba", by_depth, "_levels", states_of_the_first_node),
        ("kimi-linear", StateCache, "keep", rows_of_another_path),
    ],
    ids=[
        *("window-by-kind", "window", "siblings", "rollback", "another-text", "chunk", "layer", "growth", "shared"),
        *("rollback-delta", "rollback-mamba2", "siblings-convolution", "wrong-parent", "rollback-levels"),
    ],
)
def test_a_wrong_reading_of_our_own_would_be_noticed(
    family: str, place: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = {**FAMILIES, **RECURRENT}
    if family not in families:
        pytest.skip("this transformers does not have it")
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(EdgespecError, match=r"are off by|The size of tensor"):
        check_tree_reading(families[family](), device=CPU)


def test_the_copy_is_narrow_and_keeps_one_layer_of_each_kind() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8
    )
    small = narrow_copy(config)
    assert (small.num_hidden_layers, small.hidden_size, small.head_dim) == (2, 512, 128)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    assert narrow_copy(FAMILIES["gemma3"]()).layer_types == ["sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 80
    recurrent = narrow_copy(transformers.Qwen3NextConfig(num_hidden_layers=8))
    assert recurrent.layer_types == ["linear_attention", "full_attention"]
    assert (recurrent.linear_num_key_heads, recurrent.linear_num_value_heads) == (2, 4)
    mamba = narrow_copy(transformers.BambaConfig())
    assert mamba.mamba_n_heads * mamba.mamba_d_head == mamba.mamba_expand * mamba.hidden_size


def test_the_copy_has_each_kind_of_layer_and_reaches_what_the_family_limits() -> None:
    routed = transformers.Glm4MoeConfig(num_hidden_layers=8, first_k_dense_replace=3, n_group=5, topk_group=4)
    model: Any = random_model(narrow_copy(routed), CPU)
    assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == [False, True]
    router = model.model.layers[1].mlp.gate
    assert (router.num_group, router.topk_group) == (2, 1)
    assert router.e_score_correction_bias.unique().numel() > 1
    assert model.model.norm.weight.unique().numel() > 1
    dense = {"num_hidden_layers": 6, "mlp_only_layers": [0, 1], "decoder_sparse_step": 3}
    sparse: Any = random_model(narrow_copy(transformers.Qwen3MoeConfig(**dense)), CPU)
    assert [hasattr(layer.mlp, "experts") for layer in sparse.model.layers] == [False, True]
    late = transformers.Ernie4_5_MoeConfig(num_hidden_layers=8, moe_layer_start_index=3, moe_layer_interval=3)
    routed_late: Any = random_model(narrow_copy(late), CPU)
    assert [hasattr(layer.mlp, "experts") for layer in routed_late.model.layers] == [False, True]
    periods = {"expert_layer_period": 4, "expert_layer_offset": 3}
    hybrid: Any = random_model(narrow_copy(transformers.JambaConfig(**periods)), CPU)
    assert [hasattr(layer, "self_attn") for layer in hybrid.model.layers] == [False, True]
    assert [hasattr(layer.feed_forward, "experts") for layer in hybrid.model.layers] == [False, True]
    assert narrow_copy(transformers.SmolLM3Config(num_hidden_layers=8)).no_rope_layers == [1, 0]
    many = transformers.LlamaConfig(num_hidden_layers=8, own_numbers=[5, 5, 5, 0, 1, 2, 3, 4])
    assert narrow_copy(many).own_numbers == [5, 0]
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096}
    narrow = narrow_copy(transformers.LlamaConfig(rope_parameters=scaled))
    assert OTHER_TOKENS < narrow.rope_parameters["original_max_position_embeddings"] < TEXT_TOKENS
    assert scaled["original_max_position_embeddings"] == 4096


def test_numbers_that_a_mask_carries_are_noticed() -> None:
    """Doge's begin as the same one for all keys, which changes nothing."""
    with pytest.raises(EdgespecError, match="are off by"):
        check_tree_reading(transformers.DogeConfig(**GROUPED, head_dim=8), device=CPU)


@pytest.mark.parametrize("width", [2048, 4096])
def test_all_stacks_of_a_copy_are_narrow_and_fit_each_other(width: int) -> None:
    """Those of BLT, whose published sizes join the stacks with and without a projection between them."""
    wide = transformers.BltConfig(global_config={"hidden_size": width, "num_attention_heads": width // 128})
    small: Any = narrow_copy(wide)
    parts = (small.patcher_config, small.encoder_config, small.global_config, small.decoder_config)
    assert [part.num_hidden_layers for part in parts] == [2, 1, 2, 2]
    assert all(part.hidden_size <= 512 for part in parts)
    assert (small.global_config.encoder_cross_output_size is None) == (width == 2048)
    model = random_model(small, CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) < 8e6
    assert model(torch.arange(20)[None], use_cache=False).logits.isfinite().all()
    assert wide.encoder_config.hidden_size == 1024


def test_the_check_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    check_tree_reading(transformers.LlamaConfig(**GROUPED), device=CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_a_trial_takes_one_thread_and_leaves_torch_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, difference = list[int](), self_check._difference

    def counted(*given: Any) -> str | None:
        seen.append(torch.get_num_threads())
        return difference(*given)

    monkeypatch.setattr(self_check, "_difference", counted)
    with torch_threads(2):
        check_tree_reading(FAMILIES["llama"](), device=CPU)
        assert (seen, torch.get_num_threads()) == ([1], 2)


def test_parameters_that_a_family_leaves_out_when_it_begins_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apertus' activations are: memory as it was found would now and then refuse the family."""
    empty_like = torch.empty_like

    def as_found(*arguments: Any, **named: Any) -> Tensor:
        return empty_like(*arguments, **named).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty_like", as_found)
    model = random_model(narrow_copy(tiny_config("apertus")), torch.device("cpu"))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
