"""EAGLE, HASS and CORAL heads of the built-in target, trained alike and compared; routers; a sibling of equal cost.

    python -m scripts.compare_heads OUT

Parts, each of which goes on where it stopped (choose with --parts):
train        features of the target in a streamed run under a memory limit, then `edgespec train head` for every
             method and seed, with the same texts, steps and order of texts
sibling      a language model of one layer, distilled on the same features with as many steps: a draft that costs
             what a head costs and reads no features
accept       exact expected tokens a pass of chain, eagle2 and adaptive trees at temperature 0 and 1, at the same
             held-out contexts for everybody; intervals over seeds, and paired over contexts
discrepancy  InfoNCE between the features of different training steps on held-out texts (CORAL, table 6)
routers      `edgespec train router` over 8, 16 and 32 groups on the first CORAL head: tokens a pass lost, and
             groups that a layer asks for
Prints tables, and one JSON line a part. (What a router saves of a draft call: scripts/bench_router.py.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgespec import SamplingSettings, TreeSettings
from edgespec.draft.head_network import HEAD_KEY, head_config
from edgespec.draft.head_router import HeadRouter
from edgespec.pair.folder import open_model, read_head_facts
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.train.feature_files import FeatureBatch, FeatureFiles
from edgespec.train.head_losses import TEMPERATURE, distribution_losses
from edgespec.train.head_model import lender, load_head
from edgespec.train.head_objective import head_logits
from edgespec.train.head_steps import head_steps, step_rows
from edgespec.train.training_loop import split_blocks, train
from edgespec.train.training_settings import TrainingSettings
from scripts.compare_policies import Bench, Cell, contexts
from scripts.train_demo import is_held_out, standard_library_sources

TARGET = DEMO_FOLDER / "target"
METHODS = ("eagle", "hass", "coral")
PARTS = ("train", "sibling", "accept", "discrepancy", "routers")
ALIGNMENT_WEIGHT = 0.05  # of CSRA: about as much as the regression adds to the loss, as CORAL's appendix A has it
TREES = {
    "chain": TreeSettings(policy="chain", draft_tokens=7),
    "eagle2": TreeSettings(policy="eagle2", size=60, depth=7, max_children=10),
    "adaptive": TreeSettings(policy="adaptive", size=60, depth=7),
}
TEMPERATURES = (0.0, 1.0)
CONTEXT_TOKENS = 192
DEPTH = 4  # steps whose features are compared
GROUPS = (8, 16, 32)
TOP_GROUPS = (1, 2)
ROUTER_STEPS = 300
NUM_BOOTSTRAPS = 4000


def edgespec(*arguments: object) -> None:
    """A command of ours, as a user would give it."""
    subprocess.run([sys.executable, "-m", "edgespec", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def write_data(folder: Path) -> None:
    """The modules that the built-in pair was trained on, as files."""
    for name, text in standard_library_sources():
        if not is_held_out(name):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def train_heads(arguments: argparse.Namespace) -> None:
    """All methods and seeds on the same features."""
    out: Path = arguments.out
    if not (out / "data").exists():
        write_data(out / "data")
    for seed, method in itertools.product(arguments.seeds, METHODS):
        if (out / f"head-{method}-{seed}").exists():
            continue
        edgespec(
            "train", "head", "--data", out / "data", "--data-tokens", arguments.data_tokens,
            "--features", out / "features", "--max-cpu-mem", "700MiB", "-ngl", "0",
            "--method", method, "--seed", seed, "--training-steps", arguments.training_steps,
            "--batch", arguments.batch, "--learning-rate", arguments.learning_rate, "-o", out / f"head-{method}-{seed}",
            *(["--alignment-weight", ALIGNMENT_WEIGHT] if method == "coral" else []),
        )  # fmt: skip


# ---- a sibling of equal cost -------------------------------------------------------------------


def train_sibling(arguments: argparse.Namespace, seed: int) -> None:
    """One layer between the target's own tables, all of it trained to give the target's distributions."""
    folder = arguments.out / f"sibling-{seed}"
    if folder.exists():
        return
    files = FeatureFiles(arguments.out / "features")
    settings = TrainingSettings(
        training_steps=arguments.training_steps, batch_blocks=arguments.batch,
        learning_rate=arguments.learning_rate, seed=seed, evaluate_every=10**9, checkpoint_every=10**9,
    )  # fmt: skip
    with lender(open_model(TARGET), device=torch.device("cpu"), dtype=torch.float32) as target:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(head_config(target.config), dtype=torch.float32)
        model.get_input_embeddings().weight.data.copy_(target.get_input_embeddings().weight)
        model.model.norm.weight.data.copy_(target.model.norm.weight)
        frozen = head_logits(target)

        def objective(batch: FeatureBatch, _: torch.Generator) -> dict[str, Tensor]:
            logits = model(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)
            counted = step_rows(batch, 1).flatten()
            with torch.no_grad():
                p = frozen(batch.features.flatten(0, 1)[counted]).softmax(-1)
            return {"loss": -(p * logits[counted].log_softmax(-1)).sum(-1).mean()}

        train(
            dict(model.named_parameters()), objective, files, split_blocks(files, settings), settings,
            arguments.out / f"sibling-{seed}.training", identity="sibling", device=torch.device("cpu"),
        )  # fmt: skip
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)


# ---- tokens a pass -----------------------------------------------------------------------------


def tokens_of(draft: Path, num_contexts: int, seed: int) -> dict[str, list[float]]:
    """Expected tokens a pass at every context, by tree and temperature."""
    torch.set_num_threads(1)
    bench = Bench(TARGET, draft, seed)
    texts = contexts(bench.engine.pair.tokenizer, None, count=num_contexts, tokens=CONTEXT_TOKENS, seed=seed)
    cells = {f"{name} T{temperature:g}": Cell() for name in TREES for temperature in TEMPERATURES}
    for index, ids in enumerate(texts):
        bench.start(ids)
        for (name, tree), temperature in itertools.product(TREES.items(), TEMPERATURES):
            sampling = SamplingSettings(temperature=temperature)
            bench.step(tree, sampling, bench.drafter(tree, sampling), cells[f"{name} T{temperature:g}"], index)
    bench.engine.close()
    return {name: cell.tokens for name, cell in cells.items()}


def accept(drafts: dict[str, Path], arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Of all drafts, some at a time; what was found before is kept."""
    kept = arguments.out / "accept.json"
    found: dict[str, dict[str, list[float]]] = json.loads(kept.read_text()) if kept.exists() else {}
    missing = [name for name in drafts if name not in found]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        waiting = {
            name: pool.submit(tokens_of, drafts[name], arguments.contexts, arguments.context_seed) for name in missing
        }
        for name, result in waiting.items():
            found[name] = result.result()
            kept.write_text(json.dumps(found))
            print(f"{name}: done", file=sys.stderr)
    return found


