"""Models without trees: texts that share each layer, each with the cache of its family's own.

The reference is transformers' own generate, for each text alone.
"""

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from edgespec import EdgespecError
from edgespec.model.own_pass_model import OwnPassModel
from edgespec.model.own_pass_text import OwnPassText
from edgespec.model.pass_rows import next_rows
from edgespec.model.tree_support import support_of
from offload.text_part import model_from_config

CPU = torch.device("cpu")
VOCAB, NEW_TOKENS = 64, 6
PROMPTS = [torch.arange(1, 12), torch.arange(30, 37), torch.tensor([5])]
LOCAL = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "hidden_size_global": 32}
TINY: dict[str, dict[str, object]] = {
    "blt": {  # a model for patches between two for bytes; at this threshold patches have one byte to some
        "patcher_config": {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "encoder_config": {**LOCAL, "num_hidden_layers": 1}, "decoder_config": {**LOCAL, "num_hidden_layers": 2},
        "global_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        },
        "encoder_hash_byte_group_vocab": 50, "local_attention_window_len": 8, "patching_threshold": 2.0,
    },
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 8, "rescale_every": 3},  # whose weights transformers halves
    "recurrent_gemma": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "lru_width": 32, "attention_window_size": 8,
    },
    "hrm_text": {  # two stacks of two layers, which are passed six times in all
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "H_cycles": 2, "L_cycles": 2,
    },
}  # fmt: skip


def tiny(family: str) -> PretrainedConfig:
    return CONFIG_MAPPING[family](vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **TINY[family])


def random_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = model_from_config(tiny(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture(params=TINY)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> Iterator[OwnPassModel]:
    plain = OwnPassModel(random_model(family), device=CPU, reads_on=False)
    yield plain
    plain.close()


def generated(family: str, prompt: Tensor) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    options |= {"use_cache": family != "blt"}  # whose cache lacks what patches are made of
    ids = random_model(family).generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **options)
    return list(ids[0, len(prompt) :].tolist())


def step(model: OwnPassModel, texts: list[OwnPassText], rows: list[Tensor]) -> list[Tensor]:
    """Read rows of texts in one pass, and return the greedy token [1] after each."""
    found = model.read([next_rows(text, ids) for text, ids in zip(texts, rows, strict=True)])
    for text, ids in zip(texts, rows, strict=True):
        text.commit_next(ids.tolist())
    return [logits.argmax(-1) for logits in found]


def grown(
    model: OwnPassModel, texts: list[OwnPassText], rows: list[Tensor], count: int = NEW_TOKENS
) -> list[list[int]]:
    """Return the next greedy tokens of texts that share their passes."""
    tokens: list[list[int]] = [[] for _ in texts]
    for _ in range(count):
        rows = step(model, texts, rows)
        for new, row in zip(tokens, rows, strict=True):
            new += row.tolist()
    return tokens


def test_texts_in_company_are_those_of_generate(model: OwnPassModel, family: str) -> None:
    """Three texts of unequal length share each pass, in families of all kinds."""
    num_threads = threading.active_count()
    texts = [model.new_text() for _ in PROMPTS]
    assert grown(model, texts, PROMPTS) == [generated(family, prompt) for prompt in PROMPTS]
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("at", [0.0, 0.5])
def test_a_pass_that_is_cut_leaves_no_text_half_advanced(model: OwnPassModel, family: str, at: float) -> None:
    """What its watch raises ends all texts' forwards and threads; read anew, the texts are those of generate."""
    num_threads = threading.active_count()
    texts = [model.new_text() for _ in PROMPTS]
    rows = step(model, texts, PROMPTS)

    def cut(share: float) -> None:
        if share >= at:
            raise KeyboardInterrupt

    model.watch = cut
    with pytest.raises(KeyboardInterrupt):
        step(model, texts, rows)
    model.watch = None
    assert threading.active_count() == num_threads
    anew = []
    for text, prompt, row in zip(texts, PROMPTS, rows, strict=True):
        num_kept = text.keep_prefix(prompt.tolist())
        anew.append(torch.cat([prompt, row])[num_kept:])
    assert grown(model, texts, anew, NEW_TOKENS - 1) == [generated(family, prompt)[1:] for prompt in PROMPTS]


def test_no_more_than_all_of_a_pass_is_said_to_be_done(model: OwnPassModel) -> None:
    """Also where layers are passed several times, for one text and for several."""
    heard: list[float] = []
    model.watch = heard.append
    for prompts in (PROMPTS[:1], PROMPTS):
        step(model, [model.new_text() for _ in prompts], prompts)
    assert heard[0] == 0
    assert 0.5 <= max(heard) <= 1


def test_an_error_in_one_text_ends_the_pass(model: OwnPassModel) -> None:
    """A token that the model lacks raises in its own text's thread; the error comes out, and no thread is left."""
    num_threads = threading.active_count()
    texts = [model.new_text(), model.new_text()]
    with pytest.raises(IndexError):
        step(model, texts, [PROMPTS[0], torch.tensor([VOCAB + 1])])
    assert threading.active_count() == num_threads


def test_a_text_goes_on_from_its_beginning(model: OwnPassModel, family: str) -> None:
    """A text is cut back where its cache can be, and else read anew; a copy goes on by itself."""
    text = model.new_text()
    ((first, *_),) = grown(model, [text], [PROMPTS[0]])
    copied = text.copy(len(text.ids))
    num_kept = text.keep_prefix(PROMPTS[0].tolist()[:-1])
    assert num_kept == (len(PROMPTS[0]) - 1 if family in ("bloom", "hrm_text") else 0)
    ((again, *_),) = grown(model, [text], [PROMPTS[0][num_kept:]])
    assert again == first
    assert copied.length == len(PROMPTS[0]) + NEW_TOKENS - 1
    assert (copied.num_bytes > 0) == (family != "blt")


def test_rows_that_follow_others_are_read_with_them(model: OwnPassModel, family: str) -> None:
    """Where no several rows may follow others in a family's cache, the whole text is read in one piece."""
    text = model.new_text()
    step(model, [text], [PROMPTS[0][:4]])
    assert grown(model, [text], [PROMPTS[0][4:]]) == [generated(family, PROMPTS[0])]


def test_the_support_is_found_by_a_trial(family: str) -> None:
    """The sentence names the reason; whether rows may follow others, and be removed, is found for each family."""
    support = support_of(tiny(family), device=CPU)
    assert support.has_own_passes
    assert support.reads_on == (family != "recurrent_gemma")
    takes_chains = family in ("bloom", "hrm_text")
    how = "by chains, trees without branches" if takes_chains else "plainly, one token a pass"
    assert support.in_words.startswith(f"decoded {how}, because it ")
    with pytest.raises(EdgespecError) as caught:
        support.check_takes(family, is_language_model=not takes_chains)
    assert caught.value.code == "E_PLAIN"


def test_a_family_that_fails_the_trial_of_trees_has_its_own_passes() -> None:
    """Bart as a decoder counts places: no field of its configuration shows it."""
    sizes = dict.fromkeys(("d_model", "decoder_ffn_dim", "encoder_ffn_dim"), 32)
    layers = {"decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4}
    support = support_of(CONFIG_MAPPING["bart"](vocab_size=VOCAB, **sizes, **layers), device=CPU)
    assert support.why == "takes no positions, and counts a row's place in the cache instead"
    assert support.has_own_passes
    assert not support_of(copy.deepcopy(CONFIG_MAPPING["llama"](**LLAMA)), device=CPU).has_own_passes


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
