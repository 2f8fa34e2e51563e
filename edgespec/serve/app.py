"""The paths of the server, and which module answers each."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec import __version__
from edgespec.errors import EdgespecError
from edgespec.serve import anthropic_messages, openai_schema
from edgespec.serve.answer import ErrorBody, Parts, event_stream, refused, whole
from edgespec.serve.guard import Guard
from edgespec.serve.meant_path import BASE, MODELS, MeantPaths, not_here
from edgespec.serve.metrics import Metrics
from edgespec.serve.openai_chat import chat_completion
from edgespec.serve.openai_completions import completion
from edgespec.serve.openai_responses import response
from edgespec.serve.page_files import page_routes
from edgespec.serve.read_body import read_json
from edgespec.serve.refusal import NOT_FOUND, RefusalError, refusal_of
from edgespec.serve.request_fields import UnusedFields
from edgespec.serve.request_queue import RequestQueue
from edgespec.serve.served_model import ServedModel, adapter_list, asked_model, served_models
from edgespec.serve.settings import ServerSettings
from edgespec.serve.tokens import detokenize, tokenize

LOG = logging.getLogger("edgespec.serve")
LEAST_BODY_BYTES, BYTES_A_TOKEN = 1 << 20, 64  # with all that JSON has around a prompt's words


class Writing(Protocol):
    """What a protocol makes of a job: a stream or one object."""

    def chunks(self) -> Parts:
        """Yield the parts of a stream."""

    async def whole(self) -> Mapping[str, Any]:
        """Return the whole answer."""


Protocols = Callable[[RequestQueue, ServedModel, Mapping[str, Any], UnusedFields], Awaitable[tuple[Writing, bool]]]
OnRequest = Callable[[str], None]  # a line a request


def make_app(queue: RequestQueue, settings: ServerSettings, *, on_request: OnRequest = lambda _line: None) -> Starlette:
    """Return the application; `on_request` gets a line for each request that was answered."""
    created, metrics = int(time.time()), Metrics(queue)
    given = queue.engine.pair.target.adapters
    most = most_bytes(queue.engine.max_context)
    settings = replace(settings, max_body_bytes=min(settings.max_body_bytes, most))

    def note(request: Request, status: int, what: str) -> None:
        metrics.answered(request.url.path, status)
        on_request(f"{request.method} {request.url.path}: {status}{what}")

    async def answered(request: Request, protocol: Protocols) -> Response:
        unused = UnusedFields(queue.say_once)
        fields = await read_json(request, settings)
        model = asked_model(settings.alias, given, fields.get("model"))
        answer, is_stream = await protocol(queue, model, fields, unused)
        found = event_stream(answer.chunks()) if is_stream else await whole(request, answer.whole())
        found.headers.update(unused.headers)
        return found

    def text_route(path: str, protocol: Any) -> Route:
        return Route(path, _noted(functools.partial(answered, protocol=protocol), note), methods=["POST"])

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(_request: Request) -> Response:
        found = [_model(queue, model, created) for model in served_models(settings.alias, given)]
        return JSONResponse({"object": "list", "data": found})

    async def one_model(request: Request) -> Response:
        names = {model.name: model for model in served_models(settings.alias, given)}
        model = names.get(request.path_params["name"])
        if model is None:
            listed = f"there is one model here, '{settings.alias}'." if not given else f"there are: {', '.join(names)}."
            raise HTTPException(NOT_FOUND, listed)
        return JSONResponse(_model(queue, model, created))

    async def adapters(_request: Request) -> Response:
        return JSONResponse(adapter_list(given))

    async def props(_request: Request) -> Response:
        return JSONResponse({**_props(queue, settings), "longest_pass_seconds": metrics.longest_pass_s})

    async def numbers(_request: Request) -> Response:
        return Response(metrics.in_text(), media_type=CONTENT_TYPE_LATEST)

    def json_route(
        path: str, answers: Callable[[RequestQueue, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
    ) -> Route:
        async def answer(request: Request) -> Response:
            return JSONResponse(await answers(queue, await read_json(request, settings)))

        return Route(path, answer, methods=["POST"])

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        storing = asyncio.create_task(queue.store_when_idle())
        try:
            yield
        finally:
            storing.cancel()
            queue.close()

    return Starlette(
        routes=[
            text_route("/v1/chat/completions", chat_completion),
            text_route("/v1/completions", completion),
            text_route("/v1/responses", response),
            text_route("/v1/messages", anthropic_messages.message),
            json_route("/v1/messages/count_tokens", anthropic_messages.count_tokens),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/lora-adapters", adapters),
            *page_routes(),
            Route("/health", health),
            Route("/props", props),
            Route("/metrics", numbers),
            json_route("/tokenize", tokenize),
            json_route("/detokenize", detokenize),
        ],
        middleware=[Middleware(MeantPaths), Middleware(Guard, settings=settings, error_body=_error_body)],
        exception_handlers={
            RefusalError: _refused, EdgespecError: _refused, HTTPException: _not_found, Exception: _broken,
        },
        lifespan=life,
    )  # fmt: skip


def most_bytes(context_tokens: int) -> int:
    """Return the size of a body that may have something to say in a context: longer ones only cost time."""
    return LEAST_BODY_BYTES + BYTES_A_TOKEN * context_tokens


def _noted(endpoint: Callable[[Request], Awaitable[Response]], note: Callable[[Request, int, str], None]) -> Any:
    async def call(request: Request) -> Response:
        started = time.monotonic()
        try:
            response = await endpoint(request)
        except (RefusalError, EdgespecError) as error:
            refusal = refusal_of(error)
            note(request, refusal.status, f", {refusal.code}")
            raise
        note(request, response.status_code, f" after {time.monotonic() - started:.2f} s")
        return response

    return call


def _error_body(path: str) -> ErrorBody:
    return anthropic_messages.error_body if path.startswith("/v1/messages") else openai_schema.error_body


async def _refused(request: Request, error: Exception) -> Response:
    return refused(refusal_of(error), _error_body(request.url.path))


async def _not_found(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that is not here."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == NOT_FOUND or path in ("/", BASE):
        if path.startswith(MODELS):
            what = f"{error.detail.rstrip('.')}."
        else:
            what = not_here(request.method, path, f"{request.url.scheme}://{request.headers.get('host', '')}")
        refusal = RefusalError(NOT_FOUND, what, code="not_found")
    else:
        allowed = (error.headers or {}).get("Allow", "another method")
        what = f"{request.method} is not taken at {path}, which takes {allowed}."
        refusal = RefusalError(error.status_code, what, code="refused")
    return refused(refusal, _error_body(request.url.path))


async def _broken(request: Request, error: Exception) -> Response:
    LOG.error("a request failed", exc_info=error)
    return refused(refusal_of(error), _error_body(request.url.path))


def _model(queue: RequestQueue, model: ServedModel, created: int) -> dict[str, Any]:
    context = queue.engine.max_context
    found = {"id": model.name, "object": "model", "created": created, "owned_by": "edgespec", "max_model_len": context}
    return found if model.adapter is None else {**found, "parent": model.name.removesuffix(f":{model.adapter}")}


def _props(queue: RequestQueue, settings: ServerSettings) -> dict[str, Any]:
    engine = queue.engine
    placement, slots = engine.placement, engine.prefix_cache.slots
    return {
        "version": __version__,
        "model": settings.alias,
        "context_tokens": engine.max_context,
        "texts": {"open": queue.num_open, "at_once": engine.num_texts, "may_wait": settings.max_waiting},
        "kept": {
            "texts": len(engine.prefix_cache),
            "tokens": engine.prefix_cache.num_tokens,
            "most_tokens": engine.run_config.all_tokens,
            "bytes": engine.prefix_cache.num_bytes,
            "most_bytes": engine.prefix_cache.most_bytes,
        },
        "slots": None
        if slots is None
        else {"conversations": slots.num_files, "bytes": slots.num_bytes, "most_bytes": slots.max_bytes},
        "placement": {
            "layers": placement.num_layers,
            "resident_layers": placement.num_resident,
            "streamed_bytes_per_pass": placement.pass_bytes,
        },
        "trees": {"policy": engine.tree.policy, "nodes": engine.tree.num_nodes, "tuned": engine.is_tuned},
        "sampling": {  # of texts whose requests do not say otherwise
            name: getattr(queue.sampling, name)
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        },
        "cache_prompt": settings.cache_prompt,
        "chat_template": engine.pair.tokenizer.chat_template,
    }
