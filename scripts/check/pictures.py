"""Prompts with pictures: texts equal to transformers' `generate`, and what kept rows save without mixing pictures up.

    python -m scripts.check.pictures                                    all families: half an hour
    python -m scripts.check.pictures --only smolvlm qwen3_vl --num-prompts 6

Tiny random models of each family with its own processor, in float32. Prompts have one or three pictures, before and
behind words and in the middle of a conversation. Texts are decoded plainly, through trees with looked up text, with the
target's own copy, with random heads of two published forms, and with a layer of its own that predicts several tokens
where the family has one; resident, and streamed in chunks of 16 rows; alone, and four at a time beside texts of words.
At temperature 0 they are compared with `generate`, at 0.8, in company, with plain decoding alone. Then another picture
stands under the same words, and the same one under others, for each kind of rows that are kept. Exits 1 where a text
differs, but for two tokens that rounding decides between, or where rows of another picture are found.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.hub.names import MTP
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.sight import Sight
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.prefix_cache.slots import Slots
from edgespec.text.request import TextOptions
from edgespec.text.results import GenerationResult
from edgespec.train.eagle3_head import default_aux_layers, new_eagle3
from scripts.papers.published.blocks import new_drafter, write_drafter
from scripts.situations import exit_with
from tests.support.tiny_pictures import NEW, SEEING, Family, add_predicting_layer, generated, seeing_prompt

FORMS = (
    "{p} What is it?", "What is this? {p}", "A: Hello\nB: Look {p} there\nA: I see\nB: What else?",
    "{p} first, {p} second, and {p} third. Which one?", "Compare them: {p} with this {p} and also {p}",
)  # fmt: skip
WAYS: dict[str, tuple[str | None, str | None]] = {
    "plain": (None, "none"), "trees and lookup": (None, None), "the target's copy": ("self", "opt-tree"),
    "an EAGLE-3 head": ("eagle3", "opt-tree"), "a DFlash drafter": ("dflash", "opt-tree"),
    "the target's own layer": (MTP, "opt-tree"),
}  # fmt: skip
HEADS = ("eagle3", "dflash")
WITH_LAYER = "qwen3_5"  # the family whose files may have a layer that predicts several tokens
KINDS = ("memory", "slots", "prompt cache")
COMPANY = 4
CHUNK_ROWS = 16  # that pass a layer at once where layers are streamed: prompts have more
NEAR_TIE = 2e-6  # of the largest logit: rows in other company round so in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How much is compared."""

    num_prompts: int
    num_tokens: int  # of each text

    def options(self, temperature: float) -> TextOptions:
        """Return how a text is drawn."""
        return {"max_new_tokens": self.num_tokens, "temperature": temperature, "seed": 11, "eos_token_id": []}


def prompts_of(family: Family, count: int) -> list[PicturePrompt]:
    """Return prompts of all forms, with pictures of their own."""
    placeholder = family.prompt.partition(" and ")[0].removeprefix("Look: ")
    found = []
    for number in range(count):
        words = FORMS[number % len(FORMS)].replace("{p}", placeholder)
        seeds = tuple(10 * number + place for place in range(words.count(placeholder)))
        found.append(seeing_prompt(family, seeds, words=words))
    return found


def placeholders_of(config: PretrainedConfig) -> list[int]:
    """Return the ids that stand for rows of pictures, videos and sounds."""
    kinds = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token")
    named = {value for name, value in vars(config).items() if name.startswith(kinds) and isinstance(value, int)}
    return sorted(token for token in named if token < config.get_text_config().vocab_size)


@contextmanager
def opened(folder: Path, way: str, resident: int | None) -> Iterator[Engine]:
    """Open an engine that decodes in this way."""
    named, policy = WAYS[way]
    draft = folder.with_name(named) if named in HEADS else named
    tree = None if policy is None else TreeSettings(policy=policy)
    with Engine.from_pretrained(
        folder, draft=draft, device="cpu", dtype="float32", context_tokens=1024, parallel=COMPANY + 2, tree=tree,
        limits=MemoryLimits(max_resident_layers=resident), draft_check=False, self_check=way == "plain",
    ) as engine:  # fmt: skip
        if resident is not None:
            model = engine._loaded.target
            model._chunk_rows = model.layer_rows = CHUNK_ROWS
        yield engine


