"""The address that a server listens at, which is had before any weight is read."""

import socket

from edgespec.errors import EdgespecError
from edgespec.serve.settings import ServerSettings


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens; raises EdgespecError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        what = f"`host={settings.host}` and `port={settings.port}` cannot be listened at ({_reason(error)})."
        raise EdgespecError("E_SETTING", what, "Use another port, or stop the program that has it.") from error


def _reason(error: OSError) -> str:
    """Return what the system says, without the address, which Python adds in brackets."""
    return str(error.strerror or error).partition(" (")[0]
