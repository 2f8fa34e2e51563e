"""Messages with pictures through a family's own files and a whole engine: texts are those of generate."""

from pathlib import Path

import pytest

from edgespec import Engine
from tests.support.seeing_model import CAT, DOG, MADE, seeing_model
from tests.support.tiny_pictures import SEEING
from tests.support.tiny_processors import FAMILIES


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM's, of torch's tensors
@pytest.mark.parametrize("kind", sorted(SEEING.keys() & FAMILIES.keys()))
def test_messages_with_pictures_are_read_as_the_family_s_processor_reads_them(kind: str, tmp_path: Path) -> None:
    seeing, place = seeing_model(tmp_path / "model", kind), FAMILIES[kind].place
    content = [{"type": "image", "image": CAT}, {"type": "text", "text": "and "}, {"type": "image", "image": DOG}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Two."},
                {"role": "user", "content": [{"type": "text", "text": "What?"}]}]  # fmt: skip
    text = f"[user]{place}and {place}\n[assistant]Two.\n[user]What?\n[assistant]"
    with Engine.from_pretrained(
        seeing.folder, device="cpu", dtype="float32", context_tokens=512, self_check=False
    ) as engine:
        found = engine.generate(messages, max_new_tokens=MADE, temperature=0)
    assert found.text == seeing.said(text, CAT, DOG)
    assert found.usage.image_tokens > 8
