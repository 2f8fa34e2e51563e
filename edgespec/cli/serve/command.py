"""`edgespec serve`: answer clients on this machine."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec import __version__
from edgespec.cli.console import Console, counted
from edgespec.cli.ctrl_c import counting_presses, ending_by, import_engine, leaving_tidily
from edgespec.cli.longest_context import open_longest
from edgespec.cli.open_pair import decided, open_pair_for
from edgespec.cli.options.console import console_options
from edgespec.cli.options.distribution import checked_sampling
from edgespec.cli.options.engine import EngineOptionsWithTarget
from edgespec.cli.options.machine import size_of
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import FOLDER, option, options_of
from edgespec.cli.prompts.read import read_text
from edgespec.cli.prompts.report import template_notes
from edgespec.doctor.checks import describe_size
from edgespec.errors import EdgespecError
from edgespec.hub.names import short_name
from edgespec.serve.listen import listen
from edgespec.serve.settings import DEFAULT_PORT, DEFAULT_WAITING, MAX_PORT, ServerSettings

if TYPE_CHECKING:
    from edgespec.config import SamplingSettings
    from edgespec.engine import Engine

DEFAULT_TEXTS = 4
PACKAGES = ("prometheus_client", "starlette", "uvicorn")
HOST_HELP = "Use this address; one that other machines reach needs --api-key-file."
ALIAS_HELP = "Give clients this name of the model. [default: the target's]"
KEY_HELP = "Let in only clients with the key in this file, one line."
ORIGIN_HELP = "Let pages of this origin ask, as https://example.org; repeatable."
TEMPERATURE_HELP = "Draw texts whose requests have no temperature with this one. [default: the model's, or 1]"
NO_CACHE_HELP = "Read each prompt anew, as if nothing were cached, unless its request says otherwise."
WAITING_HELP = "Let so many texts wait beyond those under way; others get status 429."
SLOTS_HELP = "Keep what was read of conversations in this folder, so that it survives a restart."
SLOTS_SIZE_HELP = "Let the files there have this size together; the oldest go first. [default: 16GiB]"
STOPPING = b"\nstopping: texts end after this pass (Ctrl-C again: within it)\n"
STOPPING_AT_ONCE = b"\nstopping at once\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen, and whom to answer."""

    host: str = option("--host", default="127.0.0.1", show_default=True, help=HOST_HELP)
    port: int = option(
        "--port", type=WholeRange(1, MAX_PORT), default=DEFAULT_PORT, show_default=True, help="Use this port."
    )
    num_texts: int = option(
        "-np", "--parallel", type=WholeRange(1), default=DEFAULT_TEXTS, show_default=True, metavar="N",
        help="Decode at most this many texts in each pass.",
    )  # fmt: skip
    max_waiting: int = option(
        "--max-waiting", type=WholeRange(0), default=DEFAULT_WAITING, show_default=True, help=WAITING_HELP
    )
    temperature: float | None = option(
        "--temp", "--temperature", type=float, callback=checked_sampling, help=TEMPERATURE_HELP
    )
    no_cache_prompt: bool = option("--no-cache-prompt", is_flag=True, help=NO_CACHE_HELP)
    alias: str | None = option("--alias", metavar="NAME", help=ALIAS_HELP)
    api_key_file: Path | None = option("--api-key-file", type=FOLDER, metavar="FILE", help=KEY_HELP)
    allow_origin: tuple[str, ...] = option("--allow-origin", multiple=True, metavar="URL", help=ORIGIN_HELP)
    slots_dir: Path | None = option("--slots-dir", type=FOLDER, metavar="DIR", help=SLOTS_HELP)
    slots_size: int | None = option("--slots-size", callback=size_of, metavar="SIZE", help=SLOTS_SIZE_HELP)

    def __post_init__(self) -> None:
        """Raise EdgespecError for a bound of files that are nowhere."""
        if self.slots_size is not None and self.slots_dir is None:
            what = "--slots-size bounds the files of --slots-dir, and no folder is named."
            raise EdgespecError("E_SETTING", what, "Add --slots-dir DIR, or leave out --slots-size.")

    def settings(self, alias: str) -> ServerSettings:
        """Return the server's settings; raises EdgespecError for what is unsafe."""
        key = None if self.api_key_file is None else read_text(str(self.api_key_file), what="a text file").strip()
        return ServerSettings(
            host=self.host,
            port=self.port,
            alias=self.alias or alias,
            api_key=key,
            allowed_origins=self.allow_origin,
            max_waiting=self.max_waiting,
            cache_prompt=not self.no_cache_prompt,
        )


