"""What the page claims of a talk: answers come, stop and stay, and hostile markup does nothing."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx

from tests.support.page_browser import FORGED, Page

CHAT = "/v1/chat/completions"
HOSTILE = (
    "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'><svg onload='window.hurt = 3'></svg>\n\n"
    "[link](javascript:window.hurt=4) ![far](https://foreign.example/p.png) <iframe src='https://foreign.example'>"
    "</iframe>\n\n<style>body{display:none}</style><p style='color:red' onclick='window.hurt=5'>p</p>\n\n"
    '<form action="https://foreign.example"><button>b</button></form> [data](data:text/html,<script>1</script>)\n\n'
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hurt=6></style></table></mtext></math>\n\n"
    '![a" onerror="window.hurt=7](x"onerror="window.hurt=8) [r](//foreign.example/p)\n\n```python\nprint(1)\n```\n'
)


def talking(page: Page) -> Iterator[tuple[str, Any]]:
    """Yield what should hold of a talk, and whether it does (an empty list and False count as not)."""
    from selenium.webdriver.common.keys import Keys

    page.open(max_tokens="24", seed="7")
    page.press("def main(" + Keys.ENTER)
    page.wait_for_answer()
    first = page.answer()
    said = httpx.post(page.address + CHAT, timeout=60, json={
        "messages": [{"role": "user", "content": "def main("}], "max_tokens": 24, "seed": 7,
    }).json()["choices"][0]["message"]["content"]  # fmt: skip
    yield "an answer is the one that the interface gives", "".join(first.split()) == "".join(said.split())
    numbers = page.one(".numbers")
    yield "its numbers are shown", "tokens/s" in numbers.text and "a pass" in numbers.text
    page.one(".numbers summary").click()
    yield "and the last tree is drawn", len(page.all("svg circle")) > 1
    page.click(".acts button", "Regenerate")
    page.wait_for_answer()
    yield "asked again with the same seed it is the same", page.answer() == first and len(page.all("article")) == 2

    page.click(".user .acts button", "Edit")
    page.press(Keys.CONTROL + "a" + Keys.NULL + "import os" + Keys.ENTER)
    page.wait_for_answer()
    yield "an edited message is asked anew", page.one(".user .body").text == "import os" and page.answer() != first
    second = page.answer()
    page.reload()
    yield "a conversation outlives a reload", page.answer() == second
    page.press("two" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "lines")
    yield "Shift+Enter makes a line", page.one("#prompt").get_attribute("value") == "two\nlines"


def stopping(page: Page) -> Iterator[tuple[str, Any]]:
    """Yield what holds of an answer that is stopped."""
    from selenium.webdriver.common.keys import Keys

    page.open(max_tokens="800", foreseen=True)
    page.ask("def main(")
    page.until(lambda: len(page.all(".assistant .body.tokens *")) > 1)
    page.press(Keys.ESCAPE)
    page.wait_for_answer()
    yield "Escape stops, and what came stays", "stopped" in page.one(".numbers").text and page.answer()
    yield "what the draft foresaw is marked", page.all(".assistant mark")
    page.until(lambda: httpx.get(f"{page.address}/props").json()["texts"]["open"] == 0)
    yield "the server stops too", True


def hostile(page: Page) -> Iterator[tuple[str, Any]]:
    """Yield what holds of an answer with markup, in a second conversation."""
    page.click("#new")
    page.driver.execute_script(FORGED, HOSTILE)
    page.ask("be hostile")
    page.wait_for_answer()
    page.one(".thoughts summary").click()
    for link in page.all(".assistant a"):
        page.driver.execute_script("arguments[0].removeAttribute('target')", link)
    bad = "img, script, iframe, form, style, math, [onerror], [onclick], [style], a:not([href^='http'])[href]"
    inside = [one for name in bad.split(", ") for one in page.all(f".assistant .body {name}")]
    yield "markup in an answer is text", not inside and "<script>" in page.answer()
    yield "and does nothing", page.driver.execute_script("return window.hurt") is None
    yield "code can be copied", page.all(".code button")
    yield "two conversations are kept", len(page.all("#list button")) == 2


def keeping(page: Page) -> Iterator[tuple[str, Any]]:
    """Yield what holds of names, of what is deleted, of refusals, and of the keyboard."""
    from selenium.webdriver.common.keys import Keys

    page.one("#title").clear()
    page.one("#title").send_keys("A name" + Keys.ENTER)
    page.press(Keys.TAB)
    page.reload()
    yield "a name is kept", page.one("#list [aria-current]").text == "A name"
    page.click("#more summary")
    page.click("#remove")
    page.driver.switch_to.alert.accept()
    page.until(lambda: len(page.all("#list button")) == 1)
    yield "a conversation can be deleted", True

    gone = "window.fetch = async () => { throw new TypeError('failed'); }"
    before = page.answer()
    page.driver.execute_script(gone)
    page.click(".user .acts button", "Edit")
    page.press("more" + Keys.ENTER)
    page.wait_for_answer()
    is_kept = page.one(".editing textarea").get_attribute("value").endswith("more") and page.answer() == before
    yield "an edit that fails loses neither the old nor the new", is_kept
    page.open(top_p="3")
    page.ask("wrong")
    page.wait_for_answer()
    yield "a refusal is shown as its sentence", "top_p" in page.one("#notice").text
    yield "and nothing is lost", page.one("#prompt").get_attribute("value") == "wrong"

    page.driver.execute_script(gone)
    page.press(Keys.ENTER)
    page.wait_for_answer()
    yield "a server that is gone is said", "does not answer" in page.one("#notice").text

    page.open()
    order: list[str] = []
    for _ in range(9):
        page.press(Keys.TAB)
        order.append(page.driver.execute_script("const one = document.activeElement; return one.id || one.tagName"))
    yield (
        "Tab goes from the top to the message",
        order == ["send", "BODY", "A", "new", "search", "title", "SUMMARY", "messages", "prompt"],
    )


def full_queue(page: Page, num_texts: int) -> Iterator[tuple[str, Any]]:
    """Yield what holds while the queue is full."""
    leaving = threading.Event()

    def occupy() -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True, "n": num_texts}
        with httpx.stream("POST", page.address + CHAT, json=body, timeout=60) as stream:
            for _ in stream.iter_lines():
                if leaving.is_set():
                    break

    thread = threading.Thread(target=occupy)
    page.open(max_tokens="4")
    thread.start()
    page.until(lambda: httpx.get(f"{page.address}/props").json()["texts"]["open"] == num_texts)
    page.ask("me too")
    page.wait_for_answer()
    yield "a full queue is said", "texts wait" in page.one("#notice").text
    yield "and the message stays", page.one("#prompt").get_attribute("value") == "me too"
    leaving.set()
    thread.join()
