"""The path that a client means, whatever base address it was given, and what a path that is not here should be."""

from starlette.types import ASGIApp, Receive, Scope, Send

BASE = "/v1"
# How paths of clients end; of several the first counts
ENDS = ("chat/completions", "completions", "responses", "messages/count_tokens", "messages", "models")
MODELS = f"{BASE}/models/"  # before a model's name, which may have slashes


class MeantPaths:
    """ASGI middleware that hands each request on with the path that it means: whoever follows knows no other."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on."""
        if scope["type"] == "http" and (path := meant_path(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def meant_path(path: str) -> str:
    """Return a path without slashes too many, and `/v1/chat/completions` for whatever ends so; and so on."""
    parts = [part for part in path.split("/") if part]
    plain = "/" + "/".join(parts)
    if plain.startswith(MODELS):
        return plain
    for end in ENDS:
        if f"/{plain}".endswith(f"/{end}"):
            return f"{BASE}/{end}"
    before, is_model, name = plain.partition("/models/")
    return MODELS + name if is_model and before.count("/") <= 1 else plain


def not_here(method: str, path: str, base_url: str) -> str:
    """Return what to say of a path that is not here: where clients find what they look for."""
    sentence = f"{method} {path[:80]} is not here."
    if path.startswith("/api/"):
        sentence = f"{sentence[:-1]}: this server does not speak Ollama's own interface. Choose OpenAI's in the client."
    return f"{sentence} Clients take the base URL {base_url}{BASE}, and Anthropic's {base_url}."
