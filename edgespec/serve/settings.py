"""What a server is started with."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from edgespec.config import require
from edgespec.errors import EdgespecError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_PORT = 8080
MAX_PORT = 65535
DEFAULT_WAITING = 64
_USUAL_PORTS = {"http": 80, "https": 443}  # which browsers leave out


def origin_of(text: str) -> str:
    """Return an address as browsers say it in the header Origin; raises EdgespecError for what no page's can be."""
    try:
        parts = urlsplit(text.strip())
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError:  # half an address of IPv6, no number for a port, or no name
        parts, scheme, host, port = urlsplit(""), "", "", None
    what = f"`allow_origin={text}` is no page's origin: that is a scheme, a host and perhaps a port, and nothing else."
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}"
    address += "" if port is None or port == _USUAL_PORTS.get(scheme) else f":{port}"
    if rest or not scheme or not host or "*" in host:
        fix = (
            f"Use {address}." if rest and scheme and host and "*" not in host else "Use one like http://localhost:3000."
        )
        raise EdgespecError("E_SETTING", what, fix)
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, whom it lets in, and how much it takes; raises EdgespecError for what is unsafe."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any that is free
    alias: str = "edgespec"  # the model's name for clients
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of pages from elsewhere, as https://example.org; kept as browsers say them
    max_waiting: int = DEFAULT_WAITING  # texts beyond those under way
    cache_prompt: bool = True  # of requests that do not say it
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
    heartbeat_s: float = 10.0  # between signs of life, while nothing else is sent
    header_s: float = 20.0  # in which a connection's first request has to arrive, up to its body
    body_s: float = 30.0  # in which a body has to arrive

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_origins", tuple(map(origin_of, self.allowed_origins)))
        require(0 <= self.port <= MAX_PORT, f"`port={self.port}` is no port.", f"Use 1 to {MAX_PORT}.")
        require(self.max_waiting >= 0, f"`max_waiting={self.max_waiting}` is negative.", "0 lets no text wait.")
        require(
            self.api_key is None or bool(self.api_key.strip()), "the API key is empty.", "Write one line to the file."
        )
        is_open = self.host not in LOOPBACK and self.api_key is None
        what = f"`host={self.host}` lets other machines in, and there is no key."
        require(not is_open, what, "Give a file with a key (`api_key_file`), or listen on 127.0.0.1.")
