"""One backend's HTTP client for what is not traffic: metrics, health, model list.

Every backend has its own session, so that one that hangs holds nothing of the others'. An answer
is bounded in time and size. Must never follow a redirect, keep a cookie or show an address.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import aiohttp
from yarl import URL

from gateway.relay.why import why_unreached


@dataclass(slots=True, frozen=True)
class Answer:
    """A whole answer. `at` is when its head came, monotonic seconds; `started` names the process.

    `started` is llama.cpp's `Process-Start-Time-Unix`: no date in truth, but it changes with every
    start.
    """

    status: int
    body: bytes
    at: float
    started: str | None


class LinkError(Exception):
    """No whole answer. `refused` = nothing listens there."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Link:
    """GETs below one base URL. Create inside a running loop, close when done."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        clock: Callable[[], float],
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        """`tls` is an https URL's context (None = the system's authorities), `server_name` its name."""
        self._base = url.rstrip("/")
        self._server_name = server_name
        self._clock = clock
        headers = {"accept": "*/*", "accept-encoding": "identity"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            # vLLM closes idle connections after 5 s; 3 s keeps us from writing into a dead one.
            connector=aiohttp.TCPConnector(
                limit=4, keepalive_timeout=3, ttl_dns_cache=10, ssl=tls or True
            ),
            auto_decompress=False,
            read_bufsize=256 * 1024,
        )

    async def get(self, path: str, *, timeout_s: float, max_bytes: int) -> Answer:
        """Return the answer to `GET path`.

        Raises:
            LinkError: nothing listens, the answer broke off, took over `timeout_s` or is larger
                than `max_bytes`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(path, max_bytes)
        except TimeoutError as error:
            raise LinkError(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorCertificateError) as error:
            raise LinkError(why_unreached(_cause(error))) from error
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise LinkError(why_unreached(error.os_error), refused=refused) from error
        except UnicodeError as error:  # a host that no name server can be asked for
            raise LinkError(why_unreached(error)) from error
        except (OSError, aiohttp.ServerDisconnectedError) as error:
            raise LinkError(f"answer broken: {_cut(error)}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise LinkError(f"answer broken: {type(error).__name__}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _get(self, path: str, max_bytes: int) -> Answer:
        url = URL(self._base + path, encoded=True)
        async with self._session.get(
            url, allow_redirects=False, server_hostname=self._server_name
        ) as response:
            at = self._clock()
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise LinkError(f"answer over {max_bytes} bytes")
            started = response.headers.get("process-start-time-unix")
            return Answer(response.status, bytes(body), at, started)


def _cause(
    error: aiohttp.ClientConnectorSSLError | aiohttp.ClientConnectorCertificateError,
) -> Exception:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    return cast("Exception", error.os_error)


def _cut(error: Exception) -> str:
    closed = isinstance(error, aiohttp.ServerDisconnectedError)
    return "connection closed" if closed else why_unreached(error)
