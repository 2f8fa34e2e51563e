"""Damages of a model folder: each is a function of the folder, and is told apart by its words."""

import json
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"
ADAPTER = '{"base_model_name_or_path": "acme/base-7b"}'


def shard_of(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def written(name: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def edited(name: str, **changes: object) -> Damage:
    """Other values in a file of JSON."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def removed(*patterns: str) -> Damage:
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def shard_written(number: int, change: Callable[[bytes], bytes]) -> Damage:
    """A shard of what is made of its bytes."""
    return lambda folder: (path := shard_of(folder, number)).write_bytes(change(path.read_bytes()))


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def stored_in(tensor: str, file: str) -> Damage:
    """An index that names another file for a tensor."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][tensor] = file
        path.write_text(json.dumps(index))

    return damage
