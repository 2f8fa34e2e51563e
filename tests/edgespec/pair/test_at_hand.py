"""The drafts of a target that lie on this machine: which are found, what they are, and why others are none."""

import errno
import io
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from edgespec.hub import other_programs
from edgespec.hub.names import MTP
from edgespec.hub.other_programs import llama_cpp_folder
from edgespec.pair import at_hand
from edgespec.pair.at_hand import LARGE, SAME, FoundDraft, drafts_at_hand
from edgespec.pair.folder import open_architecture, open_model
from edgespec.pair.pair import open_pair
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import Head, write_head
from tests.edgespec.draft.gemma_assistant import Assistant, write_assistant
from tests.edgespec.draft.gemma_assistant import write_as_gguf as write_assistant_file
from tests.edgespec.draft.gguf_drafts import write_as_gguf
from tests.edgespec.draft.test_mtp_gguf import LAYER, cut, is_of_layer
from tests.edgespec.hub.test_other_programs import pull
from tests.hub import Cache
from tests.offload.gguf.files import copy_gguf, gguf_bytes
from tests.offload.gguf.test_tiny_models import TINY
from tests.support.families import FAMILIES, SMALL, make_model, make_tokenizer, save_folder

BIG, LITTLE = TINY / "gemma3.gguf", TINY / "qwen2.gguf"  # of the same tokens


def found(target: Path, **options: Any) -> dict[str, FoundDraft]:
    """What lies there, by the ends of the names."""
    listed = drafts_at_hand(open_model(target), limit_s=60, **options)
    by_name = {Path(one.name).name: one for one in listed}
    assert len(by_name) == len(listed)
    return by_name


def fitting(target: Path, **options: Any) -> dict[str, str | None]:
    return {name: one.kind for name, one in found(target, **options).items() if one.fits}


def reason(one: FoundDraft) -> str:
    assert one.why_not is not None
    return one.why_not


@pytest.fixture
def file(cache: Cache, tmp_path: Path) -> Path:
    """A GGUF target in a folder of its own; this machine has no other model."""
    (tmp_path / "models").mkdir()
    return shutil.copy(BIG, tmp_path / "models" / "Big-8B-Q4_K_M.gguf")


