"""Programs that begin with torch and transformers imported: a process that has them forks itself for each.

Whoever starts one starts a small process, whose streams, folder and environment are the program's. Signals that it gets
are passed on, and it ends as the program does. For tests of what a program does once it runs: those of how it begins,
and of what it imports, start one of their own. As it runs in no session of its terminal, a test of jobs does, too.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "edgespec.engine", "edgespec.cli.chat.loop", "edgespec.cli.chat.line_editor", "edgespec.serve.run",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


@contextlib.contextmanager
def warm_programs(path: Path) -> Iterator[list[str]]:
    """Yield what begins the command of such a program in place of `python`; `path` is that of a socket to be made."""
    if sys.platform == "win32":  # which has no forks
        yield [sys.executable]
        return
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        command = [sys.executable, "-m", "tests.support.warm_program", str(listening.fileno())]
        server = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[listening.fileno()],
            start_new_session=True,
        )  # fmt: skip
    try:
        assert server.stdout is not None
        server.stdout.read(1)  # what a test waits for is its program alone
        yield [sys.executable, "-IS", __file__, str(path)]
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with whatever a test that failed has left
        server.communicate()


def _serve(listening: socket.socket) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    os.write(1, b".")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for programs
    while 0 not in select.select([0, listening], [], [])[0]:  # as long as whoever began this lives
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            _begin(connection)
            return
        connection.close()


def _begin(connection: socket.socket) -> None:
    """Run a program in a process below this one, which says how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(connection, 65536, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(65536)
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    asked = json.loads(data)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        old = getattr(sys, name)
        new = open(old.fileno(), mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    _, module, *arguments = asked["arguments"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _ask(path: str, arguments: list[str]) -> None:
    """Have a program begun with this process's streams, and end as it does."""
    passed_on = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGWINCH)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    asked = {"arguments": arguments, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
    answers = connection.makefile()
    pid = int(answers.readline())

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = int(answers.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    first, *others = sys.argv[1:]
    if others:
        _ask(first, others)
    else:
        _serve(socket.socket(fileno=int(first)))
