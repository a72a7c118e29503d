"""EndpointSlices from a scripted API server: list, watch, and everything that ends a watch."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.config.discovery import DiscoveryConfig, KubernetesApiConfig, KubernetesConfig
from gateway.config.groups import Members
from gateway.discovery.kubernetes import KubernetesSource
from tests.integration.discovery_rig import ApiServer, Hangup, event, serving, slice_of


class Ear:
    """Who listens to the source."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[list[str] | str] = asyncio.Queue()
        self.last: list[str] | str = []

    def found(self, members: Members) -> None:
        self.said.put_nowait([f"{member.name}={member.url}" for member in members])

    def failed(self, reason: str) -> None:
        self.said.put_nowait(reason)

    async def until(self, *pods: str) -> None:
        """Wait for exactly these `NAME=ADDRESS`, at port 8000."""
        wanted = [pod.replace("=", "=http://") + ":8000" for pod in pods]
        async with asyncio.timeout(60):
            while self.last != wanted:
                self.last = await self.said.get()

    async def until_failed(self, reason: str) -> None:
        async with asyncio.timeout(60):
            while not (isinstance(self.last, str) and reason in self.last):
                self.last = await self.said.get()


@asynccontextmanager
async def following(
    api: ApiServer,
    service: KubernetesConfig | None = None,
    env: dict[str, str] | None = None,
    **access: str | None,
) -> AsyncIterator[Ear]:
    files: dict[str, str | None] = {"token_file": None, "ca_file": None, "namespace_file": None}
    url = None if env else api.url
    config = DiscoveryConfig(kubernetes=KubernetesApiConfig(url=url, **{**files, **access}))
    source = KubernetesSource(
        service or KubernetesConfig(service="vllm", namespace="prod"),
        lambda: config,
        random.Random(1),
        env or {},
        first_pause_s=0.01,
    )
    ear = Ear()
    task = asyncio.ensure_future(source.follow(ear))
    try:
        yield ear
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_slices_are_listed_and_then_watched_from_there() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1"), slice_of("s2", "b=10.0.0.2", "c!10.0.0.3")])
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1", "b=10.0.0.2")
        await api.until(lambda: bool(api.watches))

        api.events.put_nowait(event("ADDED", slice_of("s3", "d=10.0.0.4")))
        await ear.until("a=10.0.0.1", "b=10.0.0.2", "d=10.0.0.4")
        api.events.put_nowait(event("MODIFIED", slice_of("s2", "b!10.0.0.2", "c=10.0.0.3")))
        await ear.until("a=10.0.0.1", "c=10.0.0.3", "d=10.0.0.4")
        api.events.put_nowait(event("DELETED", slice_of("s1", "a=10.0.0.1")))
        await ear.until("c=10.0.0.3", "d=10.0.0.4")

    assert set(api.namespaces) == {"prod"}
    assert api.lists == [{"labelSelector": "kubernetes.io/service-name=vllm", "limit": "500"}]
    assert api.watches[0]["resourceVersion"] == "100"
    assert api.watches[0]["allowWatchBookmarks"] == "true"


async def test_a_list_comes_in_pages() -> None:
    api = ApiServer([slice_of(f"s{n}", f"p{n}=10.0.0.{n}") for n in range(1, 6)], page=2)
    async with serving(api), following(api) as ear:
        await ear.until(*(f"p{n}=10.0.0.{n}" for n in range(1, 6)))

    assert [query.get("continue") for query in api.lists] == [None, "2", "4"]


@pytest.mark.parametrize("items", ["text", [1], [None]])
async def test_a_list_of_another_form_is_told_and_no_fault_of_ours(
    items: Any, caplog: pytest.LogCaptureFixture
) -> None:
    api = ApiServer(items)
    async with serving(api), following(api) as ear:
        await ear.until_failed("of another form")
        api.slices = [slice_of("s1", "a=10.0.0.1")]
        await ear.until("a=10.0.0.1")
    assert not caplog.records


async def test_no_endpoint_at_all_is_an_empty_list() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1")
        api.events.put_nowait(event("MODIFIED", slice_of("s1")))
        await ear.until()
        assert ear.last == []


async def test_a_watch_goes_on_from_the_last_bookmark_without_a_new_list() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1")
        api.events.put_nowait(event("BOOKMARK", {"metadata": {"resourceVersion": "250"}}))
        api.events.put_nowait(None)
        await api.until(lambda: len(api.watches) == 2)
        api.events.put_nowait(event("ADDED", slice_of("s2", "b=10.0.0.2", version=300)))
        await ear.until("a=10.0.0.1", "b=10.0.0.2")
        api.events.put_nowait(Hangup())
        await api.until(lambda: len(api.watches) == 3)

    assert [query["resourceVersion"] for query in api.watches] == ["100", "250", "300"]
    assert len(api.lists) == 1


