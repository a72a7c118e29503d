"""A headless Chromium driven over its DevTools protocol; nothing is ever downloaded."""

import asyncio
import base64
import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_START_S = 60.0
_WAIT_S = 60.0
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
    "about:blank",
)


def find() -> str | None:
    """Return the browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def running(path: str, home: Path) -> Iterator[str]:
    """Run a browser with its profile in `home`; yield the DevTools address."""
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [path, f"--user-data-dir={home}", *_ARGUMENTS],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        port = home / "DevToolsActivePort"
        _await_file(port, process)
        number, route = port.read_text().split()
        yield f"ws://127.0.0.1:{number}{route}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_file(port: Path, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _START_S
    while not (port.exists() and port.read_text().count("\n")):
        assert process.poll() is None, "the browser did not start"
        assert time.monotonic() < end, "the browser tells no address"
        time.sleep(0.05)


class Tab:
    """One page. `errors` are what its console and its exceptions said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.session = ""
        self.errors: list[str] = []
        self.requested: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            self._take(orjson.loads(message.data))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the browser went away"))

    def _take(self, told: dict[str, Any]) -> None:
        if "id" in told:
            answer = self._answers.pop(told["id"])
            if not answer.done():
                answer.set_result(told)
            return
        params = told.get("params", {})
        match told["method"]:
            case "Runtime.exceptionThrown":
                self.errors.append(orjson.dumps(params["exceptionDetails"]).decode())
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case _:
                pass

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        call: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self.session:
            call["sessionId"] = self.session
        await self._socket.send_str(orjson.dumps(call).decode())
        async with asyncio.timeout(_WAIT_S):
            told = await answer
        assert "error" not in told, (method, told["error"])
        result: dict[str, Any] = told["result"]
        return result

    async def eval(self, script: str) -> Any:
        """Return what an expression comes to, awaited if it is a promise."""
        told = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression is true; the page's own frames are the clock."""
        return await self.eval(
            "new Promise((done, fail) => {"
            f" const end = performance.now() + {_WAIT_S * 900};"
            f" const look = () => {{ const found = ({condition}); if (found) done(found);"
            f" else if (performance.now() > end) fail(new Error({orjson.dumps(condition).decode()}));"
            " else setTimeout(look, 20); }; look(); })"
        )

    async def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(_WAIT_S):
            await self._loaded.wait()

    async def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Become a screen of this size."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def key(self, name: str, code: int) -> None:
        """Press and let go of a key."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                **extra,
            )

    async def shot(self) -> bytes:
        """Return what is seen as a PNG."""
        told = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(told["data"])


@contextlib.asynccontextmanager
async def tab(address: str) -> AsyncIterator[Tab]:
    """Open a tab with a storage of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as socket,
    ):
        page = Tab(socket)
        listening = asyncio.ensure_future(page.listen())
        context = (await page.send("Target.createBrowserContext"))["browserContextId"]
        target = await page.send("Target.createTarget", url="about:blank", browserContextId=context)
        told = await page.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page.session = told["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        try:
            yield page
        finally:
            page.session = ""
            with contextlib.suppress(Exception):
                await page.send("Target.disposeBrowserContext", browserContextId=context)
            await socket.close()
            await asyncio.gather(listening, return_exceptions=True)
