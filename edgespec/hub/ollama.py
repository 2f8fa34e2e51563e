"""Models of Ollama by their names: a manifest says which blob is the model's GGUF file. Nothing is written there.

A manifest is MODELS/manifests/HOST/OWNER/NAME/TAG, and its layers are MODELS/blobs/sha256-DIGEST. Of the layers only
the model's is read: templates, parameters, projectors and drafts are Ollama's own business. An adapter would make other
texts, so a model with one is refused, with the names of both files.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.hub.other_programs import ollama_folders
from edgespec.validation import parse_json

PREFIX = "ollama:"
HOST, OWNER, TAG = "registry.ollama.ai", "library", "latest"
MODEL, ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
PART = r"[A-Za-z0-9_][\w.-]*"
NAME = re.compile(rf"(?:(?:({PART}(?::\d+)?)/)?({PART})/)?({PART})(?::({PART}))?", re.ASCII)
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
MAX_MANIFEST_BYTES = 1 << 20


def resolve_ollama(name: str) -> Path:
    """Return the GGUF file of `ollama:[[HOST/]OWNER/]NAME[:TAG]`; raises EdgespecError where there is none."""
    found = NAME.fullmatch(name.removeprefix(PREFIX))
    if found is None:
        what = f"'{name}' is no name of Ollama's."
        raise EdgespecError("E_MODEL_NOT_FOUND", what, "Name a model as Ollama does: ollama:qwen3:0.6b.")
    host, owner, model, tag = found.groups()
    below = Path(host or HOST, owner or OWNER, model, tag or TAG)
    folders = list(ollama_folders())
    for folder in folders:
        manifest = folder / "manifests" / below
        if _is_file(manifest):
            return blob_of(name, folder, manifest)
    known = [each for each, *_ in ollama_models()]
    near = [each for each in known if each.startswith(f"{PREFIX}{model}:") or each.endswith(f"/{model}:{tag or TAG}")]
    here = f"; there are {', '.join((near or known)[:8])}" if known else ""
    what = f"'{name}' is not among Ollama's models in {', '.join(map(str, folders))}{here}."
    raise EdgespecError("E_MODEL_NOT_FOUND", what, f"ollama pull {name.removeprefix(PREFIX)}, or another name.")


def ollama_models() -> Iterator[tuple[str, Path, Path]]:
    """Yield the models that are here: the name that `target` takes, the folder of models and the manifest."""
    for folder in ollama_folders():
        try:
            manifests = sorted((folder / "manifests").glob("*/*/*/*"))
        except OSError:  # somebody else's
            continue
        for manifest in manifests:
            if manifest.is_file() and not manifest.name.startswith("."):
                yield _name_of(manifest), folder, manifest


def name_of_blob(blob: Path) -> str | None:
    """Return Ollama's name for a file among its blobs; None where no manifest has it."""
    if blob.parent.name != "blobs" or not DIGEST.fullmatch(blob.name):
        return None
    for name, folder, manifest in ollama_models():
        if folder == blob.parent.parent:
            try:
                found = blob_of(name, folder, manifest)
            except EdgespecError:
                continue
            if found == blob:
                return name
    return None


def _name_of(manifest: Path) -> str:
    host, owner, model, tag = manifest.parts[-4:]
    owners = "" if (host, owner) == (HOST, OWNER) else f"{owner}/" if host == HOST else f"{host}/{owner}/"
    return f"{PREFIX}{owners}{model}:{tag}"


def blob_of(name: str, folder: Path, manifest: Path) -> Path:
    """Return a model's GGUF file; raises EdgespecError where there is none that is the whole model."""
    layers = _layers(manifest)
    kinds = [layer.get("mediaType") for layer in layers]
    models = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == MODEL]
    if len(models) != 1:
        how_many = f"{len(models)} GGUF files" if models else "no GGUF file"
        what = f"'{name}' has {how_many} in its manifest '{manifest}'."
        raise EdgespecError("E_MODEL_NOT_FOUND", what, "Use a model that Ollama keeps as one GGUF file.")
    found = _blob_of_layer(name, folder, manifest, models[0])
    adapters = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == ADAPTER]
    if adapters:
        given = "', '".join(str(_blob_of_layer(name, folder, manifest, layer)) for layer in adapters)
        what = f"'{name}' is a model with an adapter (LoRA) beside it, which has to be named by itself."
        fix = f"Give '{found}' as the target, and with `adapters` '{given}'."
        raise EdgespecError("E_ADAPTER", what, fix)
    return found


def _blob_of_layer(name: str, folder: Path, manifest: Path, layer: dict[str, Any]) -> Path:
    """Return a layer's file, which is whole; raises EdgespecError."""
    digest = DIGEST.fullmatch(str(layer.get("digest")))
    if digest is None:
        raise _damaged(manifest, "a digest is none of SHA-256")
    blobs = [folder / "blobs" / f"sha256{sign}{digest[1]}" for sign in "-:"]
    found = next(filter(_is_file, blobs), None)
    if found is None:
        what = f"'{name}' is not whole: '{blobs[0]}' is missing."
        raise EdgespecError("E_SHARD_MISSING", what, f"ollama pull {name.removeprefix(PREFIX)}")
    size, stated = found.stat().st_size, layer.get("size")
    if isinstance(stated, int) and size != stated:
        what = f"'{name}' is not whole: '{found}' has {size} bytes of {stated}."
        raise EdgespecError("E_SHARD_TRUNCATED", what, f"ollama pull {name.removeprefix(PREFIX)}")
    return found


def _layers(manifest: Path) -> list[dict[str, Any]]:
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            raise _damaged(manifest, "it is too long")
        layers = parse_json(manifest.read_text(encoding="utf-8"))["layers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(manifest, repr(error)) from error
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise _damaged(manifest, "its layers are no list of objects")
    return layers


def _damaged(manifest: Path, reason: str) -> EdgespecError:
    what = f"'{manifest}' is no manifest of Ollama's: {reason}."
    return EdgespecError("E_CONFIG_INVALID", what, "Pull the model again with Ollama.")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