@pytest.fixture
def folder(cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A target's folder beside nothing."""
    return shutil.copytree(pair_folders[0], tmp_path / "models" / "Big-8B")


def test_a_smaller_model_of_the_same_tokens_is_found_beside_a_file(file: Path) -> None:
    shutil.copy(LITTLE, file.with_name("Small-1B.GGUF"))
    one = found(file)["Small-1B.GGUF"]
    assert (one.kind, one.fits, one.is_beside, one.path) == ("model", True, True, file.with_name("Small-1B.GGUF"))
    assert open_pair(file, one.path).draft is not None
    assert 0 < one.num_bytes < file.stat().st_size


def test_every_kind_of_draft_is_found_beside_a_folder(folder: Path, pair_folders: tuple[Path, Path]) -> None:
    deep = LlamaConfig(**{**SMALL, "num_hidden_layers": 8}, num_key_value_heads=2)
    target = save_folder(folder.parent / "Deep", make_model(deep))
    shutil.rmtree(folder)
    write_head(folder.parent / "head", Head())
    write_drafter(folder.parent / "block", Drafter())
    write_drafter(folder.parent / "bias", Drafter(markov="vanilla"))
    write_drafter(folder.parent / "chosen", Drafter(selector=True))
    shutil.copytree(pair_folders[1], folder.parent / "small")
    kinds = {"head": "eagle3", "block": "dflash", "bias": "dspark", "chosen": "dflash2", "small": "model"}
    assert fitting(target) == kinds
    for one in found(target).values():
        assert open_pair(target, one.path).draft is not None


def test_drafts_of_another_target_say_what_they_are_of(folder: Path) -> None:
    write_head(folder.parent / "head", Head(target_width=48))
    write_drafter(folder.parent / "block", Drafter(vocab=300, draft_vocab=300))
    write_assistant(folder.parent / "assistant", Assistant())
    listed = found(folder)
    assert {name: one.kind for name, one in listed.items()} == {
        "head": "eagle3", "block": "dflash", "assistant": "assistant"
    }  # fmt: skip
    assert not any(one.fits for one in listed.values())
    assert "48" in reason(listed["head"])
    assert "300" in reason(listed["block"])
    assert "Gemma 4" in reason(listed["assistant"])


@pytest.mark.parametrize("name", ["mtp-gemma-4-it-Q8_0.gguf", "gemma-4-it-assistant-F32.gguf"])
def test_an_assistant_is_found_beside_a_gemma_4_whatever_its_name(name: str, cache: Cache, tmp_path: Path) -> None:
    target = save_folder(tmp_path / "models" / "gemma-4", make_model(FAMILIES["gemma4"]()))
    write_assistant_file(tmp_path / "models" / name, Assistant())
    write_assistant(tmp_path / "models" / "assistant", Assistant(target_width=48))
    assert fitting(target) == {name: "assistant"}
    assert open_pair(target, None).draft is None  # which is not taken before somebody names it


def test_the_targets_own_layer_comes_first(file: Path) -> None:
    first, *others = drafts_at_hand(open_model(Path(shutil.copy(TINY / "qwen35-mtp.gguf", file))))
    assert (first.name, first.path, first.kind, first.fits, others) == ("mtp", MTP, "mtp", True, [])


def test_a_layers_file_is_found_once_and_one_of_another_name_too(file: Path) -> None:
    """The first is taken by its name; the second, in capitals, has to be named."""
    cut("qwen35-mtp", file, keep=lambda name: not name.startswith(LAYER), nextn_predict_layers=None, block_count=2)
    side = cut("qwen35-mtp", file.with_name("mtp-Big-8B-Q8_0.gguf"), keep=is_of_layer)
    shutil.copy(side, file.with_name("MTP-big-8b-Q8_0.gguf"))
    cut("glm4moe-mtp", file.with_name("mtp-other.gguf"), keep=is_of_layer)
    assert fitting(file) == {"mtp-Big-8B-Q8_0.gguf": "mtp", "MTP-big-8b-Q8_0.gguf": "mtp"}
    first, *others = found(file).values()
    assert (first.path.name, first.is_default) == ("mtp-Big-8B-Q8_0.gguf", True)
    assert not any(one.is_default for one in others)
    assert "is of a target with model_type" in reason(found(file)["mtp-other.gguf"])
    assert open_pair(file, None).draft.folder == side


def test_the_target_in_another_format_and_what_is_as_large_are_none(file: Path) -> None:
    shutil.copy(TINY / "llama.gguf", file)
    shutil.copy(TINY / "llama-linear.gguf", file.with_name("Big-8B-Q8_0.gguf"))
    shutil.copy(BIG, file.with_name("Huge.gguf"))
    listed = found(file)
    assert {name: one.why_not for name, one in listed.items()} == {"Big-8B-Q8_0.gguf": SAME, "Huge.gguf": LARGE}
    assert listed["Huge.gguf"].kind is None  # its size told enough


def test_other_tokens_are_counted_at_a_glance_and_compared_where_they_are_as_many(
    folder: Path,
) -> None:
    small = LlamaConfig(**{**SMALL, "hidden_size": 16, "num_hidden_layers": 1}, num_key_value_heads=2)
    save_folder(folder.parent / "swapped", make_model(small), tokenizer=make_tokenizer(swapped=True))
    settings = {"general.architecture": "llama", "tokenizer.ggml.tokens": [f"<{index}>" for index in range(5000)]}
    (folder.parent / "many.gguf").write_bytes(gguf_bytes(settings, []))
    listed = found(folder)
    assert "differ from the target's in 2 of 257" in reason(listed["swapped"])
    assert reason(listed["many.gguf"]) == "it has other tokens: 5000 of them, and the target has 257"


def test_beside_settings_alone_no_model_fits_since_no_tokens_can_be_compared(cache: Cache, tmp_path: Path) -> None:
    FAMILIES["qwen3"]().save_pretrained(tmp_path / "models" / "Big-8B")
    shutil.copy(TINY / "qwen35.gguf", tmp_path / "models")  # it states a layer, so its tokens are not counted at once
    (one,) = drafts_at_hand(open_architecture(tmp_path / "models" / "Big-8B"), limit_s=60)
    assert "there is no tokenizer.json" in reason(one)


def test_beside_settings_alone_heads_in_folders_fit_since_they_have_no_tokens_to_compare(
    cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A head's file has its target's tokens, which nothing here vouches for."""
    models, deep = tmp_path / "models", {**SMALL, "num_hidden_layers": 8}
    LlamaConfig(**deep, num_key_value_heads=2).save_pretrained(models / "Big-8B")
    write_head(models / "head", Head())
    write_head(models / "narrow", Head(target_width=48))
    write_drafter(models / "block", Drafter())
    write_as_gguf(models / "head", models / "head.gguf")
    shutil.copytree(pair_folders[1], models / "small")
    listed = {Path(one.name).name: one for one in drafts_at_hand(open_architecture(models / "Big-8B"), limit_s=60)}
    assert {name for name, one in listed.items() if one.fits} == {"head", "block"}
    assert "48" in reason(listed["narrow"])
    assert all("there is no tokenizer.json" in reason(listed[name]) for name in ("head.gguf", "small"))


def test_broken_files_are_named_and_hide_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (LITTLE).read_bytes()
    file.with_name("cut.gguf").write_bytes(content[:-99])
    file.with_name("short.gguf").write_bytes(content[:20])
    file.with_name("empty.gguf").touch()
    file.with_name("mtp-Big-8B.gguf").write_bytes(b"GGUF" + bytes(30))
    (file.parent / "folder").mkdir()
    (file.parent / "folder" / "config.json").write_text("{not json")
    (file.parent / "headless").mkdir()
    (file.parent / "headless" / "config.json").write_text('{"speculators_model_type": "peagle"}')
    file.with_name("half-00001-of-00002.gguf").write_bytes(content)
    file.with_name("secret.gguf").write_bytes(content)
    file.with_name("small.gguf").write_bytes(content)
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **named: Any) -> io.IOBase:
        if self.name == "secret.gguf":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    listed = found(file)
    assert {name for name, one in listed.items() if one.fits} == {"small.gguf"}
    for name, part in {
        "cut.gguf": "is truncated", "short.gguf": "is not a valid GGUF file", "empty.gguf": "is not a valid GGUF file",
        "mtp-Big-8B.gguf": "is not a valid GGUF file", "folder": "is not readable JSON", "headless": "P-EAGLE",
        "half-00001-of-00002.gguf": "1 of 2 parts", "secret.gguf": "Permission denied",
    }.items():  # fmt: skip
        assert part in reason(listed[name]), name
    assert open_pair(file, None).draft is None


def test_a_model_in_parts_is_one(file: Path) -> None:
    for number in (1, 2):
        copy_gguf(
            LITTLE,
            file.with_name(f"Small-0000{number}-of-00002.gguf"),
            settings={"split.no": number - 1, "split.count": 2},
            change=lambda tensor, content, number=number: (
                (tensor.name, content) if tensor.name.startswith("blk.") == (number == 2) else None
            ),
        )
    assert fitting(file) == {"Small-00001-of-00002.gguf": "model"}
    assert fitting(file.with_name("Small-00002-of-00002.gguf")) == {}


def test_stores_are_looked_at_by_the_names_that_people_give(
    file: Path, cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The cache's snapshots are links to blobs; Ollama's blobs have no names."""
    cache.put("acme/Small-Folder", pair_folders[1])
    snapshot = cache.put("Acme/Small-GGUF", tmp_path / "models")
    for path in snapshot.iterdir():
        path.unlink()
    blob = snapshot.parent.parent / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    shutil.copy(LITTLE, blob)
    (snapshot / "Small-1B-Q8_0.gguf").symlink_to(blob)
    home = other_programs.home_folder()
    assert home is not None
    studio = home / ".lmstudio/models/Acme/Small"
    studio.mkdir(parents=True)
    shutil.copy(LITTLE, studio / "small.gguf")
    pull(home / ".ollama/models", "registry.ollama.ai/library/small/1b")
    (cached := llama_cpp_folder()) and cached.mkdir(parents=True)
    assert cached is not None
    shutil.copy(LITTLE, cached / "small.gguf")
    listed = {one.name: one for one in drafts_at_hand(open_model(file), limit_s=60)}
    fitting = {"Acme/Small-GGUF:Q8_0", str(studio / "small.gguf"), str(cached / "small.gguf")}
    assert {name for name, one in listed.items() if one.fits} == fitting
    others = ("acme/Small-Folder", "ollama:small:1b")
    assert set(listed) == fitting.union(others)
    assert all("token ids differ" in reason(listed[name]) for name in others)
    assert not any(one.is_beside for one in listed.values())


def test_beside_a_snapshot_and_a_blob_lie_only_revisions_and_other_models(
    cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target = cache.put("acme/Big", pair_folders[0])
    shutil.copytree(pair_folders[1], target.with_name("b" * 40))
    assert found(target) == {}


def test_two_of_a_kind_are_both_found_and_a_link_is_no_second(file: Path, pair_folders: tuple[Path, Path]) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(LITTLE, file.with_name(name))
    file.with_name("link.gguf").symlink_to(file.with_name("a.gguf"))
    assert fitting(file) == {"a.gguf": "model", "b.gguf": "model"}


def test_hundreds_of_files_are_looked_at_within_the_time_and_the_rest_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large vocabulary the number is read, and not one of its tokens."""
    settings = {"general.architecture": "llama", "tokenizer.ggml.tokens": [f"<{index}>" for index in range(20_000)]}
    content = gguf_bytes(settings, [])
    for number in range(500):
        file.with_name(f"other-{number:03}.gguf").write_bytes(content)
    shutil.copy(LITTLE, file.with_name("small.gguf"))
    with file.open("ab") as grown:
        grown.write(bytes(4 * len(content)))
    target = open_model(file)
    whole: list[Path] = []
    read_kind = at_hand.read_kind
    monkeypatch.setattr(at_hand, "read_kind", lambda path: (whole.append(path), read_kind(path))[1])
    begin = time.perf_counter()
    listed = drafts_at_hand(target, limit_s=60)
    assert time.perf_counter() - begin < 10
    assert (len(listed), sum(one.fits for one in listed)) == (501, 1)
    assert [path.name for path in whole] == ["small.gguf"]
    rushed = drafts_at_hand(target, limit_s=-1)
    assert {one.why_not for one in rushed} == {"it was not looked at within -1 s"}
    assert at_hand.LOOKING_S <= 2


def test_no_weight_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(LITTLE, file.with_name("small.gguf"))
    monkeypatch.setattr(torch, "frombuffer", lambda *_, **__: pytest.fail("numbers were read"))
    assert fitting(file) == {"small.gguf": "model"}
