"""The JSON record of one prompt: names that users of other tools know, stable from here on."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.cli.console import counted
from edgespec.cli.generate.record_config import sampling_fields
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import config_hash
from edgespec.errors import EdgespecError
from edgespec.text.logprob_entries import logprob_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from edgespec.text.results import GenerationResult
    from edgespec.tuning.step import StepResult

SCHEMA = "edgespec.result/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over answers, all that a run keeps of them."""

    tokens: int = 0
    seconds: float = 0.0  # of each text by itself
    pass_tokens: int = 0  # that came from passes
    text_passes: int = 0  # a pass of two texts counts twice
    passes: float = 0.0  # a pass of two texts counts once
    accepted: int = 0  # tokens that trees had
    looked_up: int = 0  # of these, by looked up text alone

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            pass_tokens=self.pass_tokens + other.pass_tokens,
            text_passes=self.text_passes + other.text_passes,
            passes=self.passes + other.passes,
            accepted=self.accepted + other.accepted,
            looked_up=self.looked_up + other.looked_up,
        )

    def in_words(self, *, by_clock_s: float | None = None) -> str:
        """Return tokens, tokens/s, tokens a pass and text, and passes; seconds are the texts' own, unless given."""
        total_s = self.seconds if by_clock_s is None else by_clock_s
        parts = [counted(self.tokens, "token"), *([f"{self.tokens / total_s:.1f} tok/s"] if total_s else [])]
        if self.text_passes:
            parts.append(f"{self.pass_tokens / self.text_passes:.2f} tok/pass")
        parts.append(counted(round(self.passes), "pass"))
        if self.looked_up:
            parts.append(f"{self.accepted - self.looked_up} from the draft, {self.looked_up} looked up")
        return " · ".join(parts)


