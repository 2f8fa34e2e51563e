"""Rows are run and read without the libraries of the server: `pip install edgespec` alone has none of them."""

import subprocess
import sys

BLOCKED = """
import sys

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("starlette", "uvicorn", "prometheus_client", "llguidance", "pyarrow", "ray"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocks())
from edgespec.cli.prompts.rows import parse_row
from edgespec.serve.response_items import items_of
from edgespec.cli import main

row = parse_row({"url": "/v1/responses", "body": {"input": "a", "tools": [{"type": "web_search"}]}}, "line 1")
assert (row.kind, row.unknown_keys) == ("response", {"tools[web_search]"}), row
assert items_of({"content": "a"}, "completed")[0]["type"] == "message"
sys.argv = ["edgespec", "generate", "-p", "def main(", "-n", "2", "--no-self-check"]
main()
"""


def test_rows_need_no_library_of_the_server() -> None:
    outcome = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout
