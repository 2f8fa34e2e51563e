"""Each setting that a family's rules take counts: with another value logits change, or the file is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from offload.gguf.families import FAMILIES
from offload.gguf.values import BOOLEANS, FRACTIONS, ZERO_IS_NONE
from tests.support.gguf_settings import (
    KINDS,
    asked,
    cases,
    other_values,
    outcome,
    stated,
    wrong_values,
    zero_stands_for,
)

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="which settings count is its code's, which has changed"
)
every_family = pytest.mark.parametrize("family", FAMILIES)
ORIGINAL, INTERVAL = "rope.scaling.original_context_length", "full_attention_interval"
ALL_EXPERTS = ("qwen2moe", "qwen3moe", "qwen3next", "qwen35moe")
UNROTATED = ("mamba2", "nemotron_h", "nemotron_h_moe")
# What may have any value, and why.
SAYS_NOTHING: dict[tuple[str, str], str] = {
    **{(name, "context_length"): "bounds texts" for name in FAMILIES},
    **{
        (name, ORIGINAL): "is where yarn and factors of each frequency begin, which the family has not"
        for name, family in FAMILIES.items()
        if not {"yarn", "longrope"} & {*family.scalings}
    },
    **{(name, "feed_forward_length"): "is of layers without experts" for name in ALL_EXPERTS},
    **{(name, INTERVAL): "counts where the layers are not listed" for name in ("qwen3next", "qwen35", "qwen35moe")},
    **{
        (name, "rope.dimension_sections"): "is of images: a text's positions are one"
        for name in ("qwen35", "qwen35moe")
    },
    **{(name, "rope.freq_base"): "is of a rotation, and no layer rotates" for name in UNROTATED},
    **{(name, "rope.dimension_count"): "is of a rotation, and no layer rotates" for name in UNROTATED[1:]},
    **{(name, "nextn_predict_layers"): "a model without them says so when it is opened" for name in UNROTATED[1:]},
    ("mistral3", "rope.scale_linear"): "counts where the new name is not stated, as yarn needs it",
    ("nemotron_h_moe", "expert_shared_count"): "the size of all of them is expert_shared_feed_forward_length",
    ("ernie4_5-moe", "expert_shared_feed_forward_length"): "converters write another number than the tensors' rows",
}
NEUTRAL = {"rope.scaling.type": ("none", "linear")}  # which say the same where no factor is stated


@every_family
def test_every_setting_that_rules_take_has_a_type(family: str) -> None:
    assert set() < keys_of(family) <= KINDS


def keys_of(family: str) -> set[str]:
    """All settings that its rules take."""
    return {key for case in cases()[family] for key in asked(case)}


@every_family
def test_a_setting_counts_or_refuses_the_file(family: str, tmp_path: Path) -> None:
    for key in sorted(keys_of(family)):
        counts, silent = False, list[tuple[str, str, Any]]()
        for case in [case for case in cases()[family] if key in asked(case)]:
            found, same = stated(case).get(key), []
            for value in [None, *other_values(key, found, stated(case)["block_count"])]:
                kind, said = outcome(case, key, value, tmp_path)
                assert kind != "bare", (case, key, value, said)
                same += [value] if kind == "same" and value not in (None, *NEUTRAL.get(key, ())) else []
                counts = counts or (value is not None and kind in {"changed", "contradicted"})
                if counts and key not in BOOLEANS:  # and the script goes on
                    break
            assert key not in BOOLEANS or len(same) < 2, (case, key)  # it is read there, and neither value counts
            silent += [(*case, value) for value in same if found is not None or len(same) > 1]
            if counts and key not in BOOLEANS:
                break
        assert counts or not silent or (family, key) in SAYS_NOTHING, (key, silent)
        assert not counts or (family, key) not in SAYS_NOTHING, key


@every_family
def test_a_value_that_is_none_refuses_the_file_by_name(family: str, tmp_path: Path) -> None:
    for key in sorted(keys_of(family)):
        case = next(case for case in cases()[family] if key in asked(case))
        for value in wrong_values(key):
            kind, said = outcome(case, key, value, tmp_path)
            assert kind == "refused", (case, key, value, said)
        for value in (0, 0.0):
            kind, said = outcome(case, key, value, tmp_path)
            is_none = stated(case).get(key, 0) == 0 and (key not in FRACTIONS or key in ZERO_IS_NONE)
            says_nothing = is_none or (family, key) in SAYS_NOTHING
            assert kind != "bare", (case, key, value, said)
            says_nothing |= key in stated(case) and zero_stands_for(case, key, tmp_path)
            assert kind != "same" or says_nothing, (case, key, value)
