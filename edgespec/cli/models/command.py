"""`edgespec models`: the models that are here, whether they can run, and which can draft for which."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console, counted
from edgespec.cli.ctrl_c import importing
from edgespec.cli.models.drafts import list_drafts
from edgespec.cli.options.model import complete_model
from edgespec.cli.spelling import spelled, spelled_error
from edgespec.cli.standard_streams import visible
from edgespec.errors import EdgespecError
from edgespec.hub.gguf_models import size

if TYPE_CHECKING:
    from edgespec.doctor.adapters import LocalAdapter
    from edgespec.doctor.inventory import LocalModel

EXAMPLE = "hf download Qwen/Qwen3-0.6B"
HEADINGS = ("model", "type", "parameters", "size", "weights", "context")
RIGHT_ALIGNED = {"parameters", "size", "context"}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@click.command(
    name="models",
    epilog="""\b
Examples:
  edgespec models                        the Hugging Face cache
  edgespec models ~/models               and model folders and GGUF files below it
  edgespec models MODEL.Q4_K_M.gguf      and one file
  edgespec models --drafts MODEL.gguf    what can draft for one, here and published
  edgespec models --json | jq -r '.models[] | select(.problem == null).name'

Under each target stand the models that can draft for it: the same token ids,
added ones aside, and fewer parameters; published heads and drafters of its
shape; and its own multi-token-prediction layer, as mtp. Under each head or
drafter stand its targets, and why it is none of the others'. Nothing is
looked up on the network.
""",
)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--drafts",
    "target",
    metavar="TARGET",
    shell_complete=complete_model,
    help="Say what is here and may draft for this target, why the rest may not, and what others have published.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(*, folders: tuple[Path, ...], target: str | None, as_json: bool, quiet: bool) -> int:
    """List the models that are here, with drafts.

    Those of the local Hugging Face cache, the GGUF files of llama.cpp, LM Studio and Ollama, and those of FOLDERS: what
    they are, and whether they can run.
    """
    console = Console(quiet=quiet, verbose=False)
    if target is not None:
        return list_drafts(console, target, folders, as_json=as_json)
    models = _inspect_all(console, folders)
    from edgespec.doctor.adapters import local_adapters

    adapters = local_adapters(folders)
    if as_json:
        facts = {
            "models": [_facts(model, models) for model in models],
            "adapters": [_adapter_facts(adapter) for adapter in adapters],
        }
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    sys.stdout.write(_table(models) + _adapter_lines(adapters, {model.name for model in models}))
    if not models:
        from edgespec.hub.cache import hub_cache

        console.say(
            f"no models in {hub_cache()}: {EXAMPLE} where there is a network, or name your folders; "
            "the built-in pair needs none: edgespec generate without -m"
        )
    return 0


def _inspect_all(console: Console, folders: Sequence[Path]) -> list[LocalModel]:
    with importing(console):
        from edgespec.doctor.inventory import Inspector
        from edgespec.hub.places import is_adapter, places, program_places
    with console.progress_bar() as bar:
        show = console.task(bar, "reading models")
        by_path: dict[Path, tuple[str, Path]] = {}
        for name, path in (*places(folders), *program_places()):
            if not is_adapter(path):
                by_path.setdefault(path.resolve(), (name, path))
        found, inspector = list(by_path.values()), Inspector()
        models = []
        for number, (name, folder) in enumerate(found):
            show(number, len(found), spelled(name))
            models.append(inspector.inspect(name, folder))
    return models


def _table(models: Sequence[LocalModel]) -> str:
    """Return a line for each model, and below it its drafts or what is wrong with it."""
    from rich.table import Column, Table

    from edgespec.cli.rich_console import table_lines
    from edgespec.doctor.inventory import drafts_for, targets_of
    from edgespec.hub.names import MTP

    if not models:
        return ""
    columns = [Column(name, justify="right" if name in RIGHT_ALIGNED else "left") for name in HEADINGS]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for model in models:
        table.add_row(*(visible(cell) for cell in _cells(model)))
    heading, *rows = table_lines(table)
    lines = [heading]
    for model, row in zip(models, rows, strict=True):
        lines.append(row)
        if model.problem is not None:
            lines.append(f"    cannot run: {spelled(model.problem.what)}")
        lines += [f"    it {note}" for note in model.notes]
        lines += [
            f"    draft: {spelled(draft.name)} ({model.draft_ratio(draft.num_parameters)})"
            for draft in drafts_for(model, models)
        ]
        if model.own_layer_parameters is not None:
            ratio = model.draft_ratio(model.own_layer_parameters)
            lines.append(f"    draft: {MTP}, its own multi-token-prediction layer ({ratio})")
        reasons: dict[str | None, list[str]] = {}
        for name, reason in targets_of(model, models).items():
            reasons.setdefault(reason, []).append(spelled(name))
        fits = reasons.pop(None, [])
        lines += [f"    drafts for {', '.join(fits)}"] if fits else []
        lines += [f"    not for {', '.join(names)}: {spelled(str(why))}" for why, names in reasons.items()]
    return "".join(f"{line}\n" for line in lines)


def _adapter_lines(adapters: Sequence[LocalAdapter], models: Collection[str]) -> str:
    """Return a line for each adapter, with the base that it was trained on."""
    lines = []
    for adapter in adapters:
        lines.append(f"adapter {spelled(visible(adapter.name))}: {size(adapter.num_bytes)}")
        if adapter.problem is not None:
            lines.append(f"    cannot be used: {spelled(adapter.problem.what)}")
            continue
        is_here = "" if adapter.base is None or adapter.base in models else ", which is not here by that name"
        base = "of a base that its config does not name" if adapter.base is None else f"of {visible(adapter.base)}"
        lines.append(f"    {base}{is_here}; {counted(adapter.num_modules, 'module')}")
    return "".join(f"{line}\n" for line in lines)


def _adapter_facts(adapter: LocalAdapter) -> dict[str, Any]:
    return {
        "name": spelled(adapter.name),
        "folder": str(adapter.folder),
        "bytes": adapter.num_bytes,
        "base": adapter.base,
        "modules": adapter.num_modules,
        "problem": _problem_facts(adapter.problem),
    }


def _problem_facts(problem: EdgespecError | None) -> dict[str, str] | None:
    if problem is None:
        return None
    shown = spelled_error(problem)
    return {"code": shown.code, "message": shown.what, "fix": shown.fix}


def _cells(model: LocalModel) -> tuple[str, ...]:
    weights = SHORT_DTYPES.get(model.dtype or "", model.dtype or "-")
    return (
        spelled(model.name),
        (model.model_type or "-")
        + (f" {model.draft_form}" if model.draft_form else " head" if model.head_of else "")
        + (" with pictures" if model.has_tower else " text part" if model.num_unread else ""),
        _count(model.num_parameters),
        size(model.num_bytes),
        _type_mix(model) or model.quant or weights,
        str(model.max_context or "-"),
    )


def _type_mix(model: LocalModel) -> str:
    """Return the types of a GGUF file's tensors by their share of its bytes, and the bits of a weight."""
    total = sum(model.types.values())
    shares = [f"{name} {count / total:.0%}" for name, count in model.types.items() if count >= total / 100]
    return " ".join(shares) + (f", {model.bits:.1f} bits" if model.bits else "")


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "-"
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _facts(model: LocalModel, models: Sequence[LocalModel]) -> dict[str, Any]:
    from edgespec.doctor.inventory import drafts_for, targets_of
    from edgespec.hub.names import MTP

    targets = targets_of(model, models)
    return {
        "name": spelled(model.name),
        "folder": str(model.folder),
        "type": model.model_type,
        "draft_form": model.draft_form,
        "parameters": model.num_parameters,
        "unread_parameters": model.num_unread,
        "reads_pictures": model.has_tower,
        "bytes": model.num_bytes,
        "dtype": model.dtype,
        "quant": model.quant,
        "types": dict(model.types),
        "bits_per_weight": model.bits,
        "context": model.max_context,
        "decoding": model.support,
        "notes": list(model.notes),
        "drafts": [
            *(spelled(draft.name) for draft in drafts_for(model, models)),
            *([str(MTP)] if model.own_layer_parameters is not None else []),
        ],
        "drafts_for": [spelled(name) for name, why in targets.items() if why is None],
        "not_for": {spelled(name): spelled(why) for name, why in targets.items() if why is not None},
        "problem": _problem_facts(model.problem),
    }