def print_acceptance(found: dict[str, dict[str, list[float]]], seeds: Iterable[int]) -> None:
    """A row a method, means over seeds with 95 % intervals; then paired differences of methods."""
    cells = list(next(iter(found.values())))
    means: dict[str, Tensor] = {}  # method -> [seeds, cells, contexts]
    for method in (*METHODS, "sibling"):
        rows = [found[f"{method}-{seed}"] for seed in seeds if f"{method}-{seed}" in found]
        if rows:
            means[method] = torch.tensor([[row[cell] for cell in cells] for row in rows], dtype=torch.float64)
    print(f"{'tokens a pass':>16}" + "".join(f"{cell:>20}" for cell in cells))
    for method, values in means.items():
        by_seed = values.mean(-1)  # [seeds, cells]
        print(f"{method:>16}" + "".join(f"{_with_interval(by_seed[:, i]):>20}" for i in range(len(cells))))
    if "built-in draft" in found:
        values = [statistics.mean(found["built-in draft"][cell]) for cell in cells]
        print(f"{'built-in draft':>16}" + "".join(f"{value:>20.2f}" for value in values))
    print("differences, 95 % intervals over contexts (bootstrap, means over seeds)")
    for better, worse in (("coral", "hass"), ("hass", "eagle"), ("coral", "eagle"), ("eagle", "sibling")):
        if better in means and worse in means:
            gain = means[better].mean(0) - means[worse].mean(0)  # [cells, contexts]
            bounds = [_bootstrap(gain[i]) for i in range(len(cells))]
            print(f"{better + ' - ' + worse:>16}" + "".join(f"{bound:>20}" for bound in bounds))


