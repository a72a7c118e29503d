"""Backends behind a Kubernetes Service: its EndpointSlices, listed once and then watched.

Plain HTTP: list, watch from there, list again when the server has forgotten that far back. Rights
needed: `list` and `watch` on `endpointslices`. Must never trust a stream to end when it is dead.
"""

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.config.discovery import KubernetesApiConfig, KubernetesConfig
from gateway.discovery.names import url_of
from gateway.discovery.slices import Slice, SliceProblem, members_of, read_slice
from gateway.discovery.source import Settings, Told

_PAGE = 500
_MOST_PAGES = 100
_MOST_BYTES = 32 * 1024 * 1024  # a slice of 1,000 endpoints is about 0.5 MB
_LIST_S = 30.0
_WATCH_S = 60  # then watched again from the same place: a dead connection is known by then
_LATE_S = 15.0
_STEADY_S = 1.0  # a watch that lasted so long is no failure, whatever ended it
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_SERVICE_LABEL = "kubernetes.io/service-name"


class ApiError(Exception):
    """The API server is not there, refuses, or says what cannot be understood."""


class Gone(Exception):
    """The server has forgotten what came after the version asked for: list again."""


class KubernetesSource:
    """The endpoints of one Service. `env` tells where the API server is, as in every pod."""

    def __init__(
        self,
        service: KubernetesConfig,
        settings: Settings,
        rng: random.Random,
        env: Mapping[str, str],
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._service = service
        self._settings = settings
        self._rng = rng
        self._env = env
        self._first_pause_s = first_pause_s
        self._slices: dict[str, Slice] = {}
        self._version: str | None = None
        self._tries = 0

    async def follow(self, told: Told) -> None:
        """Report the endpoints now and whenever a slice changes."""
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        jar = aiohttp.DummyCookieJar()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=jar
        ) as session:
            while True:
                began = loop.time()
                try:
                    await self._round(session, told)
                except Gone:
                    self._version = None
                except ApiError as error:
                    self._version = None  # it may be why
                    told.failed(str(error))
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    told.failed(f"the API server cannot be reached: {_said(error)}")
                if loop.time() - began >= _STEADY_S:
                    self._tries = 0
                await self._pause()

    async def _round(self, session: aiohttp.ClientSession, told: Told) -> None:
        """List if need be, then report every change until the watch ends."""
        if self._version is None:
            await self._list(session)
            self._report(told)
        async with self._watch(session) as response, aclosing(_lines(response)) as events:
            self._report(told)  # reachable again
            async for event in events:
                if self._take(event):
                    self._tries = 0
                    self._report(told)

    def _report(self, told: Told) -> None:
        """Tell what the slices say; if that is nothing, they are watched on until it is."""
        try:
            members = members_of(self._slices.values(), self._service.port)
        except SliceProblem as problem:
            told.failed(str(problem))
        else:
            told.found(members)

    async def _pause(self) -> None:
        """Wait after a round, twice as long after each that failed at once."""
        longest = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(self._tries, 10))
        self._tries += 1
        await asyncio.sleep(longest * self._rng.uniform(0.5, 1.0))

    # --- the protocol

    async def _list(self, session: aiohttp.ClientSession) -> None:
        slices: dict[str, Slice] = {}
        params = {"limit": str(_PAGE)}
        for _ in range(_MOST_PAGES):
            async with (
                asyncio.timeout(_LIST_S),
                self._get(session, params) as response,
            ):
                page = _mapping(await _body(response))
            for item in _items(page):
                slices[_name(item)] = read_slice(item)
            meta = _mapping(page.get("metadata"))
            if not meta.get("continue"):
                self._slices, self._version = slices, str(meta.get("resourceVersion") or "0")
                return
            params["continue"] = str(meta["continue"])
        raise ApiError(f"the Service has more than {_PAGE * _MOST_PAGES} EndpointSlices")

    @asynccontextmanager
    async def _watch(self, session: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientResponse]:
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
            "resourceVersion": self._version or "0",
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_WATCH_S + _LATE_S)
        async with self._get(session, params, timeout) as response:
            yield response

    def _take(self, line: bytes) -> bool:
        """Take in one event; return whether the endpoints may be others now."""
        event = _mapping(_parsed(line))
        kind, item = event.get("type"), _mapping(event.get("object"))
        if kind == "ERROR":
            if item.get("code") == 410:
                raise Gone
            raise ApiError(f"the watch failed: {str(item.get('message'))[:200]}")
        version = _mapping(item.get("metadata")).get("resourceVersion")
        if version:
            self._version = str(version)
        if kind in {"ADDED", "MODIFIED"}:
            self._slices[_name(item)] = read_slice(item)
        elif kind == "DELETED":
            self._slices.pop(_name(item), None)
        return kind != "BOOKMARK"

    @asynccontextmanager
    async def _get(
        self,
        session: aiohttp.ClientSession,
        params: Mapping[str, str],
        deadlines: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for the Service's slices, with the token and the CA as they are now."""
        api = self._settings().kubernetes
        root = self._root(api)
        access = await asyncio.to_thread(_access, api, https=root.startswith("https:"))
        namespace = self._service.namespace or access.namespace
        if namespace is None:
            raise ApiError(f"kubernetes.namespace is needed: {api.namespace_file} is not there")
        url = f"{root}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        selector = {"labelSelector": f"{_SERVICE_LABEL}={self._service.service}"}
        async with session.get(
            url,
            params={**selector, **params},
            headers=access.headers,
            ssl=access.ssl,
            allow_redirects=False,
            timeout=deadlines or session.timeout,
        ) as response:
            if response.status == 410:
                raise Gone
            if response.status != 200:
                raise ApiError(f"the API server answered {response.status} {response.reason}")
            yield response

    def _root(self, api: KubernetesApiConfig) -> str:
        if api.url is not None:
            return api.url.rstrip("/")
        host = self._env.get("KUBERNETES_SERVICE_HOST")
        port = self._env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal():
            raise ApiError("this is no pod: discovery.kubernetes.url is needed")
        return url_of(host, int(port)).replace("http:", "https:", 1)


class _Access:
    """What is read from files before each request: they are rotated under a running pod."""

    def __init__(
        self, token: str | None, namespace: str | None, context: ssl.SSLContext | bool
    ) -> None:
        self.namespace = namespace
        self.ssl = context
        self.headers = {"accept": "application/json"}
        if token:
            self.headers["authorization"] = f"Bearer {token}"


def _access(api: KubernetesApiConfig, *, https: bool) -> _Access:
    context: ssl.SSLContext | bool = True
    if https:
        ours = api.ca_file is not None and Path(api.ca_file).exists()
        context = ssl.create_default_context(cafile=api.ca_file if ours else None)
    return _Access(_text(api.token_file), _text(api.namespace_file), context)


def _text(path: str | None) -> str | None:
    """Return what a small file says; None if there is none."""
    if path is None:
        return None
    try:
        with Path(path).open("rb") as stream:
            return stream.read(64 * 1024).decode().strip() or None
    except FileNotFoundError:
        return None


async def _body(response: aiohttp.ClientResponse) -> Any:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise ApiError("the API server's answer is too long")
    return _parsed(bytes(body))


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a watch; one that is cut off is none."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _MOST_BYTES:
            raise ApiError("an event of the watch is too long")


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ApiError("the API server's answer is no JSON") from None


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ApiError("the API server's answer is of another form")
    return value


def _items(page: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    items = page.get("items") or []
    if not isinstance(items, list):
        raise ApiError("the API server's answer is of another form")
    return [_mapping(item) for item in items]


def _name(item: Any) -> str:
    return str(_mapping(_mapping(item).get("metadata")).get("name"))


def _said(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
