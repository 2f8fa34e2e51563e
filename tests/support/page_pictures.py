"""What the page claims of pictures: they are chosen, pasted and dropped, shown, sent, and outlive a reload."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.page_browser import Page

# A file as a person drops or pastes one: `arguments` are the event, where it happens, and the file in base64
GIVEN = """
const [kind, selector, content] = arguments, data = new DataTransfer();
const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
data.items.add(new File([bytes], "given.png", { type: "image/png" }));
const how = { bubbles: true, cancelable: true };
const event = kind === "paste" ? new ClipboardEvent(kind, { ...how, clipboardData: data })
  : new DragEvent(kind, { ...how, dataTransfer: data });
document.querySelector(selector).dispatchEvent(event);
"""
LOADED = "return [...document.querySelectorAll(arguments[0])].map((image) => image.naturalWidth)"
KEPT = (
    "return Object.entries(localStorage).filter(([key]) => key.startsWith('edgespec.conversation'))"
    ".map(([, one]) => one)"
)


def pictures(page: Page, files: dict[str, Path], cat: str, truths: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield what should hold of pictures in a talk, and whether it does.

    `files` are a cat, a dog and a text, `cat` is the first in base64; `truths` are what the model says of the cat, and
    then of the dog behind it.
    """

    def said() -> str:
        (kept,) = (json.loads(one) for one in page.driver.execute_script(KEPT))
        return str(kept["messages"][-1]["content"])

    def attached(count: int) -> None:
        page.until(lambda: len(page.all("#attached img")) == count)

    def choose(name: str) -> None:
        page.driver.find_element("css selector", "#pictures").send_keys(str(files[name]))

    page.open(max_tokens="8", temperature="0")
    choose("cat")
    attached(1)
    page.until(lambda: page.driver.execute_script(LOADED, "#attached img") == [96])
    yield "a chosen picture is shown before it is sent", True
    choose("text")
    page.until(lambda: page.one("#notice").is_displayed())
    yield "a text is no picture, and is named", f"“{files['text'].name}” is no PNG" in page.one("#notice").text
    page.driver.execute_script(GIVEN, "paste", "#prompt", cat)
    attached(2)
    page.driver.execute_script(GIVEN, "drop", "#messages", cat)
    attached(3)
    yield "pasted and dropped pictures come, too", True
    for count in (2, 1):
        page.all("#attached button")[-1].click()
        attached(count)
    page.ask("What is this?")
    page.wait_for_answer()
    yield "the answer is the model's own of the picture", said() == truths["cat"]
    yield "the message shows it, and the field has none", not page.all("#attached img")
    yield "at its own size", page.driver.execute_script(LOADED, ".user .pictures img") == [96]
    page.reload()
    yield "it outlives a reload", page.driver.execute_script(LOADED, ".user .pictures img") == [96]
    page.click(".acts button", "Regenerate")
    page.wait_for_answer()
    yield "asked again it is the same", said() == truths["cat"]
    choose("dog")
    attached(1)
    page.ask("And this?")
    page.wait_for_answer()
    yield "a second question has both pictures", said() == truths["dog"]