def write_heads(folder: Path, family: Family) -> None:
    """Write random heads of the family's model beside its folder."""
    tokens = torch.arange(int(family.model.config.get_text_config().vocab_size))
    head = new_eagle3(family.model, default_aux_layers(family.model.config), tokens, named="the head", seed=1)
    head.save(folder.with_name("eagle3"))
    drafter = new_drafter(family.model, "dflash", candidates=0, seed=1)
    write_drafter(folder.with_name("dflash"), drafter)


def sight_of(engine: Engine) -> Sight:
    """Return what the engine's target sees with."""
    sight = engine._loaded.sight
    assert sight is not None
    return sight


@torch.no_grad()
def say_difference(family: Family, prompt: PicturePrompt, truth: Sequence[int], ours: Sequence[int]) -> bool:
    """Print where a greedy text first differs; return whether rounding decides between the two tokens."""
    place = next((at for at, (one, other) in enumerate(zip(truth, ours, strict=False)) if one != other), len(ours))
    if place == len(ours):
        print(f"  a text of {len(ours)} tokens ends early, or failed")
        return False
    for part in family.model.modules():
        if hasattr(part, "rope_deltas"):
            part.rope_deltas = None
    ids = torch.tensor([[*prompt.ids, *truth[:place]]])
    rows = (1, len(prompt.ids))
    inputs = {
        key: nn.functional.pad(value, (0, place)) if value.shape == rows else value
        for key, value in prompt.inputs.items()
        if key != "attention_mask"
    }
    logits = family.model(input_ids=ids, **inputs, use_cache=False).logits[0, -1]
    gap = float((logits[truth[place]] - logits[ours[place]]) / logits.abs().max())
    print(f"  token {place}: {ours[place]} in place of {truth[place]}, {gap:.1e} of the largest logit below it")
    return gap < NEAR_TIE


def tokens_of(text: GenerationResult | Exception) -> list[int]:
    """Return the tokens of a text of several; none of one that failed."""
    return [] if isinstance(text, Exception) else list(text.token_ids)


def count_equal(name: str, folder: Path, family: Family, asked: Asked) -> int:
    """Print how many texts are equal in each way, and return how many are not."""
    count, greedy, drawn_by = asked.num_prompts, asked.options(0.0), asked.options(0.8)
    prompts = prompts_of(family, count)
    truths = [generated(family, prompt, count=asked.num_tokens) for prompt in prompts]
    words = list(range(40, 52))
    drawn: list[list[int]] | None = None
    different = 0
    for way in WAYS if name == WITH_LAYER else list(WAYS)[:-1]:
        for resident in (None, 0):
            with opened(folder, way, resident) as engine:
                results = [engine.generate(prompt, **greedy) for prompt in prompts]
                alone = [list(result.token_ids) for result in results]
                rate = sum(result.tokens_per_pass for result in results) / count
                requests = [engine.request(prompt, **greedy) for prompt in prompts]
                mixed = [text for request in requests for text in (request, engine.request(words, **greedy))]
                found = dict(engine.generate_many(mixed))
                company = [tokens_of(found[2 * number]) for number in range(count)]
                if drawn is None:
                    drawn = [list(engine.generate(prompt, **drawn_by).token_ids) for prompt in prompts]
                found = dict(engine.generate_many([engine.request(prompt, **drawn_by) for prompt in prompts]))
                sampled = [tokens_of(found[number]) for number in range(count)]
                numbers = [
                    sum(ours == theirs for ours, theirs in zip(texts_of, expected, strict=True))
                    for texts_of, expected in ((alone, truths), (company, truths), (sampled, drawn))
                ]
                different += 3 * count - sum(numbers)
                for texts_of in (alone, company):
                    for prompt, truth, ours in zip(prompts, truths, texts_of, strict=True):
                        if ours != truth:
                            different -= say_difference(family, prompt, truth, ours)
                place = "streamed" if resident == 0 else "resident"
                told = f"{numbers[0]} alone, {numbers[1]} in company, {numbers[2]} at 0.8"
                runs = f"{rate:.2f} tokens a pass, {sight_of(engine).num_runs} tower runs"
                print(f"{name}: {way}, {place}: of {count} texts equal: {told}; {runs}", flush=True)
    return different


