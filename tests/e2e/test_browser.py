"""The live page in a real headless Chromium, where this machine has one; none is downloaded."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web

from gateway.core.dispatcher import Dispatcher
from gateway.core.settings import (
    BackendSpec,
    BucketSpec,
    ClassSpec,
    CoreSettings,
    ModelSpec,
    RoutingSpec,
)
from gateway.core.types import Chain, Explanation, Finish, Outcome, Query, Ticket, Usage
from gateway.edge.admin import AdminContext, ReloadResult, build_admin
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.record import RequestRecord
from tests.e2e import browser as chromium
from tests.e2e.browser import Tab, tab

_WAIT_S = 60.0
_TICK_S = 0.1
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>&amp;\"'"
ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the DevTools address of the browser that these tests share."""
    path = chromium.find()
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with chromium.running(path, tmp_path_factory.mktemp("browser")) as address:
        yield address


def fleet(count: int, **more: Any) -> CoreSettings:
    names = tuple(f"gpu-{n}" for n in range(count))
    settings = CoreSettings(
        models=(ModelSpec("m", names),),
        backends=tuple(BackendSpec(name) for name in names),
        classes=(
            ClassSpec("chat", default=True),
            ClassSpec("coding", bucket=BucketSpec(1.0, 9_000.0)),
        ),
        routing=RoutingSpec(policy="round_robin"),
    )
    return replace(settings, **more)


