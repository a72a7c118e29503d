import logging
from dataclasses import replace

import pytest

from tests.integration.rig import Conn, Received, Rig, chat, ok_chat, post, running

CHAT = post("/v1/chat/completions", chat())
IN_TURN = ("routing.policy=round_robin",)


def nobody_there(rig: Rig, host: str = "127.0.0.1") -> None:
    """Have requests of the first backend go where nobody listens; its probes go on as before."""
    pool = rig.app._upstreams.all()[0].pool
    pool.origin = replace(pool.origin, host=host, port=1)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about requests, without their ids."""
    lines = (text.split(": ", 1) for text in caplog.messages if text.startswith("request "))
    return [line for _, line in lines]


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "connection refused"), ("a" * 70 + ".test", "host name that cannot be one")],
)
async def test_the_log_says_why_a_backend_was_not_reached_and_the_client_not_where(
    host: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(ok_chat) as rig:
        nobody_there(rig, host)
        answer = await rig.ask(CHAT)

        assert answer.status == 502
        assert answer.json["error"]["message"] == "The backend could not be reached."
        assert host.encode() not in answer.body
    assert told(caplog) == [f"backend-1: {why}"]


async def test_the_log_says_why_another_backend_was_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "radixgate.exchange")
    async with running(ok_chat, ok_chat, settings=IN_TURN) as rig:
        nobody_there(rig)
        answers = [await rig.ask(CHAT) for _ in range(2)]

        assert [answer.status for answer in answers] == [200, 200]
    assert set(told(caplog)) == {"backend-1: connection refused; another is tried"}


async def test_log_and_breaker_say_how_answers_broke_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cut(conn: Conn, _: Received) -> None:
        conn.reset()

    async with running(cut) as rig:
        answers = [await rig.ask(CHAT) for _ in range(3)]

        assert [answer.status for answer in answers] == [502] * 3
    assert told(caplog) == ["backend-1: connection reset"] * 3
    opened = "backend backend-1: breaker open: 3 failures in a row, the last: connection reset"
    assert opened in caplog.messages
