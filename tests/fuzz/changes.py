"""Random changes of valid files: of what their JSON says, or of their bytes.

A change of content puts a value of another kind, size or sign in the place of one, or removes, repeats, adds, renames
and exchanges parts; a change of bytes flips, cuts and inserts. All draws come from one generator, so that a seed says
which change it was.
"""

import copy
import json
import random
import struct
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

DEEP = "@deep@"  # stands for lists in lists, which json cannot write
DEPTHS = (50, 2_000, 200_000)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 255, 65_536, 1_000_000, 2**31, 2**63, -(2**63), 10**30, 10**400,
    0.5, 2.0, 50.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "5", "é", "\ud800", "\0", "\x1b[31m", "a" * 300, "a" * 5_000, "../../x", "/", ".", "auto", "llama",
    [], {}, [None], [1, 2, 3], ["a"], {"a": 1}, {"type": "x"}, [[[[]]]], DEEP,
)  # fmt: skip

Change = Callable[[bytes, random.Random], bytes]


def changed_json(content: bytes, chance: random.Random) -> bytes:
    """Return JSON with one to three changes of content."""
    return _dumped(changed_value(json.loads(content), chance), chance)


def changed_lines(content: bytes, chance: random.Random) -> bytes:
    """Return lines of JSON, one of them with changes of content."""
    lines = content.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = changed_json(lines[at], chance)
    return b"\n".join(lines) + b"\n"


def changed_toml(content: bytes, chance: random.Random) -> bytes:
    """Return TOML with changes of content, as far as TOML can say them."""
    try:
        text = tomli_w.dumps(changed_value(tomllib.loads(content.decode()), chance))
        deep = chance.choice(DEPTHS)
        return text.replace(f'"{DEEP}"', "[" * deep + "]" * deep).encode()
    except (TypeError, ValueError, AttributeError):
        return changed_bytes(content, chance)


def changed_header(content: bytes, chance: random.Random) -> bytes:
    """Return a safetensors file with changes of its header; a record that its metadata holds counts as a part."""
    header_bytes = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + header_bytes]), content[8 + header_bytes :]
    records = {
        name: json.loads(text) for name, text in header.get("__metadata__", {}).items() if text.startswith(("{", "["))
    }
    if records and chance.random() < 0.7:
        name = chance.choice(sorted(records))
        header["__metadata__"][name] = _dumped(changed_value(records[name], chance), chance).decode(errors="replace")
    else:
        header = changed_value(header, chance)
    written = _dumped(header, chance)
    length = len(written) if chance.random() < 0.95 else chance.choice((0, 1, len(written) + 1, 10**6, 2**63))
    return struct.pack("<Q", length) + written + data


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return content with one to four bytes flipped, pieces cut out, or others put in."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        size = min(chance.choice((1, 1, 2, 8, 100)), len(found) - at)
        match chance.randrange(5):
            case 0 if found and at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + size]
            case 2:
                del found[at:]
            case 3:
                found[at:at] = chance.choice(
                    (b"\0", b"\xff\xfe", b"{", b"]", b'"', b"\n", b",", b"-", b"9" * 400, b"e9")
                )
            case _:
                found[at:at] = found[at : at + size]
    return bytes(found)


def either(of_content: Change, *, share_of_bytes: float = 0.25) -> Change:
    """Return the change of content, or now and then of bytes."""
    return lambda content, chance: (changed_bytes if chance.random() < share_of_bytes else of_content)(content, chance)


def changed_value(value: Any, chance: random.Random) -> Any:
    """Return a copy with one to three changes."""
    found = [copy.deepcopy(value)]  # so that the whole has a place, too
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(*_run_config(found, chance), chance)
    return found[0] if found else None


def _run_config(root: list[Any], chance: random.Random) -> tuple[Any, Any]:
    """Return a container and the key of one of its parts."""
    container, key = root, 0
    while container:
        part = container[key]
        if not isinstance(part, dict | list) or not part or chance.random() < 0.08:
            break
        container, key = part, chance.choice(list(part)) if isinstance(part, dict) else chance.randrange(len(part))
    return container, key


def _change(container: Any, key: Any, chance: random.Random) -> None:
    if not container:
        return
    value = container[key]
    match chance.randrange(10):
        case 0:
            del container[key]
        case 1:
            container[key] = [value]
        case 2 if isinstance(value, int | float) and not isinstance(value, bool):
            container[key] = value * chance.choice((-1, 2, 3, 10, 1_000, 1_000_000)) + chance.choice((0, 0, 1))
        case 3 if isinstance(container, dict):
            container[chance.choice(("unknown", "", "id", "\ud800", "a" * 3_000))] = value
        case 4 if isinstance(container, list):
            container.insert(key, copy.deepcopy(value))
        case 5:
            other = chance.choice(list(container)) if isinstance(container, dict) else chance.randrange(len(container))
            container[key], container[other] = container[other], value
        case 6:
            container[key] = str(value)[:1_000]
        case _:
            container[key] = copy.deepcopy(chance.choice(VALUES))


def _dumped(value: Any, chance: random.Random) -> bytes:
    deep = chance.choice(DEPTHS)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    return text.replace(f'"{DEEP}"', "[" * deep + "]" * deep).encode("utf-8", "surrogatepass")
