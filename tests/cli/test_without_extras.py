"""Rows are run and read without the libraries of the server, and without those that a run does not use."""

import subprocess
import sys

from tests.offload.gguf.test_tiny_models import TINY

BLOCKED = """
import sys

EXTRAS = ("starlette", "uvicorn", "prometheus_client", "llguidance", "pyarrow", "ray", "PIL")

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ImportError(name)

sys.meta_path.insert(0, Blocks())
from edgespec.cli.prompts.rows import parse_row
from edgespec.serve.response_items import items_of
from edgespec.cli import run

row = parse_row({"url": "/v1/responses", "body": {"input": "a", "tools": [{"type": "web_search"}]}}, "line 1")
assert (row.kind, row.unknown_keys) == ("response", {"tools[web_search]"}), row
assert items_of({"content": "a"}, "completed")[0]["type"] == "message"
for model in ([], ["-m", GGUF, "-md", GGUF]):
    assert run(["generate", *model, "--raw", "-p", "def main(", "-n", "4", "--no-self-check"]) == 0
unused = {"bitsandbytes", "torch._inductor.compile_fx", "peft"}
assert not unused & set(sys.modules), unused & set(sys.modules)
"""


def test_a_run_needs_no_library_of_the_server_and_imports_none_that_it_does_not_use() -> None:
    """`pip install edgespec` alone has none of the former. bitsandbytes brings torch's compiler, and takes a second."""
    program = f"GGUF = {str(TINY / 'llama.gguf')!r}\n{BLOCKED}"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout
