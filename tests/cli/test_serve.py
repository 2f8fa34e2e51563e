"""`edgespec serve` on the command line: what is refused before a model is read."""

import signal
import socket
from pathlib import Path

import httpx
import pytest

from edgespec.cli.serve.command import make_table_of_tokens
from edgespec.engine import Engine
from edgespec.sampling import matcher
from tests.cli.conftest import RunCli
from tests.support.running_server import running_server


def test_an_address_that_is_taken_is_known_before_weights_are_read(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Engine, "__init__")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli(["--port", str(port)], command="serve")
    assert result.code == 2
    assert f"--port {port} cannot be listened at (Address already in use)" in result.err


def test_other_machines_need_a_key_that_is_there(run_cli: RunCli, tmp_path: Path) -> None:
    assert "there is no key" in run_cli(["--host", "0.0.0.0"], command="serve").err
    empty = tmp_path / "key"
    empty.write_text("\n")
    assert run_cli(["--api-key-file", str(empty)], command="serve").code == 2
    assert "no-such-file" in run_cli(["--api-key-file", "no-such-file"], command="serve").err


def test_a_folder_of_conversations_is_checked_and_the_prompt_cache_refused(run_cli: RunCli, tmp_path: Path) -> None:
    assert "--slots-dir" in run_cli(["--prompt-cache", str(tmp_path / "file")], command="serve").ended(2).err
    (tmp_path / "file").touch()
    taken = run_cli(["--port", "18089", "--slots-dir", str(tmp_path / "file")], command="serve").ended(2)
    assert f"'{tmp_path / 'file'}' cannot be a folder of conversations" in taken.err
    assert "--slots-dir" in taken.err
    assert "--slots-size: 'much' is not a size" in run_cli(["--slots-size", "much"], command="serve").err
    alone = run_cli(["--slots-size", "1GiB"], command="serve").ended(2)
    assert "--slots-size bounds the files of --slots-dir" in alone.err


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows ends programs without a signal")
def test_termination_ends_a_text_and_its_conversation_is_written(tmp_path: Path, warm: list[str]) -> None:
    body = {"prompt": "def total(values):\n" * 4, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with running_server("-c", "512", "--slots-dir", str(tmp_path), python=warm) as (address, process):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 143
    assert len(list(tmp_path.glob("conversation-*"))) == 1


def test_prompts_may_be_read_anew(warm: list[str]) -> None:
    body = {"prompt": "def total(values):\n" * 4, "max_tokens": 1}
    with running_server("-c", "512", "--no-cache-prompt", python=warm) as (address, _):
        for wish, is_cached in (({}, False), ({}, False), ({"cache_prompt": True}, True)):
            usage = httpx.post(f"{address}/v1/completions", json={**body, **wish}, timeout=60).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is is_cached


def test_what_the_first_grammar_needs_is_made_before_clients_come() -> None:
    """It takes seconds for a large vocabulary, and no other thread runs meanwhile."""
    pytest.importorskip("llguidance")
    with Engine.from_pretrained(draft="none", context_tokens=64) as engine:
        matcher._tokens.cache_clear()
        make_table_of_tokens(engine)
        made = matcher._tokens.cache_info().misses
        engine.request("1", max_new_tokens=2, json_schema={"type": "integer"})
        assert (made, matcher._tokens.cache_info().misses) == (1, 1)
