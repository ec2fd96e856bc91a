"""One server over HTTP: requests with their retries, and broken connections as errors of ours."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import httpx

from hypic.errors import ConfigError, HypicError, WorkerLost
from hypic.integrations._options import check_waiting
from hypic.integrations.remote.wire import content, error_of

_RETRIED = frozenset({429, 502, 503, 504})
_LONGEST_PAUSE_S = 8.0


class Connection:
    """Safe to use from any number of threads and event loops. Nothing is sent when it is made.

    Raises:
        ConfigError: the address is no HTTP address, the key no text, or a number none.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float, max_retries: int) -> None:
        if not isinstance(base_url, str):
            raise ConfigError(f"base_url is {base_url!r}; pass an address such as http://127.0.0.1:8000/v1.")
        if api_key is not None and not isinstance(api_key, str):
            raise ConfigError(f"api_key is a {type(api_key).__name__}; pass the server's key as text, or leave it out.")
        check_waiting(timeout_s, max_retries)
        self.base_url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1"
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {base_url!r}; pass an address such as http://127.0.0.1:8000/v1.")
        self._max_retries = max_retries
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(timeout_s, pool=None)
        self._patience = httpx.Timeout(timeout_s, pool=None, read=None)

    def ask(self, method: str, path: str, body: Any = None, *, patiently: bool = False) -> Any:
        """One object for another; ``patiently`` waits for as long as it takes.

        Raises:
            HypicError: the server refuses, or is not there.
        """
        with self.lost():
            response = self.send(method, path, body, patiently=patiently)
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise WorkerLost(f"{self.base_url} does not answer as a hypic server; check base_url.") from error
            finally:
                response.close()

    def send(self, method: str, path: str, body: Any, *, patiently: bool = False) -> httpx.Response:
        """A response that has begun well; close it. Call it within ``lost``."""
        timeout = self._patience if patiently else self._timeout
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                request = self._client.build_request(method, self.base_url + path, timeout=timeout, **content(body))
                response = self._client.send(request, stream=True)
            except httpx.TransportError as error:
                if last or isinstance(error, httpx.TimeoutException):
                    raise
                time.sleep(_pause_s(attempt, {}))
                continue
            if response.status_code < 400:
                return response
            text = response.read().decode("utf-8", "replace")
            if last or response.status_code not in _RETRIED:
                raise self._refusal(response.status_code, text)
            time.sleep(_pause_s(attempt, response.headers))
        raise AssertionError("the last attempt returns or raises")

    async def asend(self, client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
        """``send`` for event loops."""
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                request = client.build_request("POST", self.base_url + path, **content(body))
                response = await client.send(request, stream=True)
            except httpx.TransportError as error:
                if last or isinstance(error, httpx.TimeoutException):
                    raise
                await asyncio.sleep(_pause_s(attempt, {}))
                continue
            if response.status_code < 400:
                return response
            text = (await response.aread()).decode("utf-8", "replace")
            if last or response.status_code not in _RETRIED:
                raise self._refusal(response.status_code, text)
            await asyncio.sleep(_pause_s(attempt, response.headers))
        raise AssertionError("the last attempt returns or raises")

    def async_client(self) -> httpx.AsyncClient:
        """For one request: connections belong to an event loop, and this object to none."""
        return httpx.AsyncClient(headers=self._headers, verify=self._verify, timeout=self._timeout)

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Broken connections as ours.

        Raises:
            WorkerLost: the server is not there, or broke off.
        """
        url = self.base_url
        try:
            yield
        except httpx.TimeoutException as error:
            raise WorkerLost(f"{url} has said nothing for too long; raise timeout_s= or look there.") from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise WorkerLost(f"{url} cannot be reached or broke off ({what}); is hypic serve running?") from error

    def close(self) -> None:
        """Closes idle connections; the next call opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(headers=self._headers, verify=self._verify)

    @cached_property
    def _verify(self) -> ssl.SSLContext | bool:
        # Reading certificates takes long, and without encryption there is nothing to verify.
        return httpx.create_ssl_context() if self.base_url.startswith("https:") else False

    def _refusal(self, status: int, text: str) -> HypicError:
        """What a response that is no answer says."""
        try:
            return error_of(json.loads(text)["error"], status)
        except (ValueError, KeyError, TypeError):
            return WorkerLost(f"{self.base_url} answers with status {status}, not as a hypic server; check base_url.")


def _pause_s(attempt: int, headers: Mapping[str, str]) -> float:
    """How long to wait before another attempt: as the server says, else longer each time."""
    told = headers.get("retry-after", "")
    return min(float(told) if told.isdigit() else 0.25 * 2**attempt, _LONGEST_PAUSE_S)
