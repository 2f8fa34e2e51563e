"""Every family that transformers knows: equal to transformers at a level, refused with a reason, or a fault.

    python -m scripts.check.families --only gemma4 llama4       a few types
    python -m scripts.check.families --json families.json       all of them: minutes
    python -m scripts.check.families --json families.json --resume --page docs/models.md

A tiny random checkpoint of each type goes through `Engine`, streamed, with trees of two drafts (itself, whose tokens
are taken, and another one, whose tokens are not), and with two texts in each pass; the tokens must be those of
transformers' own `generate`, in float32. Types that are decoded by chains have a Llama for a draft, and looked up text
alone; those that are decoded plainly have neither.
The memory of the keys and values is compared with what the plan counts.
Each type has a process and a time limit of its own. Exits 1 where anything is a fault.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.pair.folder import open_model
from edgespec.pair.tree_support import supported_trees, tree_support
from edgespec.placement.cache_memory import cache_bytes
from edgespec.placement.plan import placement_for
from offload.text_part import language_model
from tests.support.tiny_checkpoints import make_model, save_folder
from tests.support.tiny_configs import TYPES, VOCAB, is_image_text, tiny_config

PROMPTS = (list(b"def main(arguments):\n"), list(b"import os"))
NEW_TOKENS = 14
TREE = TreeSettings(policy="opt-tree", size=7)
CONTEXT_TOKENS = 64
START, END = "<!-- families: made by scripts/check/families.py -->", "<!-- families: end -->"


def plain_tokens(folder: Path, *, is_image_text: bool, use_cache: bool = True) -> list[list[int]]:
    """What transformers' own greedy decoding of the folder gives for each prompt."""
    family = AutoModelForImageTextToText if is_image_text else AutoModelForCausalLM
    model = family.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        wanted = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": use_cache}
        # The model of words: some image-text ones generate from images alone, and their head's own code has bugs.
        ended = language_model(model).generate(
            ids, **wanted, max_new_tokens=NEW_TOKENS, eos_token_id=VOCAB - 1, pad_token_id=0, forced_eos_token_id=None
        )
        found.append(ended[0, len(prompt) :].tolist())
    return found


def our_tokens(target: Path, draft: Path | None) -> tuple[list[list[int]], str]:
    """What trees of the draft, or of the target alone, give for the prompts together, where, and tokens a pass."""
    options: dict[str, Any] = {"context_tokens": CONTEXT_TOKENS, "parallel": len(PROMPTS), "dtype": "float32"}
    tree = TREE
    if draft is None:
        tree = supported_trees(open_model(target), TreeSettings(size=TREE.size), has_draft=False, keeps_row_bits=False)
    placement = placement_for(target, draft=draft, tree=tree, **options)
    resident = sum(count for use, count in placement.device_bytes.items() if "resident" in use)
    layer = resident // placement.num_layers
    for saved in (layer // 2 + 1, 1, 0):  # layers of unequal size need larger buffers
        limits = MemoryLimits(max_cpu_bytes=placement.planned_bytes - saved)
        try:
            engine = Engine.from_pretrained(target, draft=draft, tree=tree, limits=limits, **options)
            break
        except EdgespecError as error:
            if error.code != "E_MEMORY" or not saved:
                raise
    with engine:
        handles = [
            engine.submit(engine.request(prompt, max_new_tokens=NEW_TOKENS, sampling=SamplingSettings()))
            for prompt in PROMPTS
        ]
        steps = [[chunk.step for chunk in handle] for handle in handles]
        tokens = [[token for step in of_text for token in step.tokens] for of_text in steps]
        by_pass = [len(step.tokens) for of_text in steps for step in of_text if not step.is_prefill]
        where = f"{engine.placement.num_resident} of {engine.placement.num_layers} resident"
        return tokens, f"{where}, {sum(by_pass) / len(by_pass):.2f} tokens a pass"


def uncounted_cache(target: Path) -> str | None:
    """How the keys and values of a text differ from what the plan counts, if they do."""
    with Engine.from_pretrained(target, tree=TreeSettings(policy="none"), dtype="float32") as engine:
        model = engine._loaded.target
        if model.is_plain:
            return None  # measured by the plan itself
        cache = model.new_text()
        model.read_text(cache, torch.tensor(PROMPTS[0]))
        rows = max(layer.capacity for layer in cache.layers)
        held = cache.num_bytes - sum(state.num_bytes for state in cache._recurrent)
    counted = cache_bytes(open_model(target).config.get_text_config(decoder=True), rows=rows, dtype=torch.float32)
    return None if held == counted else f"keys and values take {held} bytes, and {counted} are planned"


def verdict_on(model_type: str) -> dict[str, str]:
    """Whether a family is equal, refused, a fault, or not made."""
    is_image_text_type = is_image_text(model_type)
    with tempfile.TemporaryDirectory() as folder:
        target, other = Path(folder) / "target", Path(folder) / "other"
        try:
            config = tiny_config(model_type)
            is_wanted = {"is_image_text": is_image_text_type}
            save_folder(target, make_model(config, **is_wanted, seed=0))
            save_folder(other, make_model(config, **is_wanted, seed=1))
        except Exception as error:
            return {"verdict": "not made", "reason": short(error)}
        try:
            support = tree_support(open_model(target))
            if support.name == "chains":
                other = save_folder(
                    Path(folder) / "llama", make_model(tiny_config("llama"), is_image_text=False, seed=1)
                )
            drafts = {"trees": (target, other), "chains": (other, None), "plainly": (None, None)}[support.name]
            found = [our_tokens(target, draft) for draft in drafts]
            difference = uncounted_cache(target)
        except EdgespecError as error:
            return {"verdict": "refused", "code": error.code, "reason": error.what.replace(str(target), "FOLDER")}
        except Exception as error:
            return {"verdict": "fault", "reason": short(error), "where": traceback.format_exc()[-900:]}
        ours = [tokens for tokens, _ in found]
        notes = [difference] if difference else []
        try:
            expected, note = plain_tokens(target, **is_wanted), "it differs from itself"
        except Exception as error:
            expected, note = None, f"it cannot generate: {short(error)}"
        try:
            if ours != [expected, expected]:
                notes.append(f"without a cache, transformers is equal; with its own, {note}")
                expected = plain_tokens(target, **is_wanted, use_cache=False)
        except Exception as error:
            return {"verdict": "not made", "reason": f"transformers cannot generate: {short(error)}"}
    if ours != [expected, expected]:
        return {"verdict": "wrong", "reason": f"{ours} instead of {expected}"}
    levels = {"level": support.name} | ({"reason": str(support.why)} if support.has_own_passes else {})
    return {"verdict": "equal", "where": found[0][1], **levels} | ({"note": "; ".join(notes)} if notes else {})


def short(error: Exception) -> str:
    """What a library says went wrong, in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def in_own_process(model_type: str, limit_s: float) -> dict[str, str]:
    """The verdict, from a process that may take so long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)  # a forked process has none of its parent's, and would wait for them
        sender.send(verdict_on(model_type))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            return dict(receiver.recv())
        return {"verdict": "fault", "reason": f"no verdict within {limit_s:g} s"}
    except EOFError:
        return {"verdict": "fault", "reason": "its process died"}
    finally:
        process.kill()
        process.join()


