"""The server's page in a real browser: does it do what it should, with nothing from elsewhere, whatever a model says?

    apt-get install chromium chromium-driver; pip install selenium; npm pack axe-core
    python -m scripts.check.page --axe axe.min.js --pictures FOLDER

Starts `edgespec serve` with the built-in pair, or asks one that runs (`--address`), and prints a line a claim; exits 1
when one does not hold, and 2 where no browser is found. Without `--axe` accessibility is not checked, and it says so.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.page_browser import FORGED, Page, browser, from_elsewhere, serving, why_not
from tests.support.page_keeps import branches, continuing, defaults, drafts, failures, moving, searching
from tests.support.page_markup import code, formulas, hostile_formulas
from tests.support.page_talk import full_queue, hostile, keeping, stopping, talking


def accessibility(page: Page, axe: Path) -> Iterator[tuple[str, Any]]:
    """Yield what axe-core finds, wide and narrow, dark and light."""
    for width, theme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page.driver.set_window_size(width, 900)
        page.driver.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        page.driver.execute_script(axe.read_text(encoding="utf-8"))
        wanted = "axe.run(document).then((one) => arguments[0](one.violations))"
        bad = page.driver.execute_async_script(wanted)
        places = [f"{one['id']}: {one['nodes'][0]['target']} {one['nodes'][0]['failureSummary']}" for one in bad]
        yield f"axe-core finds nothing, {width} wide, {theme}" + "".join(f"\n    {place}" for place in places), not bad


ANSWER = """Here is a function that reads **one layer** at a time:

```python
def layers(folder):
    for file in sorted(folder.glob("*.safetensors")):
        yield load(file)
```

Reading $n$ layers of $b$ bytes at a rate of $r$ takes

$$t = \\sum_{i=1}^{n} \\frac{b_i}{r} + \\sqrt{\\mathrm{Var}(t)}$$

3. It holds one layer in memory.
- The order is that of the names; see [the format](https://example.org).

| layer | bytes |
| --- | --- |
| 0 | 1,024 |
| 1 | 2,048 |
"""


def shown(page: Page) -> None:
    """Show a conversation with all that an answer may have."""
    page.open(max_tokens="40", seed="7")
    page.driver.execute_script(FORGED, ANSWER)
    page.ask("How do I read a model's layers one by one?")
    page.wait_for_answer()
    page.ask("def read(")
    page.wait_for_answer()
    page.one(".numbers summary").click()


def pictures(page: Page, folder: Path) -> None:
    """Write pictures of the page, wide and narrow, dark and light."""
    folder.mkdir(parents=True, exist_ok=True)
    for width in (1280, 390):
        size = {"width": width, "height": 860, "deviceScaleFactor": 1, "mobile": width < 600}
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for theme in ("light", "dark"):
            page.driver.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
            for name, opening in (("top", 0), ("end", 100_000)):
                page.driver.execute_script(f"document.getElementById('messages').scrollTop = {opening}")
                page.driver.save_screenshot(str(folder / f"{width}-{theme}-{name}.png"))
            page.click("#more summary")
            page.click("#settings-open")
            page.driver.save_screenshot(str(folder / f"{width}-{theme}-settings.png"))
            page.click("#settings .main")
        if width < 600:
            page.click("#menu")
            page.driver.save_screenshot(str(folder / f"{width}-dark-menu.png"))
            page.click("#menu")


def checked(driver: Any, address: str, *, axe: Path | None, folder: Path | None) -> Iterator[tuple[str, Any]]:
    """Yield every claim, and whether it holds."""
    page = Page(driver, address)
    driver.set_window_size(1280, 860)
    yield from talking(page)
    yield from stopping(page)
    yield from hostile(page)
    yield from keeping(page)
    texts = httpx.get(f"{address}/props").json()["texts"]
    if texts["may_wait"] == 0:
        yield from full_queue(page, texts["at_once"])
    marked, kept = (code, formulas, hostile_formulas), (branches, drafts, failures, defaults, continuing)
    for claims in (*marked, *kept, searching, moving):
        yield from claims(page)
    shown(page)
    yield "nothing breaks the policy", driver.execute_script("return window.violations") == []
    if axe is not None:
        yield from accessibility(page, axe)
    if folder is not None:
        pictures(page, folder)
    logged = [entry["message"] for entry in driver.get_log("browser")]
    broken = [line for line in logged if "Content Security Policy" in line or "Uncaught" in line]
    yield f"nothing was thrown or kept off by the policy {broken or ''}".strip(), not broken
    others = from_elsewhere(driver, address)
    yield f"no other host was asked {others or ''}".strip(), not others


def main() -> None:
    """Print a line a claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a server that runs")
    parser.add_argument("--axe", type=Path, help="axe.min.js of npm's axe-core")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures")
    given = parser.parse_args()
    missing = why_not()
    if missing:
        print(missing)
        sys.exit(2)
    num_wrong = 0
    with serving(given.address) as address, browser() as driver:
        for claim, holds in checked(driver, address, axe=given.axe, folder=given.pictures):
            num_wrong += not holds
            print("ok  " if holds else "FAIL", claim, flush=True)
    if given.axe is None:
        print("accessibility was not checked: give --axe axe.min.js (npm pack axe-core)")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