@pytest.mark.parametrize("how", ["event", "status"])
async def test_what_is_gone_is_listed_again(how: str) -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1")
        await api.until(lambda: len(api.watches) == 1)
        api.slices, api.version = [slice_of("s9", "z=10.0.0.9")], 900
        api.refused.add("100")
        gone = event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        api.events.put_nowait(gone if how == "event" else None)
        await ear.until("z=10.0.0.9")
        await api.until(lambda: api.watches[-1]["resourceVersion"] == "900")

    assert len(api.lists) == 2


@pytest.mark.parametrize("status", [401, 403, 404, 500])
async def test_a_refusal_is_told_and_what_was_known_comes_back_with_the_server(
    status: int,
) -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")], status=status)
    async with serving(api), following(api) as ear:
        await ear.until_failed(f"the API server answered {status}")
        api.status = 200
        await ear.until("a=10.0.0.1")


async def test_a_server_that_is_not_there_is_told_and_asked_again() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api):
        pass  # its port is free again: nothing listens there
    async with following(api) as ear:
        await ear.until_failed("the API server cannot be reached")
        await ear.said.get()


async def test_an_error_of_the_watch_is_told_and_then_listed_again() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1")
        await api.until(lambda: bool(api.watches))
        api.events.put_nowait(event("ERROR", {"code": 500, "message": "etcd is away"}))
        await ear.until_failed("etcd is away")
        await ear.until("a=10.0.0.1")

    assert len(api.lists) == 2


@pytest.mark.parametrize("line", [b"nonsense\n", b"5\n", b'{"type":"ADDED","object":7}\n'])
async def test_a_watch_that_cannot_be_understood_is_begun_anew(line: bytes) -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1")
        api.events.put_nowait(line)
        await ear.until_failed("the API server's answer is")
        await ear.until("a=10.0.0.1")


async def test_an_event_may_come_in_pieces() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    data = event("ADDED", slice_of("s2", "b=10.0.0.2")) + event("DELETED", slice_of("s1"))
    async with serving(api), following(api) as ear:
        await ear.until("a=10.0.0.1")
        for begin in range(0, len(data), 50):
            api.events.put_nowait(data[begin : begin + 50])
        await ear.until("b=10.0.0.2")


async def test_a_port_that_is_missing_is_told_and_taken_when_it_is_there() -> None:
    api = ApiServer([slice_of("s1", "a=10.0.0.1", ports=[{"name": "web", "port": 80}])])
    service = KubernetesConfig(service="vllm", namespace="prod", port="http")
    async with serving(api), following(api, service) as ear:
        await ear.until_failed("no port is named http")
        await api.until(lambda: bool(api.watches))
        api.events.put_nowait(event("MODIFIED", slice_of("s1", "a=10.0.0.1")))
        await ear.until("a=10.0.0.1")

    assert len(api.lists) == 1


async def test_token_and_namespace_are_read_again_for_every_request(tmp_path: Path) -> None:
    token, namespace = tmp_path / "token", tmp_path / "namespace"
    token.write_text("first\n")
    namespace.write_text("mine\n")
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    service = KubernetesConfig(service="vllm")
    async with (
        serving(api),
        following(api, service, token_file=str(token), namespace_file=str(namespace)) as ear,
    ):
        await ear.until("a=10.0.0.1")
        await api.until(lambda: len(api.watches) == 1)
        token.write_text("second\n")
        api.events.put_nowait(None)
        await api.until(lambda: len(api.watches) == 2)

    assert api.tokens == ["Bearer first", "Bearer first", "Bearer second"]
    assert set(api.namespaces) == {"mine"}


async def test_without_a_namespace_or_a_server_it_says_what_is_needed(tmp_path: Path) -> None:
    api = ApiServer()
    service = KubernetesConfig(service="vllm")
    none = str(tmp_path / "none")
    async with serving(api), following(api, service, namespace_file=none) as ear:
        await ear.until_failed("kubernetes.namespace is needed")
    async with following(api, env={"KUBERNETES_SERVICE_HOST": ""}) as ear:
        await ear.until_failed("discovery.kubernetes.url is needed")


async def test_a_pod_s_environment_and_ca_are_enough(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    ca = tmp_path / "ca.crt"
    authority.cert_pem.write_to_path(str(ca))
    api = ApiServer([slice_of("s1", "a=10.0.0.1")])
    async with serving(api, context):
        host, _, port = api.url.removeprefix("https://").partition(":")
        env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        async with following(api, env=env, ca_file=str(ca)) as ear:
            await ear.until("a=10.0.0.1")
        async with following(api, env=env) as ear:  # the system's authorities do not know ours
            await ear.until_failed("the API server cannot be reached")
