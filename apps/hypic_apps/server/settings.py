"""How a server behaves: one frozen object, validated when it is made. What the engine does is ``EngineConfig``'s."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from hypic.errors import ConfigError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    ``api_keys`` open everything but administration, which ``admin_key`` opens too: listing and deleting segments, and
    metrics. Without any key everything is open. With keys, each one's cached segments are its own unless
    ``share_segments``: who may time a request could otherwise find out what others have asked. ``host_names`` are the
    names under which requests may come (``None``: any); a server on loopback without keys takes loopback names only,
    so that no web page can reach it under a name of its own. ``max_waiting`` requests may wait beside those that run.
    After ``keep_alive_s`` without a piece of the answer a stream sends a comment line.

    Raises:
        ConfigError: a value lies outside its range.
    """

    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    model_name: str | None = None
    host_names: Collection[str] | None = None
    share_segments: bool = False
    max_waiting: int = 256
    max_body_bytes: int = 32 * 2**20
    keep_alive_s: float = 10.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "api_keys", tuple(self.api_keys))
        for key in (*self.api_keys, *(() if self.admin_key is None else (self.admin_key,))):
            if not key or not key.isascii() or any(c.isspace() for c in key):
                raise ConfigError("a key is empty or holds white space or letters that no header can; choose another.")
        if self.admin_key in self.api_keys:
            raise ConfigError("the admin key is also an API key; choose two different ones.")
        for name, least in (("max_waiting", 0), ("max_body_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more.")
        if not (math.isfinite(self.keep_alive_s) and self.keep_alive_s > 0):
            raise ConfigError(f"keep_alive_s is {self.keep_alive_s!r}; it must be a number of seconds above 0.")

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.admin_key is not None
