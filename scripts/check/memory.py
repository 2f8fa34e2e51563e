"""Does `edgespec estimate` say what `edgespec generate` really uses?

    python -m scripts.check.memory -m CHECKPOINT [MODEL.gguf ...]
    python -m scripts.check.memory -m CHECKPOINT --lora-rank 128      each setting again with two random adapters
    ... --repeats 2 --setting "--dtype bfloat16 -c 256" --setting "--dtype bfloat16 -c 256 -ngl 0"       in minutes

A model of the built-in pair's tokens drafts with its small model, another without a draft. A GGUF file is measured in
bf16 and float32, a folder in more ways.
Each setting (a string of options; --setting may be given several times) is estimated and then run in
fresh processes. Used is the largest peak of --repeats of them (what an allocator keeps of freed blocks
varies), less the peak of one that only imports edgespec, torch and transformers. Prints a table and one
JSON line; exits 1 when a setting is off by more than --tolerance.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgespec.pair.pair import DEMO_FOLDER, open_pair, open_tokenizer
from scripts.bench.adapters import write_random_adapter
from scripts.situations import MIB, idle_peak_bytes, run_python

SETTINGS = [
    "--dtype bfloat16 -c 512",
    "--dtype bfloat16 -c 1024 --tree-size 256 --max-cpu-mem 1GiB",
    "--dtype float32 -c 512 --max-cpu-mem 1200MiB",
    "--dtype bfloat16 -c 512 --quant nf4",
    "--dtype bfloat16 -c 512 --quant int4",
]
GGUF_SETTINGS = ["--dtype bfloat16 -c 512", "--dtype float32 -c 512"]
PROMPT_LINE = "def read_lines(path):\n    with open(path) as file:\n        return file.read()\n\n"


def write_prompt(path: Path, model: Path, *, tokens: int) -> int:
    """A prompt of about so many tokens; its true length."""
    tokenizer = open_pair(model, None).tokenizer
    ids = tokenizer.encode(PROMPT_LINE * (tokens // 8))[:tokens]
    path.write_text(tokenizer.decode(ids), encoding="utf-8")
    return len(tokenizer.encode(path.read_text(encoding="utf-8")))


def drafted_by(model: Path, draft: Path | None) -> list[str]:
    """The options of a model and of its draft: where none is named, the built-in one for a model of its tokens."""
    if draft is None and open_tokenizer(model).get_vocab() == open_tokenizer(DEMO_FOLDER / "draft").get_vocab():
        draft = DEMO_FOLDER / "draft"
    return ["-m", str(model), *([] if draft is None else ["-md", str(draft)])]


def measure(model: Path, setting: str, arguments: argparse.Namespace, idle_bytes: int) -> dict[str, Any]:
    """Planned and used bytes of one setting."""
    pair = drafted_by(model, arguments.draft_model)
    options = shlex.split(setting)
    context = int(options[options.index("-c") + 1])
    with tempfile.TemporaryDirectory() as folder:
        prompt, out = Path(folder) / "prompt.txt", Path(folder) / "out.jsonl"
        prompt_tokens = write_prompt(prompt, model, tokens=context - arguments.max_new_tokens)
        generate = ["-m", "edgespec", "generate", str(prompt), *pair, *options, "-n", str(arguments.max_new_tokens)]
        generate += ["--seed", "1", "--temp", "0", "--raw", "-q", "-o"]
        run_python(*generate, str(Path(folder) / "first.jsonl"), "--max-new-tokens", "1")  # quantises, if it must
        peaks = []
        for _ in range(arguments.repeats):
            run_python(*generate, str(out), "--overwrite")
            peaks.append(json.loads(out.read_text(encoding="utf-8"))["memory"]["cpu_peak_bytes"])
    estimate = run_python(
        "-m", "edgespec", "estimate", *pair, *options, "--prompt-tokens", str(prompt_tokens), "--json"
    )
    plan = json.loads(estimate)
    used_bytes = max(peaks) - idle_bytes
    return {
        "model": model.name,
        "setting": setting.partition(" --lora")[0] + (" and adapters" if "--lora" in setting else ""),
        "adapter_bytes": sum(plan["adapters"].values()),
        "resident": f"{plan['resident_layers']} of {plan['layers']}",
        "planned_bytes": plan["device_total_bytes"],
        "used_bytes": used_bytes,
        "used_range_bytes": max(peaks) - min(peaks),
        "off": plan["device_total_bytes"] / used_bytes - 1,
    }


def main() -> int:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, nargs="+")
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--setting", action="append", help="options of estimate and generate, with -c")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--lora-rank", type=int, help="of two random adapters of all linear layers")
    arguments = parser.parse_args()
    idle_bytes, rows = idle_peak_bytes(), []
    for model in arguments.model:
        settings = arguments.setting or (GGUF_SETTINGS if model.suffix == ".gguf" else SETTINGS)
        rows += [measure(model, setting, arguments, idle_bytes) for setting in settings]
        if arguments.lora_rank is None:
            continue
        with tempfile.TemporaryDirectory() as room:
            pair = open_pair(model, None)
            ways = [write_random_adapter(Path(room) / f"a{seed}", pair, arguments.lora_rank, seed) for seed in (1, 2)]
            lora = "".join(f" --lora {shlex.quote(str(way))}:0.5" for way in ways)
            rows += [measure(model, setting + lora, arguments, idle_bytes) for setting in settings]
    print(f"{'planned MiB':>12}{'used MiB':>10}{'range':>7}{'off':>7}  {'resident':<10}setting")
    for row in rows:
        planned, used, spread = (row[f"{name}_bytes"] / MIB for name in ("planned", "used", "used_range"))
        sizes = f"{planned:>12.0f}{used:>10.0f}{spread:>7.0f}{row['off']:>+7.1%}"
        print(f"{sizes}  {row['resident']:<10}{row['model']} {row['setting']}")
    print(json.dumps({"idle_bytes": idle_bytes, "settings": rows}))
    return 0 if all(abs(row["off"]) <= arguments.tolerance for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
