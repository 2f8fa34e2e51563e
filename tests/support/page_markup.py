"""What the page claims of code and formulas in answers: they look well, and do nothing else, whatever they are."""

from collections.abc import Iterator
from typing import Any

from tests.support.page_browser import FORGED, Page

Claims = Iterator[tuple[str, Any]]
CODE = """
```python
def read(path):  # <b>not bold</b> & "more"
    return 42
```

```unheard-of
def read(path)
```

```
def read(path)
```
"""
HOSTILE_CODE = """
```"onclick="window.hurt=21
<img src=x onerror="window.hurt=22">
```

```__proto__
a
```

```constructor notice hidden
b
```

```html
<script>window.hurt = 23</script><img src=x onerror="window.hurt = 24"><span class="hljs-keyword">
```

```javascript
`${window.hurt = 25}` </code></pre><img src=x onerror=window.hurt=26>
```
"""
FORMULAS = r"""
Let $x_1 * y_2$ and \(a\_b\) be.

\[
\sqrt{\frac{a}{b}} + \vec{v} + \widehat{abc} + \xrightarrow{f} + \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\]

$$\fbox{a} + \pmb{b} + \color{red} c + \boxed{d} + \cancel{e} + \overbrace{f}^{g} + \sum_{i=1}^n \mathcal{L} \mathbb{R} \mathfrak{g}$$

3. third: $E = mc^2$

`$code$` costs $5 and $6, or US$7 and \$8, from $HOME to $PATH.

$\undefinedthing{x}$
"""  # noqa: E501
HOSTILE_FORMULAS = r"""
$\href{javascript:window.hurt=31}{a}$ $\url{javascript:window.hurt=32}$ $\includegraphics{https://foreign.example/p.png}$

$\htmlClass{notice}{a}$ $\htmlId{prompt}{b}$ $\htmlStyle{position:fixed;inset:0}{c}$ $\htmlData{style=position}{d}$

$" onmouseover="window.hurt=33$ $<img src=x onerror=window.hurt=34>$ $\text{<img src=x onerror=window.hurt=35>}$

$\text{ style="position:fixed;inset:0"}$ $\text{ data-style="position:fixed;inset:0"}$ $\text{'" style='x}$

$\def\a{\a\a}\a$ $\gdef\frac#1{gone}\rule{99999em}{99999em}$ $\color{url(https://foreign.example/c)} x$

$\unicode{60}script$ $\char"3C script\char"3E$ $\kern99999em x$ $\raisebox{-99999em}{x}$

$$\begin{matrix}</annotation></semantics></math><img src=x onerror=window.hurt=36>\end{matrix}$$
"""
DEEP = "$" + "{" * 2400 + "x" + "}" * 2400 + "$ $" + "\\sqrt{" * 800 + "x" + "}" * 800 + "$"


def told(page: Page, answer: str) -> None:
    """Get this answer in a new conversation."""
    page.click("#new")
    page.driver.execute_script(FORGED, answer)
    page.ask("show it")
    page.wait_for_answer()


def fetched(page: Page, name: str) -> bool:
    """Return whether the page has asked for a file since it was loaded."""
    script = "return performance.getEntriesByType('resource').some(({name}) => name.includes(arguments[0]))"
    return bool(page.driver.execute_script(script, name))


def code(page: Page) -> Claims:
    """Yield what holds of code."""
    page.open()
    told(page, "**plain** words\n\n```\nand plain code\n```\n")
    yield "plain answers fetch no library", not fetched(page, "highlight") and not fetched(page, "katex")
    told(page, CODE)
    page.until(lambda: bool(page.all(".assistant > .body .hljs-keyword")))
    blocks = page.all(".assistant > .body pre")
    yield "code in a known language has colours", len(blocks[0].find_elements("css selector", ".hljs-keyword")) == 2
    yield "in others it has none", not any(one.find_elements("css selector", "span") for one in blocks[1:])
    yield "its text is as it was", blocks[0].text == CODE.split("```")[1].removeprefix("python\n").rstrip()
    told(page, HOSTILE_CODE)
    page.until(lambda: bool(page.all(".assistant > .body .hljs-tag")))
    bad = page.all(
        ".assistant > .body img, .assistant > .body script, .assistant > .body [onclick], .assistant [hidden] b"
    )
    yield "hostile code is text", not bad and "<img src=x onerror" in page.answer()
    yield "and does nothing", page.driver.execute_script("return window.hurt") is None


def formulas(page: Page) -> Claims:
    """Yield what holds of formulas."""
    told(page, FORMULAS)
    page.until(lambda: len(page.all(".assistant > .body .katex")) >= 5)
    body = page.one(".assistant > .body")
    yield "formulas are set", len(body.find_elements("css selector", ".katex")) == 5
    yield "those between double dollars stand alone", len(body.find_elements("css selector", ".katex-display")) == 2
    yield "one that is unknown stands as it is written", r"$\undefinedthing{x}$" in body.text
    money = "$code$ costs $5 and $6, or US$7 and $8, from $HOME to $PATH."
    yield "dollars that are money stay dollars", money in body.text
    page.until(lambda: page.driver.execute_script("return document.fonts.check('16px KaTeX_Main')"))
    yield "in fonts of their own", fetched(page, "KaTeX_Main-Regular.woff2") and not fetched(page, ".ttf")
    raised = "return getComputedStyle(document.querySelector('.assistant .katex .vlist > span')).top"
    yield "their styles hold", page.driver.execute_script(raised).startswith("-")
    screen = page.all(".assistant > .body .katex-mathml math")
    yield "and readers of screens get MathML without its source", len(screen) == 5 and not page.all("annotation")
    yield "a list begins where it says", page.all(".assistant > .body ol[start='3']")


def hostile_formulas(page: Page) -> Claims:
    """Yield what holds of formulas that want more."""
    told(page, HOSTILE_FORMULAS)
    page.until(lambda: bool(page.all(".assistant > .body .katex")))
    names = "img, script, a, iframe, form, semantics, annotation, [onmouseover], [href], [src], #prompt, .notice"
    bad = [name for name in names.split(", ") if page.all(f".assistant > .body {name}")]
    yield f"a formula makes nothing but itself {bad or ''}".strip(), not bad
    yield "and runs nothing", page.driver.execute_script("return window.hurt") is None
    every = "[...document.querySelectorAll('.assistant *')]"
    fixed = f"return {every}.some((one) => getComputedStyle(one).position === 'fixed')"
    yield "nothing in it covers the page", not page.driver.execute_script(fixed)
    told(page, "$\\frac{1}{2}$")
    page.until(lambda: bool(page.all(".assistant > .body .katex")))
    yield "what one defines does not hold in the next", page.all(".assistant > .body .mfrac")
    told(page, DEEP)
    yield "one that is too deep or too long is text", "xxx" not in page.answer() and "x}" in page.answer()
    yield "and the page goes on", page.one("#prompt").is_enabled()