def totals(results: Sequence[GenerationResult]) -> Totals:
    """Return the sums over answers."""
    passes = [step for result in results for step in result.passes]
    return Totals(
        tokens=sum(len(result.token_ids) for result in results),
        seconds=sum(result.total_s for result in results),
        pass_tokens=sum(len(step.tokens) for step in passes),
        text_passes=len(passes),
        passes=sum(1 / step.num_texts for step in passes),
        accepted=sum(step.num_accepted for step in passes),
        looked_up=sum(step.num_looked_up for step in passes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """A prompt that has ended, with its record."""

    request: Request
    record: dict[str, Any]
    totals: Totals  # of its answers

    @property
    def failed(self) -> bool:
        """Return whether the record holds an error."""
        return self.record["error"] is not None


def success_record(
    request: Request,
    engine: Engine,
    results: Sequence[GenerationResult],
    run: dict[str, Any],
    predicted_per_s: float | None,
) -> dict[str, Any]:
    """Return the record of a row whose turns are all answered; `run` is what all records of the run share.

    `predicted_per_s` is what the profile's plan promises.
    """
    pair = engine.pair
    answers = [_answer_fields(request, pair.tokenizer, result) for result in results]
    thought = [request.toolset.num_thought(pair, request.ids, result.token_ids) for result in results]
    ends = [_finish_reason(request, answer, result) for answer, result in zip(answers, results, strict=True)]
    parts = [
        _result_fields(engine, [result], predicted_per_s, (end, number))
        for result, end, number in zip(results, ends, thought, strict=True)
    ]
    per_turn = [{**answer, **part} for answer, part in zip(answers, parts, strict=True)]
    return {
        **_head(request),
        **answers[-1],
        "turns": [answer["text"] for answer in answers],
        "error": None,
        **(
            parts[0]
            if len(results) == 1
            else _result_fields(engine, results, predicted_per_s, (ends[-1], sum(thought)))
        ),
        **({"per_turn": per_turn} if len(results) > 1 else {}),
        "memory": {"gpu_peak_bytes": _gpu_peak_bytes(engine), "cpu_peak_bytes": peak_resident_bytes()},
        **_tail(request, run),
    }


def _answer_fields(request: Request, tokenizer: PreTrainedTokenizerBase, result: GenerationResult) -> dict[str, Any]:
    """Return an answer's text; where it has parts, what was said, and the whole message with thoughts and calls."""
    found: dict[str, Any] = {"text": result.text}
    if request.toolset.has_parts:
        message = request.toolset.message(tokenizer, request.ids, result.text)
        found = {"text": message["content"] or "", "message": message}
    return {**found, "parsed": _parsed(found["text"], result)} if request.parses else found


def _parsed(text: str, result: GenerationResult) -> Any:
    """Return what the JSON of an answer stands for; None where a bound has cut it."""
    try:
        return json.loads(text) if result.finish_reason == "stop" else None
    except ValueError:  # a string of the row's own has cut it
        return None


def _finish_reason(request: Request, answer: Mapping[str, Any], result: GenerationResult) -> str:
    """Return why an answer ended, as the server does: what a bound cut may lack a call."""
    has_ended = result.finish_reason == "stop" or request.toolset.has_one_call
    return "tool_calls" if has_ended and "tool_calls" in answer.get("message", ()) else result.finish_reason


def error_record(
    request: Request, results: Sequence[GenerationResult], error: EdgespecError, run: dict[str, Any]
) -> dict[str, Any]:
    """Return the record of a row that failed while it ran, with the turns that were answered before."""
    return {
        **_head(request),
        "text": None,
        "turns": [result.text for result in results],
        "error": {"type": error.code, "message": error.what, "fix": error.fix},
        "token_ids": [],
        "logprobs": None,
        "finish_reason": "error",
        "usage": None,
        "timings": None,
        "spec": None,
        "memory": None,
        **_tail(request, run),
    }


def run_fields(pair: ModelPair, run_config: RunConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Return what all records of a run share: models, formats, every setting that shapes the texts, and their hash."""
    import torch

    from edgespec.placement.number_formats import quant_named

    return {
        "model": str(pair.target.folder),
        "model_revision": _revision(pair.target.folder),
        "draft_model": str(pair.draft.named) if pair.draft else None,
        "quant": quant_named(pair.target, run_config.quant),
        "draft_quant": quant_named(pair.draft, run_config.draft_quant),
        "dtype": str(run_config.dtype).removeprefix("torch."),
        "device": str(run_config.device),
        "threads": torch.get_num_threads(),  # the most that are used
        "config": config,
        "config_hash": config_hash(config),
        "edgespec": __version__,
    }


def peak_resident_bytes() -> int | None:
    """Return the most memory that this process has held; None where the system does not say."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux that inherits the peak of the process that started this one.
        peak_kib = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        return int(peak_kib[1]) * 1024 if peak_kib else None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _result_fields(
    engine: Engine, results: Sequence[GenerationResult], predicted_per_s: float | None, ended: tuple[str, int]
) -> dict[str, Any]:
    """Return tokens, timings and trees of one text, or the sums of several; `ended` is why, and tokens of thought."""
    finish_reason, num_thought = ended
    passes = [step for result in results for step in result.passes]
    prompt_tokens = sum(result.prompt_tokens for result in results)
    cached_tokens = sum(result.cached_tokens for result in results)
    num_image_tokens = sum(result.image_tokens for result in results)
    image_tokens = {"image_tokens": num_image_tokens} if num_image_tokens else {}
    completion_tokens = sum(len(result.token_ids) for result in results)
    prefill_s = sum(result.prefill_s for result in results)
    total_s = sum(result.total_s for result in results)
    decode_s = total_s - sum(result.time_to_first_token_s for result in results)
    num_decoded = completion_tokens - len(results)  # the first token of each comes from the prompt's pass
    is_tuned = engine.tunes(results[0].sampling)
    decode_tps = num_decoded / decode_s if num_decoded > 0 and decode_s > 0 else None
    return {
        "token_ids": [token for result in results for token in result.token_ids],
        "logprobs": _logprobs(engine, results),
        "finish_reason": finish_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            **image_tokens,
            "completion_tokens": completion_tokens,
            "reasoning_tokens": num_thought,  # of these
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "timings": {
            "ttft_s": _rounded(results[0].time_to_first_token_s),
            "prefill_s": _rounded(prefill_s),
            "prefill_tps": _rounded((prompt_tokens - cached_tokens) / prefill_s),
            "decode_s": _rounded(decode_s),
            "decode_tps": _rounded(decode_tps),
            "total_s": _rounded(total_s),
        },
        "spec": {
            "mode": "off" if engine.tree.policy == "none" else "tree",
            "policy": engine.tree.policy,
            "draw": engine.policy.draw,
            "lossless": engine.tree.is_lossless,
            "tree_size": (engine.largest_tree if is_tuned else engine.tree).num_nodes or None,  # at most
            "tuned": is_tuned,
            "mean_tree_size": _rounded(sum(step.num_drafted for step in passes) / len(passes) if passes else None),
            "tree_depth": engine.tree.num_layers or None,
            "plan": {
                "profile": engine.profile.name if engine.profile else None,
                "predicted_tps": _rounded(predicted_per_s),
                "actual_tps": _rounded(decode_tps),
            },
            "passes": len(passes),
            "mean_texts": _rounded(sum(step.num_texts for step in passes) / len(passes) if passes else None),
            "draft_n": sum(step.num_drafted for step in passes),
            "draft_n_accepted": sum(step.num_accepted for step in passes),
            "lookup_n_accepted": sum(step.num_looked_up for step in passes),  # of these, by looked up text alone
            "mean_accept_len": _rounded(sum(len(step.tokens) for step in passes) / len(passes) if passes else None),
            "accept_lengths": [len(step.tokens) for step in passes],
            "draft_s": _rounded(sum(step.grow_s for step in passes)),
            "verify_s": _rounded(sum(step.target_s for step in passes)),
            **_near_ties(engine, passes),
        },
    }


def _near_ties(engine: Engine, passes: Sequence[StepResult]) -> dict[str, Any]:
    """Return how often near ties were decided by rows as in plain decoding, and what that cost; where it is asked."""
    if not engine.run_config.exact:
        return {}
    again = [step for step in passes if step.num_read_again]
    return {
        "near_ties": {
            "n": len(again),
            "n_turned": sum(step.turned for step in again),  # of these, to another token than the tree's row had
            "rows": sum(step.num_read_again for step in again),
            "s": _rounded(sum(step.decide_s for step in again)),  # of all texts that shared it
            "margin": _rounded(engine.near_tie_margin),
        }
    }


def _logprobs(engine: Engine, results: Sequence[GenerationResult]) -> list[dict[str, Any]] | None:
    """Return an entry for each token of the answers; None where none were requested."""
    logprobs = [found for result in results for found in result.logprobs]
    return logprob_fields(engine.pair.tokenizer, logprobs) if logprobs else None


def _head(request: Request) -> dict[str, Any]:
    row = request.row
    return {
        "schema": SCHEMA,
        "index": row.index,
        "id": row.id,
        "repeat": row.repeat,
        "category": row.category,
        "reference": row.reference,
        "meta": row.meta,
        "prompt": row.as_written,
        **({"images": list(row.image_digests)} if row.image_digests else {}),
        "truncated": None if request.truncated is None else asdict(request.truncated),
        "row_settings": row.settings.set_values(),
    }


def _tail(request: Request, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "sampling": {**sampling_fields(request.sampling), "seed": request.seed},
        "max_new_tokens": request.max_new_tokens,
        "stop": list(request.stop),
        **run,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _gpu_peak_bytes(engine: Engine) -> int | None:
    if engine.device.type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(engine.device)


def _revision(folder: Path) -> str | None:
    """Return the commit where the folder is a snapshot of the Hugging Face cache."""
    resolved = folder.absolute()
    return resolved.name if resolved.parent.name == "snapshots" else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
