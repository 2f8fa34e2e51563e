"""The models that clients may name: the base, and the base with each of its adapters as BASE:ADAPTER.

The base has the adapters that count in texts which name none. A server without adapters takes any name for its model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from edgespec.pair.adapters import GivenAdapter
from edgespec.serve.body import Fields
from edgespec.serve.refusal import BAD_REQUEST, NOT_FOUND, RefusalError
from edgespec.serve.request_queue import Job
from edgespec.text.request import TextOptions
from edgespec.validation import shown

J = TypeVar("J", bound=Job)


class LoraScale(Fields):
    """How much an adapter counts, by its place among those of the server, as llama.cpp has it."""

    id: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model by the name that clients have for it."""

    name: str
    adapter: str | None  # None: those that count in texts which name none
    given: tuple[GivenAdapter, ...]  # all of the server

    def of(self, job: J, lora: Sequence[LoraScale] | None = None) -> J:
        """Return the job with the model's adapters, or with those of a request's `lora`, where others count nothing.

        Raises RefusalError for those that the server lacks, and where both choose.
        """
        if lora is None:
            adapters: Any = None if self.adapter is None else [self.adapter]
        else:
            if self.adapter is not None:
                what = f"'lora' and the model '{self.name}' both choose adapters. Leave out one of them."
                raise _wrong(what)
            adapters = [self._scaled(one) for one in lora]
        options: TextOptions = {**job.options, "adapters": adapters}
        return job if adapters is None else replace(job, options=options)

    def _scaled(self, one: LoraScale) -> tuple[str, float]:
        if not 0 <= one.id < len(self.given):
            known = ", ".join(f"{number} is {each.name}" for number, each in enumerate(self.given))
            raise _wrong(f"'lora' names the adapter {one.id}, which is not here ({known or 'the server has none'}).")
        return self.given[one.id].name, one.scale


def served_models(base: str, given: Sequence[GivenAdapter]) -> Iterator[ServedModel]:
    """Yield the base, and the base with each adapter."""
    for adapter in (None, *(one.name for one in given)):
        name = base if adapter is None else f"{base}:{adapter}"
        yield ServedModel(name=name, adapter=adapter, given=tuple(given))


def asked_model(base: str, given: Sequence[GivenAdapter], asked: Any) -> ServedModel:
    """Return the model that the field `model` of a body asks for; raises RefusalError for one that is not here."""
    models = {model.name: model for model in served_models(base, given)}
    if not given or asked is None or asked == "" or not isinstance(asked, str):
        return models[base]
    if asked not in models:
        what = f"there is no model {shown(asked)} here. There are: {', '.join(models)}."
        raise RefusalError(NOT_FOUND, what, code="model_not_found", field="model")
    return models[asked]


def adapter_list(given: Sequence[GivenAdapter]) -> list[dict[str, Any]]:
    """Return the adapters as llama.cpp lists them: those with a scale count in texts that name none."""
    return [
        {"id": number, "name": one.name, "path": str(one.adapter.path), "scale": one.scale}
        for number, one in enumerate(given)
    ]


def _wrong(what: str) -> RefusalError:
    return RefusalError(BAD_REQUEST, what, code="unsupported_parameter", field="lora")
