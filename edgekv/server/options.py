"""ServeOptions: what can be set about the server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from edgekv.about import about
from edgekv.errors import InvalidOption
from edgekv.units import MIB


@dataclass(frozen=True)
class ServeOptions:
    """How the server listens and what it bears.

    Raises:
        InvalidOption: a limit is not positive, or it would listen to a network without a key.
    """

    host: str = about(
        "Address to listen on. One that is not this machine's own loopback needs a key.", default="127.0.0.1"
    )
    port: int = about("Port; 0 takes a free one.", default=8080)
    api_key: str | None = about("Key that clients must send. Default: EDGEKV_API_KEY, or none on loopback.")
    alias: tuple[str, ...] = about("Another model name to answer to (may be given several times).", default=())
    max_waiting: int = about("Requests that may wait for the one being answered; more get 429.", default=16)
    max_wait_s: float = about("Seconds a request may wait for its turn; then 503.", default=120.0)
    max_answer_s: float = about("Longest time for an answer, reading the prompt included.", default=600.0)
    max_sessions: int = about("Conversations (session_id) whose cache is kept.", default=16)
    max_body_bytes: int = about("Largest request body.", default=4 * MIB)
    body_timeout_s: float = about("Seconds a client may take to send its headers, and its body.", default=15.0)

    def __post_init__(self) -> None:
        for name in ("max_wait_s", "max_answer_s", "max_sessions", "max_body_bytes", "body_timeout_s"):
            if getattr(self, name) <= 0:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be more than 0.")
        if self.max_waiting < 0:
            raise InvalidOption(f"max_waiting is {self.max_waiting}; it must not be negative.")
        if not 0 <= self.port <= 65535:
            raise InvalidOption(f"port is {self.port}; it must be between 0 and 65535.")
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isascii()):
            raise InvalidOption("The API key must be at least 8 characters of ASCII.")
        if self.api_key is None and not is_loopback(self.host):
            raise InvalidOption(
                f"Listening on {self.host} lets other machines in, so it needs a key: --api-key, or EDGEKV_API_KEY."
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, reachable from nowhere else."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