@click.command(
    name="serve",
    short_help="Answer the clients of OpenAI's interface on this machine.",
    epilog="""\b
Examples:
  edgespec serve                                  the built-in pair: it continues Python
  edgespec serve TARGET -md DRAFT -c 16k -np 8
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Clients take http://127.0.0.1:8080/v1 as their base URL, and any key unless there is one.
""",
)
@options_of(ServeOptions, handed_on_as="options")
@options_of(EngineOptionsWithTarget, handed_on_as="engine_options")
@console_options(has_verbose=True)
def command(*, options: ServeOptions, engine_options: EngineOptionsWithTarget, console: Console) -> int:
    """Serve TARGET to clients of OpenAI's interface, several at a time.

    Each request is a line on stderr. Nothing is sent anywhere but to who asked.
    """
    missing = next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise EdgespecError(
            "E_SETTING", f"serving needs {missing}, which is not here.", "pip install 'edgespec[serve]'"
        )
    if engine_options.prompt_cache is not None:
        what = "--prompt-cache is for prompts that are known beforehand, and a server's are not."
        raise EdgespecError("E_SETTING", what, "Use --slots-dir, which keeps each conversation.")
    models = engine_options.models
    name = "edgespec" if models.target is None else short_name(models.target)
    settings = options.settings(name)
    with listen(settings) as listening:
        console.say(f"edgespec {__version__} · {name if models.target else 'the built-in pair'}")
        with _open(console, engine_options, options) as engine:
            for note in template_notes(engine.pair, engine.pair.template_args, has_system=False):
                console.say(note)
            if options.slots_dir is not None:
                _use_slots(console, engine, options.slots_dir, options.slots_size)
            with console.status("making the table of tokens for grammars"):
                make_table_of_tokens(engine)
            try:
                _serve(console, engine, settings, listening, options.temperature)
            finally:  # also where the system ends the program
                _store(console, engine, options.slots_dir)
    return 0


def _use_slots(console: Console, engine: Engine, folder: Path, max_bytes: int | None) -> None:
    """Let conversations go on from the files of a folder, and say what is there."""
    from edgespec.prefix_cache.slots import DEFAULT_SLOT_BYTES, Slots

    with console.status("checking conversations"):
        slots = Slots(
            folder, engine.pair, engine.run_config, max_bytes=DEFAULT_SLOT_BYTES if max_bytes is None else max_bytes
        )
    size = f"{describe_size(slots.num_bytes)} of {describe_size(slots.max_bytes)}"
    console.say(f"slots: '{folder}' has {counted(slots.num_files, 'conversation')} ({size})")
    engine.prefix_cache.slots = slots


def _store(console: Console, engine: Engine, folder: Path | None) -> None:
    if folder is not None:
        with console.status("writing conversations"):
            num_written = engine.prefix_cache.store()
        console.say(f"slots: {counted(num_written, 'conversation')} written to '{folder}'")


def make_table_of_tokens(engine: Engine) -> None:
    """Make what the first grammar needs: of 262,144 tokens it takes seconds, in which nobody would be served."""
    from edgespec.config import SamplingSettings
    from edgespec.sampling.grammar import json_schema_grammar
    from edgespec.text.request import grammar_for

    with suppress(EdgespecError):  # without llguidance, each request with a grammar says so
        grammar_for(json_schema_grammar({}), SamplingSettings(), engine.pair)


def _open(console: Console, options: EngineOptionsWithTarget, serving: ServeOptions) -> Engine:
    """Return the engine, with the longest context that fits for so many texts."""
    import_engine(console)
    with leaving_tidily():
        with console.status("reading headers"):
            pair = open_pair_for(console, options)
            temperature = serving.temperature
            if temperature is None:
                temperature = pair.default_sampling(draws=True).temperature
            pair = decided(pair, options, temperature=temperature, parallel=serving.num_texts)
        return open_longest(console, pair, options, temperature=temperature, num_texts=serving.num_texts)


def _sampling_line(sampling: SamplingSettings, generation_config: Mapping[str, Any], given: float | None) -> str:
    """Say how texts are drawn whose requests do not say it, and who says so."""
    is_stated = any(generation_config.get(name) is not None for name in ("temperature", "do_sample"))
    stated = "the model's" if is_stated else "the model states none"
    drawn = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    for name, neutral, words in (("top_k", 0, "top-k"), ("top_p", 1, "top-p"), ("min_p", 0, "min-p")):
        if sampling.temperature and (value := getattr(sampling, name)) != neutral:
            drawn += f", {words} {value:g}"
    return f"requests that do not say it: {drawn} ({stated if given is None else '--temp'})"


def _serve(
    console: Console, engine: Engine, settings: ServerSettings, listening: socket.socket, temperature: float | None
) -> None:
    from edgespec.serve.request_queue import RequestQueue
    from edgespec.serve.run import Server

    queue = RequestQueue(
        engine, max_waiting=settings.max_waiting, heartbeat_s=settings.heartbeat_s, temperature=temperature,
        cache_prompt=settings.cache_prompt,
    )  # fmt: skip
    server = Server(queue, settings, listening, on_request=console.say)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{server.port}"
    key = "the key of the file" if settings.api_key else "any key"

    def say_ready() -> None:
        most = describe_size(engine.prefix_cache.most_bytes or 0)
        rows = f"rows of {engine.run_config.all_tokens} tokens are kept, in {most} at most"
        console.say(f"context {engine.max_context} tokens · {engine.num_texts} texts at a time · {rows}")
        if not settings.cache_prompt:
            console.say("each prompt is read anew (--no-cache-prompt), unless its request has 'cache_prompt': true")
        console.say(_sampling_line(queue.sampling, engine.pair.target.generation_config, temperature))
        console.say(f"listening at {address}", breaks=False)
        console.say(f"clients: base URL {address}/v1, model '{settings.alias}', {key}", breaks=False)
        console.say("Ctrl-C ends the texts under way, and leaves")

    def stop(number: int) -> None:
        server.stop(at_once=number > 1)

    with (
        ending_by(stop),
        counting_presses(
            notices=(STOPPING, STOPPING_AT_ONCE), give_up=lambda: server.stop(at_once=True), on_press=stop
        ),
    ):
        server.run(say_ready)
