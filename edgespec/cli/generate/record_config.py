"""Every setting of a run that shapes its texts, by name: what results must have in common to be mixed.

Where texts do not depend on trees, those are no part of it: they may differ when a run is resumed, and on each machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.generate.requests import RunSettings
from edgespec.cli.generate.resume import CHAT_TEMPLATE, CONTEXT, DAY, STOP_TOKENS, TOKENIZER, Results
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.tree.settings import TreeOptions, TreeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.pair.pair import ModelPair
    from edgespec.placement.pair_setup import PairSetup

TREE = "tree."


def record_config(setup: PairSetup, run: RunSettings) -> dict[str, Any]:
    """Return the settings: models by their content, so that a folder may move, and trees by what is not default."""
    from edgespec.pair.folder import fingerprint
    from edgespec.placement.number_formats import quant_named

    pair, run_config, tree = setup.pair, setup.run_config, setup.tree
    default = dataclasses.asdict(TreeSettings())
    chosen = {name: value for name, value in dataclasses.asdict(tree).items() if value != default[name]}
    drafts = [pair.draft] if pair.draft else []
    draft_quant = quant_named(pair.draft, run_config.draft_quant)
    if tree.is_lossless and tree.children == "coupled":
        chosen = {}
        if pair.at_hand:  # any of them may have been chosen, and may be when the run goes on
            drafts, draft_quant = [one.model for one in pair.at_hand if one.model], "chosen"
    return {
        "target": f"{pair.target.folder.name} {fingerprint(pair.target)}",
        "draft": ", ".join(f"{draft.named.name} {fingerprint(draft)}" for draft in drafts) or None,
        "quant": quant_named(pair.target, run_config.quant),
        "draft_quant": draft_quant,
        "dtype": str(run_config.dtype).removeprefix("torch."),
        "device": run_config.device.type,
        **({"exact": True} if run_config.exact else {}),
        **_adapter_fields(pair),
        **sampling_fields(run.sampling),
        **pair.default_options(),
        "seed": run.seed,
        "max_new_tokens": run.max_new_tokens,
        CONTEXT: run.max_context,
        TOKENIZER: _digest(_tokenizer_content(pair.tokenizer)),
        STOP_TOKENS: sorted(pair.stop_tokens),
        CHAT_TEMPLATE: _digest(template) if (template := pair.tokenizer.chat_template) and not run.raw else None,
        DAY: None if run.day is None else run.day.isoformat(),
        "raw": run.raw,
        "system": run.system,
        **({"template_args": pair.template_args} if pair.template_args else {}),
        "stop": list(run.stop),
        **({} if run.skip_special_tokens else {"skip_special_tokens": False}),
        "grammar": None if run.grammar is None else f"{run.grammar.form} {run.grammar.text}",
        "logprobs": run.logprobs,
        **_budget_fields(pair),
        **({} if run.prompt_logprobs is None else {"prompt_logprobs": run.prompt_logprobs}),
        **{TREE + name: _as_json(value) for name, value in chosen.items()},
    }


def _adapter_fields(pair: ModelPair) -> dict[str, Any]:
    """Return the adapters that rows may name, and of how much each counts in rows that name none."""
    found = {given.name: [given.digest, given.scale] for given in pair.target.adapters}
    return {"adapters": found} if found else {}


def _budget_fields(pair: ModelPair) -> dict[str, Any]:
    if pair.reasoning_budget in (None, -1):
        return {}
    return {"reasoning_budget": [pair.reasoning_budget, pair.reasoning_budget_message]}


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return all that makes tokens of text and text of tokens, however its files write it."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # neither is used here, and whether a call has turned them off already says nothing
    backend.no_padding()
    return [backend.to_str(), tokenizer.clean_up_tokenization_spaces]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def trees_as_begun(trees: TreeOptions, results: Results) -> Iterator[TreeOptions]:
    """Yield the trees that results may have been begun with, where a profile has come, gone or changed since."""
    if trees.profile != "auto":
        return
    yield dataclasses.replace(trees, profile="none")
    record = next((entry.record for entry in results.entries if not entry.failed), {})
    try:
        came_from_a_profile = record["spec"]["plan"]["profile"] is not None
        explicit: dict[str, Any] = {
            name.removeprefix(TREE): tuple(value) if isinstance(value, list) else value
            for name, value in record["config"].items()
            if name.startswith(TREE)
        }
        if came_from_a_profile and not trees.explicit:
            yield TreeOptions(explicit=explicit)
    except (AttributeError, KeyError, TypeError, EdgespecError):
        return  # of a format without them, edited by hand, or of another version


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def sampling_fields(sampling: SamplingSettings) -> dict[str, Any]:
    """Return the sampling settings under their usual names."""
    return {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": int(sampling.top_k),
        "min_p": float(sampling.min_p),
        "repetition_penalty": float(sampling.repetition_penalty),
        "presence_penalty": float(sampling.presence_penalty),
        "frequency_penalty": float(sampling.frequency_penalty),
        "logit_bias": {str(token): float(bias) for token, bias in dict(sampling.logit_bias).items()},
        "ignore_eos": sampling.ignore_eos,
    }