def use_files(engine: Engine, kind: str, folder: Path, prompt: PicturePrompt) -> None:
    """Let texts begin on files of this kind."""
    if kind == "slots":
        folder.mkdir(exist_ok=True)
        engine.prefix_cache.slots = Slots(folder, engine.pair, engine.run_config)
    elif kind == "prompt cache":
        cache = PromptCache(folder.with_suffix(".safetensors"), engine.pair, engine.run_config)
        cache.keep_beginning([engine.request(prompt, max_new_tokens=1).keys])
        engine.prefix_cache.prompt_cache = cache


def count_kept(name: str, folder: Path, family: Family, kind: str, asked: Asked) -> int:
    """Print what a further question finds of these rows, and return 1 where it is another picture's, or a text wrong.

    Families with states have no prompt cache.
    """
    one, other = (seeing_prompt(family, seeds) for seeds in ((1, 2), (3, 2)))
    more = seeing_prompt(family, (1, 2), words=f"{family.prompt} And why?")
    truth, truth_of_more = (generated(family, of, count=asked.num_tokens) for of in (other, more))
    greedy, files = asked.options(0.0), folder.parent / f"{name}-{kind.replace(' ', '-')}"
    with opened(folder, "trees and lookup", None) as engine:
        try:
            use_files(engine, kind, files, one)
        except Exception as error:
            print(f"{name}: {kind}: {error}")
            return 0
        engine.generate(one, **greedy)
        engine.prefix_cache.store()
        if kind != "memory":
            engine.forget()
        runs = sight_of(engine).num_runs
        again = engine.generate(more, reuse=True, **greedy)
        runs = sight_of(engine).num_runs - runs
        engine.forget()
        if kind == "memory":
            engine.generate(one, **greedy)
        found = engine.generate(other, reuse=True, **greedy)
    first = one.image_rows[0][1]
    is_wrong = found.cached_tokens >= first or list(found.token_ids) != truth
    is_wrong |= list(again.token_ids) != truth_of_more
    print(
        f"{name}: {kind}: another picture begins on {found.cached_tokens} of {len(other.ids)} rows (its own begin at "
        f"{one.image_rows[0][0]}); the same one under more words on {again.cached_tokens} of {len(more.ids)}, with "
        f"{runs} tower runs{'; WRONG' if is_wrong else ''}"
    )
    return int(is_wrong)


def main() -> int:
    """Print a line for each family and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SEEING, default=list(SEEING), metavar="FAMILY")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=NEW, metavar="N", help="of each text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked, wrong = Asked(num_prompts=arguments.num_prompts, num_tokens=arguments.max_new_tokens), 0
    for name in arguments.only:
        family = SEEING[name]()
        # Random models write them, and transformers then reads padding in their place.
        family.model.generation_config.suppress_tokens = placeholders_of(family.model.config)
        with tempfile.TemporaryDirectory() as room:
            folder = Path(room) / "model"
            family.model.save_pretrained(folder)
            family.processor.tokenizer.save_pretrained(folder)
            if name == WITH_LAYER:
                add_predicting_layer(folder, family)
            write_heads(folder, family)
            wrong += count_equal(name, folder, family, asked)
            wrong += sum(count_kept(name, folder, family, kind, asked) for kind in KINDS)
    print(f"{wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    exit_with(main)