def _with_interval(values: Tensor) -> str:
    """Mean and half the 95 % interval of Student's t over seeds."""
    if values.shape[0] < 2:
        return f"{float(values.mean()):.2f}"
    half = float(stats.t.ppf(0.975, values.shape[0] - 1)) * float(values.std()) / values.shape[0] ** 0.5
    return f"{float(values.mean()):.2f} ± {half:.2f}"


def _bootstrap(values: Tensor) -> str:
    generator = torch.Generator().manual_seed(0)
    drawn = values[torch.randint(values.shape[0], (NUM_BOOTSTRAPS, values.shape[0]), generator=generator)].mean(1)
    return f"{float(values.mean()):+.2f} ({float(drawn.quantile(0.025)):+.2f}, {float(drawn.quantile(0.975)):+.2f})"


# ---- discrepancy between steps -----------------------------------------------------------------


@torch.no_grad()
def discrepancy(folder: Path, files: FeatureFiles, blocks: Iterable[int]) -> dict[str, float]:
    """InfoNCE in nats between the features of two steps, over the rows of one block at a time; and the losses."""
    sums: dict[str, float] = {}
    with lender(open_model(TARGET), device=torch.device("cpu"), dtype=torch.float32) as target:
        model = load_head(target, folder, read_head_facts(folder))
        count = 0
        for block in blocks:
            batch = files.batch([block], device=torch.device("cpu"))
            steps = [step[0] for step in head_steps(model, batch, num_steps=DEPTH)]
            rows = step_rows(batch, DEPTH)[0]
            unit = [torch.nn.functional.normalize(step[rows], dim=-1) for step in steps]
            labels = torch.arange(unit[0].shape[0])
            found = {
                f"{later} from {earlier}": float(
                    torch.nn.functional.cross_entropy(unit[later] @ unit[earlier].T / TEMPERATURE, labels)
                )
                for earlier in range(DEPTH)
                for later in range(earlier + 1, DEPTH)
            }
            losses = distribution_losses(
                steps, batch.features[0], [rows] * DEPTH, logits_of=head_logits(model), vocab=target.config.vocab_size
            )
            found |= {f"cross-entropy {step}": float(loss) for step, loss in enumerate(losses.distribution)}
            sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
            count += 1
    return {name: value / count for name, value in sums.items()}


def print_discrepancy(arguments: argparse.Namespace) -> dict[str, Any]:
    """Table 6 of CORAL, means over seeds."""
    files = FeatureFiles(arguments.out / "features")
    blocks = split_blocks(files, TrainingSettings(held_out_blocks=arguments.blocks)).held_out
    found: dict[str, list[dict[str, float]]] = {
        method: [discrepancy(arguments.out / f"head-{method}-{seed}", files, blocks) for seed in arguments.seeds]
        for method in METHODS
    }
    for method, results in found.items():
        print(f"{method}: InfoNCE between steps (rows later, columns earlier), and cross-entropy of each step")
        mean = {name: statistics.mean(result[name] for result in results) for name in results[0]}
        for later in range(DEPTH):
            cells = [f"{mean[f'{later} from {earlier}']:.4f}" for earlier in range(later)]
            print(f"  step {later}: {mean[f'cross-entropy {later}']:.3f} nats  " + "  ".join(cells))
    return found


# ---- routers -----------------------------------------------------------------------------------


