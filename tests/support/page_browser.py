"""A browser without a window, the page as a person meets it there, and a server that has one."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)
WAIT_S = 30
# The page's next request gets this answer, as the server's stream would bring it.
FORGED = """
const real = window.fetch, text = arguments[0];
window.fetch = async () => {
  window.fetch = real;
  const chunk = (delta) => "data: " + JSON.stringify({choices: [{delta, finish_reason: null}]}) + "\\n\\n";
  return new Response(chunk({reasoning_content: text}) + chunk({content: text}) + "data: [DONE]\\n\\n");
};
"""
WATCH = "window.violations = []; document.addEventListener('securitypolicyviolation', (event) => " \
    "window.violations.push(event.violatedDirective + ' ' + event.blockedURI));"  # fmt: skip


def found(names: tuple[str, ...]) -> str | None:
    """Return the first of these programs that is here."""
    return next((path for path in map(shutil.which, names) if path), None)


def why_not() -> str | None:
    """Return what is missing for a check, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not here: pip install selenium"
    if not found(BROWSERS) or not found(DRIVERS):
        return "no browser is here: apt-get install chromium chromium-driver"
    return None


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a browser without a window, which notes every request."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(found(BROWSERS))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    for quiet in ("--disable-background-networking", "--disable-component-update", "--no-first-run"):
        options.add_argument(quiet)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(found(DRIVERS))))
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        yield driver
    finally:
        driver.quit()


class Page:
    """The page as a person meets it."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, **settings: str | bool) -> None:
        """Open it anew with these settings and no conversation."""
        self.driver.get(f"{self.address}/")
        script = "localStorage.clear(); localStorage['edgespec.settings'] = arguments[0]"
        self.driver.execute_script(script, json.dumps(settings))
        self.reload()

    def reload(self) -> None:
        """Load it again."""
        self.driver.refresh()
        self.until(lambda: bool(self.one("#messages *")))

    def all(self, selector: str) -> list[Any]:
        """Return what matches."""
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        """Return the last that matches, or None."""
        return next(reversed(self.all(selector)), None)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something."""
        ends_at = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > ends_at:
                raise TimeoutError("the page did not come to it")
            time.sleep(0.05)

    def press(self, text: str) -> None:
        """Type where the focus is; a key that modifies others holds until NULL."""
        self.driver.switch_to.active_element.send_keys(text)

    def click(self, selector: str, text: str = "") -> None:
        """Press the last button that matches and says this."""
        next(one for one in reversed(self.all(selector)) if text in one.text).click()

    def ask(self, text: str) -> None:
        """Send a message by keyboard."""
        self.one("#prompt").send_keys(text + "\n")

    def wait_for_answer(self) -> None:
        """Wait until nothing comes any more."""
        self.until(lambda: self.one("#send").is_displayed())

    def answer(self) -> str:
        """Return the last answer."""
        return str(self.one(".assistant > .body").text)


def from_elsewhere(driver: Any, address: str) -> list[str]:
    """Return the requests to other hosts since the last call."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith((address, "data:", "blob:", "chrome"))]


@contextmanager
def serving(address: str | None) -> Iterator[str]:
    """Yield the address of a server."""
    if address:
        yield address.rstrip("/")
        return
    command = [
        sys.executable,
        "-m",
        "edgespec",
        "serve",
        "--port",
        "8399",
        "-np",
        "2",
        "--max-waiting",
        "0",
        "-c",
        "1024",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            address, ends_at = "http://127.0.0.1:8399", time.monotonic() + 120
            while time.monotonic() < ends_at:
                try:
                    httpx.get(f"{address}/health", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.2)
            yield address
        finally:
            process.terminate()
