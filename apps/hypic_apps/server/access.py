"""Who may do what, before anything else is looked at: keys, host names, the size of bodies, request ids.

Plain ASGI around the application, so that a refused request's body is never read, and so that the application still
sees when its client goes away.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hypic_apps.server.errors import ApiError, error_response
from hypic_apps.server.settings import ServerSettings

OPEN = frozenset({"/health", "/ready"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
SEGMENTS, ENTRIES = "/v1/hypic/segments", "/v1/hypic/entries"


def needs_admin(method: str, path: str) -> bool:
    """Whether a request is administration: metrics, and all about segments but registering them."""
    return path in ("/metrics", ENTRIES) or (path.startswith(SEGMENTS) and method != "POST")


class Access:
    """Puts ``request_id`` and ``tenant`` into a request's state; ``tenant`` is ``None`` where nothing is kept apart."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(headers.get("x-request-id"))
        send = _with_request_id(send, request_id)
        try:
            self._check_host(headers.get("host", ""))
            state["tenant"] = self._tenant(scope["method"], scope["path"], headers.get("authorization", ""))
            self._check_length(headers.get("content-length"))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _tenant(self, method: str, path: str, authorization: str) -> str | None:
        """Whose segments a request may use.

        Raises:
            ApiError: 401 without a known key, 403 with one that does not open this.
        """
        settings = self.settings
        if path in OPEN or not settings.has_keys:
            return None
        scheme, _, key = authorization.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if settings.admin_key is not None and _is_one_of(key, [settings.admin_key]):
            return None
        if not settings.api_keys and not needs_admin(method, path):
            return None
        if not _is_one_of(key, settings.api_keys):
            raise _unknown_key(key)
        if needs_admin(method, path):
            raise ApiError(403, f"{method} {path} needs the admin key of the server.", code="admin_only")
        return None if settings.share_segments else tenant_of(key)

    def _check_host(self, host: str) -> None:
        names = self.settings.host_names
        name = re.sub(r":\d*$", "", host).lower()
        if names is not None and name not in names:
            raise ApiError(
                403,
                f"this server answers to {', '.join(sorted(names))} only, not to {name!r}; start it with an API key "
                "or with --no-auth to reach it under other names.",
                code="unknown_host",
            )

    def _check_length(self, length: str | None) -> None:
        if length is not None and length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """Counts what comes, for bodies that do not say how long they are."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.settings.max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        limit = self.settings.max_body_bytes
        return ApiError(413, f"the body has more than {limit} bytes; send less at a time.", code="body_too_large")


def tenant_of(key: str) -> str:
    """A name for a key's own namespaces that does not give the key away."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _is_one_of(key: str, known: Iterable[str]) -> bool:
    """Takes equally long whether the key is known or not, and whichever it is."""
    given = hashlib.sha256(key.encode()).digest()
    matches = [hmac.compare_digest(given, hashlib.sha256(other.encode()).digest()) for other in known]
    return any(matches)


def _unknown_key(key: str) -> ApiError:
    told = "the API key is not known here" if key else "an API key is needed: send 'Authorization: Bearer KEY'"
    return ApiError(401, f"{told}.", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _request_id(given: str | None) -> str:
    """The client's own, where it has one that a log can hold."""
    return given if given and _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _with_request_id(send: Send, request_id: str) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = request_id
        await send(message)

    return named
