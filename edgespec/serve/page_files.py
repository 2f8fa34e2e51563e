"""The page at `/`: fixed files, read once. It asks the server's own interface as any client does, and nothing else.

What a model writes may hold markup. The page shows it as text or cleans it, and this policy lets no script, style,
or frame in that is not one of these files, and no picture but one that the page itself has as data, so what slips
through does nothing and asks nobody.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("page")
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "font-src 'self'",
    "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    "require-trusted-types-for 'script'", "trusted-types dompurify",
))  # fmt: skip
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".woff2": "font/woff2",
}  # fmt: skip
# A path is one of these or none: no path is ever looked up in a folder
FILES = {
    "/" if name == "index.html" else f"/page/{name}": FOLDER / name
    for name in (
        "index.html", "style.css", "icon.svg", "main.js", "answering.js", "ask.js", "branches.js", "chat.js", "code.js",
        "formula.js", "list.js", "make.js", "markdown.js", "message.js", "pictures.js", "sampling.js", "store.js",
        "transfer.js", "tree.js", "libraries/marked.esm.js", "libraries/purify.min.js", "libraries/highlight.min.js",
        "libraries/katex.min.js", "libraries/katex.min.css",
        *(f"libraries/fonts/{font.name}" for font in sorted((FOLDER / "libraries/fonts").glob("*.woff2"))),
    )
}  # fmt: skip


def page_routes() -> list[Route]:
    """Return a route a file."""
    return [_route(path, file) for path, file in FILES.items()]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=TYPES[file.suffix], headers=HEADERS)

    return Route(path, answer)