@dataclass
class Stage:
    """An admin listener whose requests the test makes up."""

    settings: CoreSettings
    key: str | None = None
    digests: frozenset[str] = frozenset()  # of the admin listener's own key
    requests: int = 0
    events: int = 0  # views that are open
    asked: list[str] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.dispatcher = Dispatcher(self.settings, random.Random(1), self.clock())
        self.telemetry = Telemetry(self.dispatcher, clock=self.clock, version="1.2.3")
        self.telemetry.set_labels(
            [cls.name for cls in self.settings.classes],
            [model.name for model in self.settings.models],
            [backend.name for backend in self.settings.backends],
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def start(self) -> None:
        """Listen, on the same port as before if it has listened before."""
        context = AdminContext(
            dispatcher=self.dispatcher,
            telemetry=self.telemetry,
            version="1.2.3",
            ready=lambda: True,
            reload=self._reload,
            explain=self._explain,
            clock=self.clock,
            started_at=self.clock(),
            keys=lambda: self.digests,
        )
        app = build_admin(context, tick_s=_TICK_S)
        app.middlewares.append(self._watched)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    def begin(self, cls: str = "chat", ident: str | None = None) -> tuple[str, Ticket]:
        """Let a request come in and go to a backend."""
        self.requests += 1
        ident = ident or f"request-{self.requests}"
        chain = Chain(array("Q", range(self.requests * 100, self.requests * 100 + 9)), 64.0, 600)
        model = self.settings.models[0].name
        ticket = self.dispatcher.admit(Query(model, cls, chain, 50), self.clock())
        assert isinstance(ticket, Ticket)
        self.dispatcher.remember(ident, ticket, self.clock())
        return ident, ticket

    def end(self, ident: str, ticket: Ticket, outcome: Outcome = Outcome.OK) -> None:
        now = self.clock()
        self.dispatcher.finish(ticket, Finish(outcome, prefilled=True, usage=Usage(600, 20)), now)
        record = RequestRecord(ident, "/", ticket.admitted_at, ticket.query.cls, "m")
        record.backend, record.outcome, record.ttft_s, record.total_s = (
            ticket.backend,
            outcome,
            0.25,
            0.5,
        )
        record.prompt_tokens, record.predicted_tokens = 600, ticket.hit_tokens
        self.telemetry.finished(record)

    @web.middleware
    async def _watched(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.key is not None and request.path != "/":
            given = request.headers.get("authorization")
            if given != f"Bearer {self.key}":
                return web.Response(status=401)
        if request.path != "/events":
            return await handler(request)
        self.events += 1
        try:
            return await handler(request)
        finally:
            self.events -= 1

    async def _reload(self) -> ReloadResult:
        return ReloadResult(ok=True)

    async def _explain(self, body: bytes, path: str, key: str | None = None) -> Explanation:
        raise NotImplementedError


@asynccontextmanager
async def staged(
    browser: str, settings: CoreSettings, *, key: str | None = None, password: str | None = None
) -> AsyncIterator[tuple[Stage, Tab]]:
    """Open the page; at the end nothing may have gone wrong in it, nor been asked of elsewhere."""
    stage = Stage(settings, key)
    if password is not None:
        stage.digests = frozenset({sha256(password.encode()).hexdigest()})
    await stage.start()
    try:
        async with tab(browser) as page:
            await page.size(1360, 900)
            user = "" if password is None else f"operator:{password}@"
            await page.open(stage.url.replace("//", f"//{user}"))
            yield stage, page
            strangers = [url for url in page.requested if urlsplit(url).port != stage.port]
            assert strangers in ([], ["data:,"])
            assert not page.errors
    finally:
        await stage.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not condition():  # noqa: ASYNC110 - plain state, nobody signals it
            await asyncio.sleep(0.01)


LIVE = "document.getElementById('link').textContent === 'live'"


def text_of(section: str, row: int, cell: int) -> str:
    return f"document.querySelectorAll('#{section} tbody tr')[{row}]?.children[{cell}].textContent"


async def next_ticks(page: Tab, count: int = 2) -> None:
    had = await page.eval("+(document.body.dataset.ticks || 0)")
    await page.until(f"+document.body.dataset.ticks >= {had + count}")


async def test_the_page_shows_what_happens_without_being_reloaded(browser: str) -> None:
    async with staged(browser, fleet(2)) as (stage, page):
        await page.until(LIVE)
        assert await page.eval(text_of("backends", 0, 0)) == "gpu-0"
        assert await page.eval("document.getElementById('count').textContent") == "2 up"
        ident, ticket = stage.begin()
        await page.until(f"{text_of('requests', 0, 4)} === 'running'")
        row = int(ticket.backend.removeprefix("gpu-"))
        await page.until(f"{text_of('backends', row, 3)} === '1'")
        stage.end(ident, ticket)
        await page.until(f"{text_of('requests', 0, 4)} === 'ok'")
        await page.until(f"{text_of('backends', row, 3)} === '0'")
        assert await page.eval(text_of("requests", 0, 1)) == ident
        assert await page.eval(text_of("classes", 0, 1)) == "250 ms / 250 ms"
        stage.dispatcher.set_up("gpu-1", up=False, now=stage.clock())
        await page.until(f"{text_of('backends', 1, 1)} === 'down'")
        assert await page.eval("document.title") == "(1 down) Radixgate"


async def test_ticks_rewrite_the_page_and_never_rebuild_it(browser: str) -> None:
    async with staged(browser, fleet(3)) as (stage, page):
        await page.until(LIVE)
        await page.eval(
            "document.querySelectorAll('#backends tbody tr, #classes tbody tr, #backends button')"
            ".forEach(node => { node.kept = true; })"
        )
        await page.eval("document.querySelector('#backends .act').focus()")
        stage.begin()
        await next_ticks(page, 5)
        assert await page.eval(
            "[...document.querySelectorAll('#backends tbody tr, #classes tbody tr')]"
            ".every(node => node.kept)"
        )
        assert await page.eval("document.activeElement.kept")


async def test_a_decision_is_opened_read_and_left_with_the_keyboard_alone(browser: str) -> None:
    async with staged(browser, fleet(3)) as (stage, page):
        ident, ticket = stage.begin("coding")
        await page.until("document.querySelector('#requests .open')")
        await page.eval("document.querySelector('#requests .open').focus()")
        await page.key(*ENTER)
        await page.until("document.querySelector('dialog[open] tbody tr')")
        shown = await page.eval("document.querySelector('dialog').textContent")
        assert f"Request {ident}" in shown
        assert f"went to{ticket.backend}" in shown
        assert ticket.reason in shown
        assert await page.eval("document.querySelectorAll('dialog tbody tr').length") == 3
        won = await page.eval("document.querySelector('dialog tr.won th').textContent")
        assert ticket.backend in won
        await page.key(*ESCAPE)
        await page.until("!document.querySelector('dialog[open]')")
        assert await page.eval("document.activeElement.className") == "open"


async def test_a_decision_that_is_forgotten_says_so(browser: str) -> None:
    async with staged(browser, fleet(1)) as (stage, page):
        stage.begin()
        await page.until("document.querySelector('#requests .open')")
        stage.dispatcher._memory._records.clear()
        await page.eval("document.querySelector('#requests .open').click()")
        await page.until(
            "document.querySelector('dialog').textContent.includes('no longer remembered')"
        )
        page.errors.clear()  # the console notes the 404


async def test_draining_asks_first(browser: str) -> None:
    async with staged(browser, fleet(2)) as (stage, page):
        await page.until(LIVE)
        press = "document.querySelector('#backends .act').click()"
        answer = "[...document.querySelectorAll('dialog .foot button')]"
        await page.eval(press)
        await page.eval(f"{answer}.find(b => b.textContent === 'Cancel').click()")
        await page.until("!document.querySelector('dialog[open]')")
        assert stage.asked.count("/backends/gpu-0/drain") == 0
        for word, state in (("Drain", "draining"), ("Undrain", "up")):
            await page.eval(press)
            await page.eval(f"{answer}.find(b => b.textContent === '{word}').click()")
            await page.until(f"{text_of('backends', 0, 1)} === '{state}'")
            await page.until("!document.querySelector('dialog[open]')")
        assert stage.asked.count("/backends/gpu-0/drain") == 1


async def test_hostile_names_are_only_ever_text(browser: str) -> None:
    settings = fleet(
        0,
        models=(ModelSpec(HOSTILE, (HOSTILE, "b")),),
        backends=(BackendSpec(HOSTILE), BackendSpec("b")),
        classes=(ClassSpec(HOSTILE, default=True),),
    )
    async with staged(browser, settings) as (stage, page):
        for _ in range(2):
            stage.begin(HOSTILE)
        await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
        await page.eval("document.querySelector('#requests .open').click()")
        await page.until("document.querySelector('dialog[open] tbody tr')")
        assert HOSTILE in await page.eval("document.querySelector('dialog').textContent")
        await page.eval("document.querySelector('dialog').close()")
        await page.eval("document.querySelector('#backends .act').click()")
        assert HOSTILE in await page.eval("document.querySelector('dialog').textContent")
        await page.eval("[...document.querySelectorAll('dialog .foot button')].at(-1).click()")
        await page.until(f"{text_of('backends', 0, 1)} === 'draining'")

        assert await page.eval(text_of("backends", 0, 0)) == HOSTILE
        assert await page.eval(text_of("backends", 0, 2)) == HOSTILE
        assert await page.eval(text_of("classes", 0, 0)) == HOSTILE
        assert await page.eval("document.querySelectorAll('img, iframe').length") == 0
        assert await page.eval("document.querySelectorAll('script').length") == 1
        assert await page.eval("window.hacked") is None
        blocked = "try { document.body.innerHTML = '<b>x</b>'; 'ran' } catch { 'blocked' }"
        assert await page.eval(blocked) == "blocked"
        page.errors.clear()  # the console notes what was just tried


async def test_64_backends_fit_a_desk_and_a_phone_and_can_be_searched(browser: str) -> None:
    async with staged(browser, fleet(64)) as (stage, page):
        for _ in range(30):
            stage.begin()
        stage.dispatcher.set_up("gpu-40", up=False, now=stage.clock())
        rows = "document.querySelectorAll('#backends tbody tr').length"
        await page.until(f"{rows} === 64 && document.querySelectorAll('#requests tr').length > 30")
        for width, height in ((1360, 900), (390, 844)):
            await page.size(width, height)
            wide = await page.eval("document.documentElement.scrollWidth")
            assert wide <= width  # tables scroll by themselves, the page does not
        await page.eval(
            "[...document.querySelectorAll('#backends thead button')]"
            ".find(b => b.textContent === 'state').click()"
        )
        assert await page.eval(text_of("backends", 0, 0)) == "gpu-40"
        assert (
            await page.eval("document.querySelector('#backends [aria-sort]').ariaSort")
            == "descending"
        )
        find = orjson.dumps("gpu-3").decode()
        await page.eval(
            f"(f => {{ f.value = {find}; f.dispatchEvent(new Event('input')); }})"
            "(document.getElementById('filter'))"
        )
        assert await page.eval(rows) == 11  # gpu-3 and gpu-30 to gpu-39


CONTRAST = """
(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = node => { for (; node; node = node.parentElement) {
    const c = getComputedStyle(node).backgroundColor; if (!/, 0\\)$|transparent/.test(c)) return c; } };
  let worst = [99, ''];
  for (const node of document.querySelectorAll('h1, h2, th, td, td span, header span, button, .soft')) {
    if (!node.textContent.trim() || !node.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < worst[0]) worst = [ratio, node.className + ' ' + node.textContent.slice(0, 30)];
  }
  return worst;
})()
"""


async def test_all_text_has_contrast_by_day_and_by_night(browser: str) -> None:
    async with staged(browser, fleet(4)) as (stage, page):
        ends = (Outcome.OK, Outcome.UPSTREAM_ERROR, Outcome.EXPIRED, Outcome.CLIENT_CLOSED)
        stage.begin()
        await page.until(LIVE)
        for outcome in ends:
            stage.end(*stage.begin(), outcome)
        stage.dispatcher.set_up("gpu-2", up=False, now=stage.clock())
        stage.dispatcher.drain("gpu-3")
        await page.until(f"{text_of('backends', 3, 1)} === 'draining'")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 5")
        for dark in (False, True):
            await page.size(1360, 900, dark=dark)
            ratio, where = await page.eval(CONTRAST)
            assert ratio >= 4.5, where  # WCAG 2.2, level AA
            back = await page.eval("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, back[4:-1].split(","))) < 384) is dark


async def test_every_control_and_table_has_a_name(browser: str) -> None:
    async with staged(browser, fleet(12)) as (stage, page):
        stage.begin()
        await page.until("document.querySelector('#requests .open')")
        nodes = (await page.send("Accessibility.getFullAXTree"))["nodes"]
        named: dict[str, list[str]] = {}
        for node in nodes:
            if not node.get("ignored"):
                name = node.get("name", {}).get("value", "")
                named.setdefault(node["role"]["value"], []).append(name)
        assert len(named["table"]) == 3
        for role in ("table", "button", "searchbox", "region"):
            assert all(named[role]), (role, named[role])
        assert {"Drain gpu-0", "Drain gpu-11"} <= set(named["button"])
        assert {"class", "backend", "outcome"} <= set(named["columnheader"])
        assert {"gpu-0", "chat"} <= set(named["rowheader"])


async def test_a_tab_that_nobody_sees_keeps_no_connection(browser: str) -> None:
    hide = (
        "Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {} }});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    async with staged(browser, fleet(1)) as (stage, page):
        await page.until(LIVE)
        await page.eval(hide.format("true"))
        await until(lambda: stage.events == 0)
        assert stage.telemetry.watcher is None
        asked = len(stage.asked)
        await page.eval("new Promise(done => setTimeout(done, 300))")
        assert len(stage.asked) == asked
        await page.eval(hide.format("false"))
        await page.until(LIVE)
        assert stage.events == 1


async def test_the_page_comes_back_by_itself_when_the_gateway_does(browser: str) -> None:
    async with staged(browser, fleet(1)) as (stage, page):
        await page.until(LIVE)
        await stage.stop()
        await page.until("document.body.classList.contains('stale')")
        assert "trying again" in await page.eval("document.getElementById('link').textContent")
        await stage.start()
        await page.until(LIVE)
        assert not await page.eval("document.body.classList.contains('stale')")
        page.errors.clear()  # the console notes each refused connection


async def test_the_admin_key_is_asked_for_once_and_kept_for_the_tab(browser: str) -> None:
    give = (
        "document.getElementById('key').value = '{}';"
        "document.querySelector('#unlock button').click()"
    )
    seen = "!document.getElementById('locked').hidden"
    async with staged(browser, fleet(1), key="open sesame") as (stage, page):
        await page.until(seen)
        assert await page.eval("document.getElementById('backends').hidden")
        await page.eval(give.format("guess"))
        await page.until("document.getElementById('wrong').textContent !== ''")
        assert await page.eval(seen)
        await page.eval(give.format("open sesame"))
        await page.until(LIVE)
        ident, ticket = stage.begin()
        await page.until("document.querySelector('#requests .open')")
        await page.eval("document.querySelector('#requests .open').click()")
        await page.until("document.querySelector('dialog[open] tbody tr')")
        assert ticket.backend in await page.eval("document.querySelector('dialog').textContent")
        assert await page.eval("localStorage.length") == 0
        await page.open(stage.url)
        await page.until(LIVE)
        await until(lambda: stage.events == 1)  # the page that was left gave its place back
        assert not await page.eval(seen)
        assert ident not in await page.eval("location.href")
        page.errors.clear()  # the console notes each 401


async def test_a_browser_that_gave_the_listeners_key_is_asked_no_more(browser: str) -> None:
    async with staged(browser, fleet(2), password="sesame") as (stage, page):
        await page.until(LIVE)
        stage.begin()
        await page.until("document.querySelector('#requests .open')")
        await page.eval("document.querySelector('#requests .open').click()")
        await page.until("document.querySelector('dialog[open] tbody tr')")
        await page.eval("document.querySelector('dialog').close()")
        await page.eval("document.querySelector('#backends .act').click()")
        await page.eval("[...document.querySelectorAll('dialog .foot button')].at(-1).click()")
        await page.until(f"{text_of('backends', 0, 1)} === 'draining'")