def train_routers(arguments: argparse.Namespace) -> dict[str, Path]:
    """The first CORAL head with routers of several sizes, and copies that ask for more groups."""
    out: Path = arguments.out
    head = out / f"head-coral-{arguments.seeds[0]}"
    folders = {}
    for groups in GROUPS:
        folder = out / f"router-{groups}-1"
        if not folder.exists():
            edgespec(
                "train", "router", "-md", head, "--features", out / "features", "--groups", groups, "--top-groups", 1,
                "--training-steps", ROUTER_STEPS, "--batch", arguments.batch, "--learning-rate", 1e-3, "-o", folder,
            )  # fmt: skip
        for top in TOP_GROUPS:
            wider = out / f"router-{groups}-{top}"
            if not wider.exists():
                shutil.copytree(folder, wider)
                config = json.loads((wider / "config.json").read_text())
                config[HEAD_KEY]["top_groups"] = top
                (wider / "config.json").write_text(json.dumps(config))
            folders[f"{groups} groups, top {top}"] = wider
    return folders


def asked_groups(folder: Path, files: FeatureFiles, blocks: Iterable[int], width: int) -> float:
    """Groups that `width` rows ask for together, on average: rows at random places of held-out texts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with lender(open_model(TARGET), device=torch.device("cpu"), dtype=torch.float32) as target, torch.no_grad():
        model = load_head(target, folder, read_head_facts(folder))
        router = model.router
        assert isinstance(router, HeadRouter)
        for block in blocks:
            features = head_steps(model, files.batch([block], device=torch.device("cpu")), num_steps=1)[0][0]
            places = torch.randperm(features.shape[0], generator=generator).split(width)[:4]
            found += [len(router.wanted(router(features[rows]))) for rows in places]
    return statistics.mean(found)


def print_routers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a pass with each router against the whole head's, and groups that ten rows ask for."""
    folders = train_routers(arguments)
    whole = f"coral-{arguments.seeds[0]}"
    found = accept({whole: arguments.out / f"head-{whole}", **folders}, arguments)
    files = FeatureFiles(arguments.out / "features")
    blocks = split_blocks(files, TrainingSettings(held_out_blocks=arguments.blocks)).held_out
    cells = list(found[whole])
    print(f"{'router':>18}" + "".join(f"{cell:>16}" for cell in cells) + "  groups that 10 rows ask for")
    print(f"{'none':>18}" + "".join(f"{statistics.mean(found[whole][cell]):>16.2f}" for cell in cells))
    asked = {}
    for name, folder in folders.items():
        asked[name] = asked_groups(folder, files, blocks, 10)
        means = [statistics.mean(found[name][cell]) for cell in cells]
        shares = [mean / statistics.mean(found[whole][cell]) for mean, cell in zip(means, cells, strict=True)]
        shown = [f"{mean:.2f} ({share:.2f})" for mean, share in zip(means, shares, strict=True)]
        print(f"{name:>18}" + "".join(f"{text:>16}" for text in shown) + f"  {asked[name]:.1f}")
    return {"asked": asked, "tokens": {name: found[name] for name in (whole, *folders)}}


def main() -> None:
    """The parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--data-tokens", type=int, default=1_500_000)
    parser.add_argument("--training-steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=2, help="blocks of 512 tokens")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--contexts", type=int, default=100)
    parser.add_argument("--context-seed", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=32, help="held out, for the discrepancy and the routers")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "train" in arguments.parts:
        train_heads(arguments)
    if "sibling" in arguments.parts:
        for seed in arguments.seeds:
            train_sibling(arguments, seed)
    if "accept" in arguments.parts:
        drafts = {
            f"{method}-{seed}": arguments.out / (f"head-{method}-{seed}" if method != "sibling" else f"sibling-{seed}")
            for seed in arguments.seeds
            for method in (*METHODS, "sibling")
        }
        drafts["built-in draft"] = DEMO_FOLDER / "draft"
        found = accept({name: folder for name, folder in drafts.items() if folder.exists()}, arguments)
        print_acceptance(found, arguments.seeds)
        print(json.dumps({"accept": found}))
    if "discrepancy" in arguments.parts:
        print(json.dumps({"discrepancy": print_discrepancy(arguments)}))
    if "routers" in arguments.parts:
        print(json.dumps({"routers": print_routers(arguments)}))


if __name__ == "__main__":
    main()
