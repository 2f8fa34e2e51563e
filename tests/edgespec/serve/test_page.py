"""The page's files: who gets them, as what, and that they ask for nothing from elsewhere."""

import re

import httpx
import pytest

from edgespec.serve.page_files import FILES, FOLDER
from tests.edgespec.serve.conftest import KEY, Started

ASKED = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 16, "seed": 7, "stream": True}


def test_each_file_has_its_type_and_a_policy_that_lets_in_no_other(client: httpx.Client) -> None:
    kinds = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
        "woff2": "font/woff2",
    }
    for path, file in FILES.items():
        found = client.get(path)
        assert found.status_code == 200, path
        assert found.content == file.read_bytes()
        assert found.headers["content-type"].partition(";")[0] == kinds[file.suffix[1:]]
        assert found.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[kind] for kind in ("script-src", "style-src", "font-src", "connect-src")} == {"'self'"}
        assert policy["img-src"] == "'self' data:"  # what the page has itself: nothing is fetched
        assert {policy[kind] for kind in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


def test_no_file_is_left_out_and_none_names_another_place() -> None:
    licences = {*FOLDER.glob("libraries/*.LICENSE")}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == {*FILES.values()} | licences
    assert len(licences) == 4
    sizes = {path.name: path.stat().st_size for path in FILES.values()}
    assert sum(sizes.values()) < 1_000_000
    seldom = ("KaTeX_", "katex.", "highlight.")  # fetched when a message needs them
    assert sum(size for name, size in sizes.items() if not name.startswith(seldom)) < 170_000
    for path in FILES.values():
        if path.parent == FOLDER:
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "//" not in re.sub(r"(^|\s)//[^\n]*", "", text, flags=re.MULTILINE), path  # comments apart
            assert not re.search(r"innerHTML|\beval\b|<script>|<style|\sstyle=|\son[a-z]+=", text), path


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/%2e%2e/app.py", "/page/libraries/", "/page", "/page/..%2fapp.py",
     "/page//etc/passwd", "/page/libraries/../../guard.py", "/page/main.js%00", "/page/MAIN.JS"],
)  # fmt: skip
def test_no_other_path_gives_a_file(client: httpx.Client, path: str) -> None:
    request = client.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())  # as it is written, which clients tidy
    found = client.send(request)
    assert found.status_code in {307, 404}
    assert "import" not in found.text


def test_the_page_needs_no_key_and_what_it_asks_does(start: Started) -> None:
    _, address = start(api_key=KEY)
    assert {httpx.get(address + path).status_code for path in FILES} == {200}
    assert httpx.get(address + "/props").status_code == 401
    assert httpx.get(address + "/page/other.js").status_code == 401  # an open path is one of the files
    assert httpx.post(address + "/v1/chat/completions", json=ASKED).status_code == 401


@pytest.mark.parametrize("headers", [{"host": "rebound.example"}, {"origin": "https://foreign.example"}])
def test_other_names_and_pages_do_not_get_the_page(client: httpx.Client, headers: dict[str, str]) -> None:
    assert {client.get(path, headers=headers).status_code for path in FILES} == {403}


def test_a_stream_says_on_request_what_the_draft_foresaw(client: httpx.Client) -> None:
    assert '"draft"' not in client.post("/v1/chat/completions", json=ASKED).text
    # What repeats itself is looked up whatever the clock says of the draft.
    asked = [{"role": "user", "content": "x = [1, 2, 3]\ny = [1, 2, 3]\n" * 6}]
    body = {**ASKED, "messages": asked, "max_tokens": 40, "temperature": 0, "stream_options": {"include_draft": True}}
    lines = client.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
    passes = [chunk["draft"] for chunk in chunks if "draft" in chunk]
    timings = next(chunk["timings"] for chunk in chunks if "timings" in chunk)
    said = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert "".join(text for one in passes for text, _ in one["tokens"]) == said
    assert sum(sum(one["nodes_by_depth"]) for one in passes) == timings["draft_n"] > 0
    assert sum(foreseen for one in passes for _, foreseen in one["tokens"]) == timings["draft_n_accepted"] > 0
    assert all(one["num_accepted"] <= len(one["nodes_by_depth"]) for one in passes)
    refused = client.post("/v1/completions", json={"prompt": "a", "stream_options": {"include_draft": True}})
    assert refused.json()["error"]["param"] == "stream_options.include_draft"
