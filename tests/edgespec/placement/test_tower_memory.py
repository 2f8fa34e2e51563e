"""What a plan counts for pictures, of families that state their towers in ways of their own."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import AutoModelForImageTextToText

from edgespec import Engine
from edgespec.model.narrow_copy import narrow_copy
from tests.support.families import VOCAB, save_folder


def test_a_family_whose_config_has_no_part_for_the_tower_is_planned(tmp_path: Path) -> None:
    """Fuyu has one layer for pictures, whose sizes stand beside those of the decoder."""
    config = narrow_copy(transformers.FuyuConfig(pad_token_id=0))
    config.vocab_size = config.text_config.vocab_size = VOCAB
    model = AutoModelForImageTextToText.from_config(config)
    with Engine.from_pretrained(save_folder(tmp_path / "fuyu", model), draft=None, context_tokens=64) as engine:
        assert engine.generate(list(range(3, 9)), max_new_tokens=2, temperature=0.0).token_ids
