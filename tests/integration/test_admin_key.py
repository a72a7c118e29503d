"""The admin listener's own key, and the commands that bring it."""

import asyncio
import base64
import hashlib
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from gateway.config.load import load
from gateway.config.problems import ConfigErrors
from tests.integration.rig import Rig, running

KEY = "rg-admin-secret"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
SET = (f"admin.sha256={DIGEST}",)


async def ask(
    rig: Rig, path: str, authorization: str | None = None, method: str = "GET"
) -> tuple[int, str, str]:
    """Return status, body and challenge of an admin route's answer."""
    headers = {} if authorization is None else {"authorization": authorization}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, rig.app.admin_url + path, headers=headers) as answer,
    ):
        return answer.status, await answer.text(), answer.headers.get("www-authenticate", "")


PATHS = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/trie"),
    ("GET", "/decisions/x"),
    ("GET", "/no-such-route"),
    ("POST", "/reload"),
    ("POST", "/explain"),
    ("POST", "/backends/backend-1/drain"),
]


async def test_everything_but_health_asks_for_the_key() -> None:
    async with running(settings=SET) as rig:
        for method, path in PATHS:
            status, body, challenge = await ask(rig, path, method=method)
            assert status == 401, path
            assert "invalid_api_key" in body
            assert challenge.startswith("Bearer")
        assert (await ask(rig, "/healthz"))[0] == 200
        assert (await ask(rig, "/readyz"))[0] == 200
        assert (await ask(rig, "/status", f"Bearer {KEY}"))[0] == 200
        refused = "gateway_admin_refusals_total"
        assert rig.metric(refused, result="missing") == len(PATHS)
        assert rig.metric("gateway_backend_draining") == 0


WRONG = [
    "Bearer wrong",
    "Bearer",
    f"Bearer {DIGEST}",
    f"Token {KEY}",
    KEY,
    "Basic !!",
    "Basic " + base64.b64encode(f"{KEY}:".encode()).decode(),
]


async def test_what_is_not_the_key_does_not_pass() -> None:
    async with running(settings=SET) as rig:
        for authorization in WRONG:
            assert (await ask(rig, "/metrics", authorization))[0] == 401, authorization
        assert rig.metric("gateway_admin_refusals_total") == len(WRONG)


async def test_browsers_may_give_it_as_a_password() -> None:
    async with running(settings=SET) as rig:
        basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
        status, body, _ = await ask(rig, "/", f"Basic {basic}")
        assert status == 200
        assert "<html" in body


async def test_the_key_of_a_variable_and_of_a_file_pass_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXGATE_ADMIN_KEY", "from-variable")
    file = tmp_path / "key"
    file.write_text("from-file\n")
    settings = ("admin.key_env=RADIXGATE_ADMIN_KEY", f"admin.key_file={file}")
    async with running(settings=settings) as rig:
        for key in ("from-variable", "from-file"):
            assert (await ask(rig, "/metrics", f"Bearer {key}"))[0] == 200
        file.write_text("another")
        assert (await rig.app.reload()).ok
        assert (await ask(rig, "/metrics", "Bearer from-file"))[0] == 401
        assert (await ask(rig, "/metrics", "Bearer another"))[0] == 200
        file.write_text("")
        result = await rig.app.reload()
        assert not result.ok
        assert "key_file" in result.problems[0]
        assert (await ask(rig, "/metrics", "Bearer another"))[0] == 200


async def test_without_a_key_the_listener_is_open() -> None:
    async with running() as rig:
        assert (await ask(rig, "/metrics"))[0] == 200


async def test_the_commands_bring_the_key_from_their_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tmp_path / "r.json"
    request.write_text('{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    monkeypatch.setenv("RADIXGATE_ADMIN_KEY", KEY)
    monkeypatch.setenv("OTHER", "wrong")
    async with running(settings=SET) as rig:
        explain = ("explain", str(request), "--gateway", rig.app.admin_url)
        good = await command(*explain)
        assert good.returncode == 0, good.stderr
        assert "winner" in good.stdout
        bad = await command(*explain, "--admin-key-env", "OTHER")
        assert bad.returncode == 1
        assert "401: the admin listener wants its key, in RADIXGATE_ADMIN_KEY" in bad.stderr
        nobody = await command(*explain, "--key", "nobody")
        assert "refused with 404: no such key" in nobody.stderr
        unset = await command(*explain, "--admin-key-env", "NOT_SET_ANYWHERE")
        assert unset.returncode == 2
        assert "NOT_SET_ANYWHERE" in unset.stderr


async def command(*words: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "gateway.cli.main", *words]
    return await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False
    )


def test_an_open_listener_beyond_loopback_is_warned_of_and_with_a_key_of_the_keys_way() -> None:
    def warned(*overrides: str) -> list[str]:
        backends = ("http://h:1",)
        found = load(None, backends=backends, overrides=("admin.host=0.0.0.0", *overrides))
        return [f"{warning.key}: {warning.message}" for warning in found.warnings]

    in_clear = ["admin.host: the admin listener speaks plain HTTP: its key can be read on the way"]
    assert warned() == ["admin.host: the admin listener has no key"]
    assert warned(*SET) == in_clear
    assert warned("admin.key_env=X") == in_clear
    with pytest.raises(ConfigErrors, match=r"admin\.sha256"):
        warned("admin.sha256=abc")


def test_the_commands_variable_is_no_configuration_key() -> None:
    found = load(None, backends=("http://h:1",), env={"RADIXGATE_ADMIN_KEY": "x"})
    assert found.warnings == ()
