"""HTTP client of agents: httpx's interface over aiohttp's connections.

httpx searches all waiting requests each time one of them ends, so thousands of waiting model calls take
quadratic time; aiohttp does not. SDKs expect a client of httpx or of its successor httpx2. Both
packages have the same interface, and `make_http_client` makes either.

Invariants: a request has no total timeout, only those of httpx; an answer that is not read to its end
closes its connection, so that the server notices that the client left.
"""

import asyncio
import functools
import importlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import aiohttp
import yarl

from tailrace.config import ConfigError

Library = Literal["auto", "httpx", "httpx2"]

_IDLE_S = 4.0  # shorter than servers keep idle connections (uvicorn: 5 s): none closes while we take it
_CONNECT_S = 30.0
_ADDED_BY_AIOHTTP = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


def make_http_client(library: Library = "auto") -> Any:
    """Makes an `AsyncClient` of `library`, for many requests at once from one event loop; `aclose` it.

    `auto` is httpx2 if it is installed (current OpenAI and Anthropic SDKs accept it), otherwise httpx.
    The client sets no time limit for answers: the caller sets one. Raises `ConfigError` if the library
    is not installed.
    """
    module = _module(library)
    transport = _transport_class(module)()
    timeout = module.Timeout(None, connect=_CONNECT_S)
    return module.AsyncClient(
        transport=transport, timeout=timeout, trust_env=False, follow_redirects=True
    )


def _module(library: Library) -> ModuleType:
    wanted = ("httpx2", "httpx") if library == "auto" else (library,)
    for name in wanted:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ConfigError(
        f"{' or '.join(wanted)} is not installed: pip install {wanted[0]}, or the SDK that needs it"
    )


@functools.cache
def _transport_class(module: ModuleType) -> type[Any]:
    """Makes an `AsyncBaseTransport` class of httpx or httpx2."""
    stream_class = type("AiohttpStream", (_Stream, module.AsyncByteStream), {})
    members = {"library": module, "stream_class": stream_class}
    return type("AiohttpTransport", (_Transport, module.AsyncBaseTransport), members)


class _Transport:
    """Sends requests of one event loop through one aiohttp session."""

    library: Any
    stream_class: "type[_Stream]"

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def handle_async_request(self, request: Any) -> Any:
        """Returns when the answer's headers have arrived; its body streams."""
        session = self._open_session()
        with _errors_of(self.library):
            answer = await session.request(
                request.method,
                yarl.URL(str(request.url), encoded=True),
                headers=_headers_of(request),
                data=self._body_of(request),
                timeout=_timeout_of(request),
                allow_redirects=False,
            )
        extensions = {
            "http_version": b"HTTP/1.1",
            "reason_phrase": (answer.reason or "").encode("latin-1", "replace"),
        }
        return self.library.Response(
            status_code=answer.status,
            headers=list(answer.raw_headers),
            stream=self.stream_class(self.library, answer),
            extensions=extensions,
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None:
            if self._is_closed:
                raise RuntimeError("this http_client was closed: workflows must leave theirs open")
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_ADDED_BY_AIOHTTP,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        if loop is not self._loop:
            raise RuntimeError(
                "this http_client belongs to the event loop in which `run` was called: in another "
                "thread or loop make a client of your own"
            )
        return self._session

    def _body_of(self, request: Any) -> bytes | AsyncIterator[bytes] | None:
        try:
            return request.content or None
        except self.library.RequestNotRead:
            return _sent(request.stream)


class _Stream:
    """Body of an answer as httpx reads it: the received bytes, not decompressed."""

    def __init__(self, library: Any, answer: aiohttp.ClientResponse) -> None:
        self._library = library
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of(self._library):
            async for piece in self._answer.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        """Gives the connection back after the last byte; closes it before that."""
        self._answer.close()


async def _sent(stream: Any) -> AsyncIterator[bytes]:
    async for piece in stream:
        yield piece


def _headers_of(request: Any) -> list[tuple[str, str]]:
    """Headers without `transfer-encoding`: aiohttp frames a streamed body itself."""
    return [
        (name.decode("ascii"), value.decode("latin-1"))
        for name, value in request.headers.raw
        if name.lower() != b"transfer-encoding"
    ]


def _timeout_of(request: Any) -> aiohttp.ClientTimeout:
    """Translates httpx's limits to aiohttp's; there is no pool to wait for and no limit on writing."""
    limits = request.extensions.get("timeout", {})
    return aiohttp.ClientTimeout(
        total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read")
    )


@contextmanager
def _errors_of(library: Any) -> Iterator[None]:
    """Translates aiohttp's exceptions to those that users of httpx expect."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise library.ConnectTimeout(str(error)) from error
    except TimeoutError as error:
        raise library.ReadTimeout(str(error)) from error
    except aiohttp.ClientConnectorError as error:
        raise library.ConnectError(str(error)) from error
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise library.UnsupportedProtocol(f"unusable URL {error}") from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError) as error:
        raise library.RemoteProtocolError(str(error)) from error
    except aiohttp.ClientOSError as error:
        raise library.ReadError(str(error)) from error
    except aiohttp.ClientResponseError as error:
        raise library.RemoteProtocolError(error.message) from error
    except aiohttp.ClientError as error:
        raise library.NetworkError(str(error)) from error
