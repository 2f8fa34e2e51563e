"""Rows of a table completed batch by batch: what Ray Data's `map_batches` wants of a class, which loads its pair once.

    texts = ray.data.read_parquet("prompts.parquet").map_batches(
        BatchGenerator, fn_constructor_kwargs={"max_new_tokens": 64, "seed": 7},
        compute=ray.data.ActorPoolStrategy(size=2), batch_size=64)

It knows nothing of Ray, and works on any mapping of columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.text.request import TextRequest
    from edgespec.text.results import GenerationResult

NEW_COLUMNS = ("text", "finish_reason", "num_tokens", "error")


class BatchGenerator:
    """Completes the prompts of a batch; a row that fails has its error in a column, and no text."""

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        draft: str | Path | None = None,
        prompt_column: str = "prompt",
        id_column: str | None = None,
        options: Mapping[str, Any] | None = None,
        parallel: int = 4,
        **texts: Any,
    ) -> None:
        """Load a pair; without a target, the built-in one. Raises EdgespecError.

        A row's noise is that of its value in `id_column`, or else of its prompt. `options` are those of
        `Engine.from_pretrained`, `texts` those of `Engine.generate`: `max_new_tokens`, `temperature`, `seed`.
        """
        from edgespec.engine import Engine

        self._prompts, self._ids, self._texts = prompt_column, id_column, {"seed": 0, **texts}
        self._engine = Engine.from_pretrained(target, draft=draft, **{"parallel": parallel, **(options or {})})

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the batch with the columns text, finish_reason, num_tokens and error."""
        for column in filter(None, (self._prompts, self._ids)):
            if column not in batch:
                listed = ", ".join(batch)
                what = f"the table has no column '{column}', only {listed}."
                raise EdgespecError("E_PROMPT_INVALID", what, "Name it with prompt_column or id_column.")
        prompts = batch[self._prompts]
        names = batch[self._ids] if self._ids is not None else [str(prompt) for prompt in prompts]
        rows: list[dict[str, Any]] = [{} for _ in prompts]
        requests: list[tuple[int, TextRequest]] = []
        for number, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            try:
                requests.append((number, self._engine.request(_prompt(prompt), name=_name(name), **self._texts)))
            except EdgespecError as error:
                rows[number] = _new_columns(error)
        for place, result in self._engine.generate_many([request for _, request in requests]):
            rows[requests[place][0]] = _new_columns(result)
        return {**batch, **{column: [row[column] for row in rows] for column in NEW_COLUMNS}}


def _prompt(value: Any) -> Any:
    """Return a text, or messages as a list, which tables have as an array; others refuse what is neither."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, str) else value


def _name(value: Any) -> str:
    """Return a row's name; raises EdgespecError where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise EdgespecError("E_PROMPT_INVALID", f"the row's id is {value}.", "Give each row an id.")
    return str(value)


def _new_columns(result: GenerationResult | Exception) -> dict[str, Any]:
    values: tuple[Any, ...]
    match result:
        case EdgespecError():
            values = None, "error", 0, f"{result.code}: {result.what}"
        case Exception():
            values = None, "error", 0, f"{type(result).__name__}: {result}"
        case _:
            values = result.text, result.finish_reason, len(result.token_ids), None
    return dict(zip(NEW_COLUMNS, values, strict=True))