def table(found: dict[str, dict[str, str]]) -> str:
    """The verdicts as Markdown."""

    def named(level: str) -> list[str]:
        return [name for name, verdict in sorted(found.items()) if verdict.get("level") == level]

    refused = [(name, verdict) for name, verdict in sorted(found.items()) if verdict["verdict"] == "refused"]
    trees, own = named("trees"), [(name, level) for level in ("chains", "plainly") for name in named(level)]
    counts = Counter(level for _, level in own)
    lines = [
        f"transformers {transformers.__version__}: {len(trees)} types equal through trees, {counts['chains']} equal by "
        f"chains, {counts['plainly']} equal and decoded plainly, {len(refused)} refused.",
        "",
        "**Trees**: " + ", ".join(f"`{name}`" for name in trees) + ".",
        "",
        "| without branches | level | because it |",
        "|---|---|---|",
        *(f"| `{name}` | {level} | {found[name]['reason'].replace('|', '/')} |" for name, level in own),
        "",
        "| refused | why |",
        "|---|---|",
        *(f"| `{name}` | {verdict['reason'].replace('|', '/')} |" for name, verdict in refused),
    ]
    return "\n".join(lines)


def write_page(page: Path, found: dict[str, dict[str, str]]) -> None:
    """Put the table between the page's marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{START}\n{table(found)}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Look at the types that are asked for; return 1 where one is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these types alone")
    parser.add_argument("--json", type=Path, help="where the verdicts go; those of other types there stay")
    parser.add_argument("--resume", action="store_true", help="leave out types whose verdict is in --json")
    parser.add_argument("--page", type=Path, help="a page that has the marks of the table")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of one type")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    wanted = [name for name in arguments.only or TYPES if not (arguments.resume and name in found)]
    for name in wanted:
        started = time.monotonic()
        found[name] = in_own_process(name, arguments.limit_s)
        seconds = time.monotonic() - started
        shown = " ".join(found[name].get(key, "") for key in ("verdict", "code", "reason", "note", "where"))
        print(f"{name:28}{seconds:5.1f} s  {shown[: 2000 if arguments.only else 160]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if arguments.page:
        write_page(arguments.page, found)
    counts = Counter(verdict["verdict"] for verdict in found.values())
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 1 if counts["fault"] or counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
