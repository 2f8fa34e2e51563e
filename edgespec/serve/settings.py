"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.config import require

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_PORT = 8080
MAX_PORT = 65535
DEFAULT_WAITING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, whom it lets in, and how much it takes; raises EdgespecError for what is unsafe."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any that is free
    alias: str = "edgespec"  # the model's name for clients
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of pages from elsewhere, as https://example.org
    max_waiting: int = DEFAULT_WAITING  # texts beyond those under way
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
    heartbeat_s: float = 10.0  # between signs of life, while nothing else is sent
    header_s: float = 20.0  # in which a connection's first request has to arrive, up to its body
    body_s: float = 30.0  # in which a body has to arrive

    def __post_init__(self) -> None:
        require(0 <= self.port <= MAX_PORT, f"`port={self.port}` is no port.", f"Use 1 to {MAX_PORT}.")
        require(self.max_waiting >= 0, f"`max_waiting={self.max_waiting}` is negative.", "0 lets no text wait.")
        require(
            self.api_key is None or bool(self.api_key.strip()), "the API key is empty.", "Write one line to the file."
        )
        is_open = self.host not in LOOPBACK and self.api_key is None
        what = f"`host={self.host}` lets other machines in, and there is no key."
        require(not is_open, what, "Give a file with a key (`api_key_file`), or listen on 127.0.0.1.")
