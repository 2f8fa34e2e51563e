"""What the page claims to keep: branches, drafts, messages that failed, answers that were stopped, files it wrote."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.page_browser import FORGED, Page

Claims = Iterator[tuple[str, Any]]
GONE = "window.fetch = async () => { throw new TypeError('failed'); }"
# The page's next request is noted, and refused.
REFUSED = """
const real = window.fetch, [status, message] = arguments;
window.fetch = async (path, options) => {
  window.fetch = real;
  window.sent = JSON.parse(options.body);
  return new Response(JSON.stringify({error: {message}}), {status, headers: {"Retry-After": "2"}});
};
"""
# The page's next request is noted and answered with this text, and then the stream breaks off or goes on for ever.
CUT = """
const real = window.fetch, [text, ends] = arguments;
window.fetch = async (path, {body, signal}) => {
  window.fetch = real;
  window.sent = JSON.parse(body);
  const encoder = new TextEncoder();
  return new Response(new ReadableStream({
    async start(controller) {
      signal.addEventListener("abort", () => controller.error(new DOMException("stopped", "AbortError")));
      for (const word of text.split(/(?<= )/)) {
        const draft = {tokens: [[word, false]], nodes_by_depth: [], num_accepted: 0};
        const event = {choices: [{delta: {content: word}, finish_reason: null}], draft};
        controller.enqueue(encoder.encode("data: " + JSON.stringify(event) + "\\n\\n"));
        await new Promise((done) => setTimeout(done, 40));
      }
      if (ends) controller.error(new TypeError("broken"));
    },
  }));
};
"""
OLD = {"id": "1-2-3", "title": "", "changed": 5, "messages": [
    {"role": "user", "content": "an old question"}, {"role": "assistant", "content": "an old answer"},
    {"role": "user", "content": "and more"}, {"role": "assistant", "content": "the end", "ending": "stopped"},
]}  # fmt: skip
EARLIER, LATER = "[aria-label='Earlier version']", "[aria-label='Later version']"


def told(page: Page, question: str, answer: str) -> None:
    """Ask something that gets this answer."""
    page.driver.execute_script(FORGED, answer)
    page.ask(question)
    page.wait_for_answer()


def texts(page: Page) -> list[str]:
    """Return what is shown of each message."""
    return [one.text for one in page.all("article > .body")]


def value(page: Page) -> str:
    """Return what stands in the field."""
    return str(page.one("#prompt").get_attribute("value"))


def stored(page: Page) -> list[dict[str, Any]]:
    """Return the conversations as the browser keeps them."""
    script = "return Object.entries(localStorage).filter(([key]) => key.includes('conversation')).map(([, one]) => one)"
    return [json.loads(one) for one in page.driver.execute_script(script)]


def branches(page: Page) -> Claims:
    """Yield what holds of messages that are edited and of answers that are asked for again."""
    from selenium.webdriver.common.keys import Keys

    page.open()
    for question, answer in (("one", "first answer"), ("two", "second answer")):
        told(page, question, answer)
    page.driver.execute_script(FORGED, "another answer")
    page.click(".assistant .acts button", "Regenerate")
    page.wait_for_answer()
    yield "an answer again is another version", texts(page)[-1] == "another answer" and "2/2" in page.one("footer").text
    page.one(EARLIER).click()
    yield "and the first is there", texts(page)[-1] == "second answer" and "1/2" in page.one(".versions").text
    is_focused = page.driver.execute_script("return document.activeElement.getAttribute('aria-label')")
    yield "a keyboard goes back from there", is_focused == "Later version"

    page.all(".user .acts button")[0].click()
    page.driver.execute_script(FORGED, "answer to uno")
    page.press(Keys.CONTROL + "a" + Keys.NULL + "uno" + Keys.ENTER)
    page.wait_for_answer()
    yield "an edited message begins a branch", texts(page) == ["uno", "answer to uno"]
    told(page, "dos", "more")
    page.all(EARLIER)[0].click()
    yield "the branch before comes back as it was", texts(page) == ["one", "first answer", "two", "second answer"]
    page.all(LATER)[0].click()
    yield "and the later one too", texts(page) == ["uno", "answer to uno", "dos", "more"]
    page.driver.execute_script(FORGED, "early again")
    page.all(".assistant .acts button:last-child")[0].click()
    page.wait_for_answer()
    yield "an answer in the middle can be asked for again", texts(page) == ["uno", "early again"]
    page.all(EARLIER)[1].click()
    before = texts(page)
    page.reload()
    yield "branches outlive a reload", texts(page) == before == ["uno", "answer to uno", "dos", "more"]
    yield "every message is still there", len(stored(page)[0]["messages"]) == 10

    page.driver.execute_script("localStorage['edgespec.conversation.1-2-3'] = arguments[0]", json.dumps(OLD))
    page.reload()
    page.click("#list button", "an old question")
    yield "a conversation of the earlier shape opens", texts(page) == [one["content"] for one in OLD["messages"]]
    told(page, "go on", "gladly")
    yield "and goes on", texts(page)[-2:] == ["go on", "gladly"] and len(texts(page)) == 6


def drafts(page: Page) -> Claims:
    """Yield what holds of words that were not sent."""
    from selenium.webdriver.common.keys import Keys

    page.open()
    page.press("half a thought")
    page.reload()
    yield "a draft outlives a reload at once", value(page) == "half a thought"
    page.click("#new")
    yield "a new conversation has none", value(page) == ""
    told(page, "question", "answer")
    page.press("the second draft")
    page.click("#list button", "half a thought")
    yield "each conversation has its own", value(page) == "half a thought"
    page.click("#list button", "question")
    yield "and keeps it", value(page) == "the second draft"
    page.click(".user .acts button", "Edit")
    page.press(" but better")
    time.sleep(0.5)
    page.driver.execute_script("document.getElementById('foreseen').click()")  # which shows all messages anew
    page.reload()
    field = page.one(".editing textarea")
    yield "so does a message that is being edited", field and field.get_attribute("value") == "question but better"
    field.send_keys(Keys.ESCAPE)
    yield "Escape takes the edit back alone", texts(page)[0] == "question" and value(page) == "the second draft"
    page.one("#prompt").send_keys(Keys.CONTROL + "a" + Keys.NULL + Keys.DELETE)
    page.click("#list button", "half a thought")
    page.one("#prompt").send_keys(Keys.CONTROL + "a" + Keys.NULL + Keys.DELETE)
    page.click("#new")
    yield "a draft that was deleted leaves nothing", len(stored(page)) == 1 and len(page.all("#list button")) == 1


def failures(page: Page) -> Claims:
    """Yield what holds of messages that got no answer."""
    from selenium.webdriver.common.keys import Keys

    page.open(max_tokens="8")
    for status, sentence in ((429, "4 texts wait"), (400, "too long"), (500, "broken"), (401, "a key is needed")):
        page.driver.execute_script(REFUSED, status, sentence)
        page.ask(f"message {status}")
        page.wait_for_answer()
        if status == 401:
            page.click("#settings .main")
            page.until(lambda: not page.one("#settings").is_displayed())
        is_said = status == 401 or sentence in page.one("#notice").text
        yield f"a message that got {status} is in the field", is_said and value(page) == f"message {status}"
        yield f"and nowhere else ({status})", not texts(page)
        page.one("#prompt").send_keys(Keys.CONTROL + "a" + Keys.NULL + Keys.DELETE)
    told(page, "question", "answer")
    page.driver.execute_script(GONE)
    page.ask("into the void")
    page.wait_for_answer()
    page.reload()
    yield "also where the server is gone, and after a reload", value(page) == "into the void" and len(texts(page)) == 2
    page.one("#prompt").send_keys(Keys.ENTER)
    page.wait_for_answer()
    yield "Enter sends it again", texts(page)[2] == "into the void" and value(page) == ""

    page.click("#new")
    page.driver.execute_script(CUT, "", False)
    page.ask("never mind")
    page.press("typed meanwhile")
    page.click("#stop")
    page.wait_for_answer()
    is_offered = any(one.text == "Send again" for one in page.all(".user .acts button"))
    yield "stopped before a word it can be sent again", texts(page) == ["never mind"] and is_offered
    yield "and what was typed meanwhile stays", value(page) == "typed meanwhile"
    page.driver.execute_script(CUT, "half an", True)
    page.click(".user .acts button", "Send again")
    page.wait_for_answer()
    numbers = page.one(".numbers").text
    yield "an answer that broke off stays", texts(page)[-1] == "half an" and "broken off" in numbers
    page.driver.execute_script(REFUSED, 429, "texts wait")
    page.click(".assistant .acts button", "Regenerate")
    page.wait_for_answer()
    yield "also where another was refused", texts(page)[-1] == "half an" and not page.all(".versions")
    page.driver.execute_script(CUT, "", False)
    page.click(".assistant .acts button", "Regenerate")
    page.click("#new")
    page.click("#list button", "never mind")
    page.until(lambda: bool(page.all(".assistant .acts")))
    yield "and the first is as it was", texts(page) == ["never mind", "half an"]

    other = "localStorage['edgespec.conversation.' + arguments[0].id] = JSON.stringify(arguments[0])"
    one = next(
        one for one in stored(page) if len(one["messages"]) == 2 and one["messages"][0]["content"] == "never mind"
    )
    end = one["messages"][-1]["id"]
    page.driver.switch_to.new_window("tab")
    page.driver.get(f"{page.address}/page/icon.svg")
    one["messages"].append({"id": "x", "parent": end, "role": "user", "content": "from another tab"})
    page.driver.execute_script(other, one)
    page.driver.close()
    page.driver.switch_to.window(page.driver.window_handles[0])
    page.until(lambda: texts(page)[-1:] == ["from another tab"])
    yield "what another tab said is taken over", True


def defaults(page: Page) -> Claims:
    """Yield what holds of the sampling that is used where a field is empty."""
    from selenium.webdriver.common.keys import Keys

    def placeholders() -> list[str]:
        page.driver.execute_script("document.getElementById('settings').showModal()")
        page.press(Keys.ESCAPE)  # closing asks the server
        page.until(lambda: not page.one("#settings").is_displayed())
        time.sleep(0.5)
        return [str(page.one(f"#{name}").get_attribute("placeholder")) for name in ("temperature", "top_p", "seed")]

    page.open()
    properties = {"model": "m", "placement": {"layers": 1, "resident_layers": 1}}
    forged = "const text = arguments[0]; window.fetch = async () => new Response(text)"
    page.driver.execute_script(forged, json.dumps(properties))
    yield "where the server does not say its sampling, it is the model's", placeholders()[0] == "model's own"
    properties["sampling"] = {"temperature": 1, "top_p": 0.949999988079071, "seed": 4}
    page.driver.execute_script(forged, json.dumps(properties))
    yield "where it does, the fields show it", placeholders() == ["1 by default", "0.95 by default", "random"]


def continuing(page: Page) -> Claims:
    """Yield what holds of an answer that ended early."""
    from selenium.webdriver.common.keys import Keys

    page.open(max_tokens="30")
    page.driver.execute_script(CUT, "one two three four ", False)
    page.ask("count")
    page.until(lambda: "three" in "".join(texts(page)[-1:]))
    page.press(Keys.ESCAPE)
    page.wait_for_answer()
    numbers = page.one(".numbers").text
    yield f"a stopped answer shows its speed ({numbers})", "tokens/s" in numbers and "stopped" in numbers
    page.driver.execute_script(REFUSED, 400, "the chat template cannot continue")
    page.click(".assistant .acts button", "Continue")
    page.wait_for_answer()
    sent = page.driver.execute_script("return window.sent")
    is_continued = sent.get("continue_final_message") is True and sent.get("add_generation_prompt") is False
    yield "going on sends the answer so far", is_continued and sent["messages"][-1]["content"].startswith("one two")
    is_said = "cannot continue" in page.one("#notice").text
    yield "where the server refuses, it is said and the answer stays", is_said and "one two" in texts(page)[-1]
    yield "it is still a stopped one", "stopped" in page.one(".numbers").text
    said = texts(page)[-1]
    page.driver.execute_script(FORGED, " and five")
    page.click(".assistant .acts button", "Continue")
    page.wait_for_answer()
    yield "what comes stands after it", texts(page)[-1] == f"{said} and five"
    yield "as one message", len(stored(page)[0]["messages"]) == 2 and not page.all(".versions")
    offered = [one.text for one in page.all(".assistant .acts button")]
    yield "a whole answer offers no more", "Continue" not in offered


def searching(page: Page) -> Claims:
    """Yield what holds of the search."""
    from selenium.webdriver.common.keys import Keys

    page.open()
    told(page, "Where is the café?", "Near the ZOO, on the left.")
    page.click("#new")
    told(page, "Name a fruit", "An apple")
    page.driver.execute_script(FORGED, "A quince")
    page.click(".assistant .acts button", "Regenerate")
    page.wait_for_answer()

    def found(words: str) -> list[str]:
        field = page.one("#search")
        field.clear()
        field.send_keys(words)
        return [one.text for one in page.all("#list button")]

    hits = found("cafe zoo")
    yield "a search takes no notice of accents and capitals", len(hits) == 1 and "café" in hits[0]
    yield "words may stand in several messages, all of them", not found("cafe quince") and found("is the")
    yield "nothing found is said", found("xyzzy") == [] and "None found" in page.one("#found").text
    yield "signs of patterns are text", found(".*") == [] and found("(") == []
    yield "an excerpt shows where", "apple" in found("apple")[0]
    page.one("#search").send_keys(Keys.ENTER)
    yield "Enter opens it, on the branch where it is", texts(page)[-1] == "An apple"
    page.one("#search").send_keys(Keys.ESCAPE)
    yield "Escape ends the search", len(page.all("#list button")) == 2 and not page.one("#found").text


def moving(page: Page) -> Claims:
    """Yield what holds of files that are written and read."""
    with tempfile.TemporaryDirectory() as name:
        yield from _moving(page, Path(name))


def _moving(page: Page, folder: Path) -> Claims:
    from selenium.webdriver.common.keys import Keys

    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    page.open()
    told(page, "first, “quoted”", "an answer")
    page.click(".user .acts button", "Edit")
    page.driver.execute_script(FORGED, "another")
    page.press("!" + Keys.ENTER)
    page.wait_for_answer()
    page.click("#new")
    told(page, "second", "its answer")
    before = {one["id"]: one for one in stored(page)}

    def export(button: str) -> Path:
        known = set(folder.iterdir())
        page.click("#more summary")
        page.click(button)
        page.until(lambda: any(one.suffix == ".json" for one in set(folder.iterdir()) - known))
        return next(iter(set(folder.iterdir()) - known))

    def read(*paths: Path) -> str:
        page.one("#files").send_keys("\n".join(map(str, paths)))
        page.until(lambda: page.one("#notice").is_displayed() or page.one("#news").is_displayed())
        text = page.one("#notice").text + page.one("#news").text
        page.driver.execute_script("for (const id of ['notice', 'news']) document.getElementById(id).hidden = true")
        return text

    one, all_of_them = export("#export"), export("#export-all")
    session = json.loads(one.read_text())
    yield (
        "a file is a session that others read",
        session["schema"] == "edgespec.session/1"
        and session["messages"]
        == [
            {"role": "user", "content": "second"},
            {"role": "assistant", "content": "its answer", "reasoning_content": "its answer"},
        ],
    )
    yield "what is there already is not doubled", "2 were here already" in read(all_of_them) and len(stored(page)) == 2
    page.open()
    yield "several conversations are imported", "2 conversations imported" in read(all_of_them)
    kept = ("id", "role", "content", "parent", "reasoning")
    same = [{k: m[k] for k in kept if m.get(k)} for c in stored(page) for m in c["messages"]] == [
        {k: m[k] for k in kept if m.get(k)} for c in stored(page) for m in before[c["id"]]["messages"]
    ]
    yield "with all their branches", same and sum(len(c["messages"]) for c in stored(page)) == 6
    page.click("#list button", "first")
    yield "and the one that was shown is shown", texts(page)[-1] == "another" and page.all(".versions")

    old = folder / "old.json"
    words = [{"role": "user", "content": "from elsewhere"}, {"role": "assistant", "content": "so it is"}]
    old.write_text(json.dumps({"schema": "edgespec.session/1", "system": "s", "messages": words, "interrupted": [1]}))
    said = read(old)
    yield "a saved chat of the terminal is imported", texts(page) == ["from elsewhere", "so it is"]
    yield "and what it has no room for is named", "System messages are not imported" in said
    yield "once", "1 was here already" in read(old) and len(stored(page)) == 3

    def session_with(**more: Any) -> str:
        return json.dumps({"schema": "edgespec.session/1", "messages": words, **more})

    linked = [{"id": "a", "parent": "b", **words[0]}, {"id": "b", "parent": "a", **words[1]}]
    wrong = {
        "text": "no json", "number": "7", "empty": "", "null": "null", "list": "[]", "other": '{"messages": []}',
        "none": session_with(messages=[]), "roles": session_with(messages=[{"role": "system", "content": "x"}]),
        "words": session_with(messages=[{"role": "user", "content": ["x"]}]), "nothing": session_with(messages=[None]),
        "calls": session_with(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]),
        "circle": session_with(branches=linked), "branches": session_with(branches="x"),
        "second": f"[{session_with(title='new')}, {{}}]",
    }  # fmt: skip
    count, lines = json.dumps(stored(page), sort_keys=True), []
    for name, content in wrong.items():
        path = folder / f"{name}.json"
        path.write_text(content)
        lines.append(read(path, old))
    yield (
        "each wrong file gets a sentence of its own",
        all(line.startswith("“") and line.count("\n") == 0 for line in lines),
    )
    yield "and changes nothing", json.dumps(stored(page), sort_keys=True) == count

    hostile, question = folder / "hostile.json", {"role": "user", "content": "<img src=x onerror=hurt()>"}
    branches = [
        {"id": "__proto__", "parent": None, **question},
        {"id": "constructor", "parent": "__proto__", **words[1], "timings": "x", "tree": {"sizes": 3}},
    ]
    title = "<b>t</b>" * 40
    hostile.write_text(session_with(id="../x", title=title, branches=branches, end={"a": 1}, next="b", isGone=True))
    read(hostile)
    yield "what a file says is text", texts(page)[0] == "<img src=x onerror=hurt()>" and len(texts(page)) == 2
    full = "try { for (let i = 0; ; i += 1) localStorage['full' + i] = 'x'.repeat(2 ** 18); } catch { " \
        "try { for (let i = 0; ; i += 1) localStorage['fuller' + i] = 'x'.repeat(1000); } catch {} }"  # fmt: skip
    page.driver.execute_script(full)
    many = [
        json.loads(session_with(title=str(i), messages=[{"role": "user", "content": str(i) * 300}])) for i in range(9)
    ]
    large = folder / "large.json"
    large.write_text(json.dumps(many))
    count = json.dumps(stored(page), sort_keys=True)
    said = read(large)
    is_same = json.dumps(stored(page), sort_keys=True) == count
    yield f"without room nothing is imported, and it is said ({said})", "no room" in said and is_same
