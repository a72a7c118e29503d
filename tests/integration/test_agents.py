"""What the common coding agents send: their class by the built-in rules, their sessions, deadlines."""

import asyncio

import orjson
import pytest

from gateway.edge.http import patience_of, session_of, sort_headers
from tests.integration.rig import chat, ok_chat, post, running
from tests.integration.test_key_limits import AUTH, keyed
from tests.integration.test_queue import CHAT, TIGHT, Held, ask, begin

# As they name themselves; those that do not are told by their tools or by their long prompts.
AGENTS = [
    "claude-cli/2.0.14 (external, cli)",
    "codex_cli_rs/0.72.0 (Ubuntu 24.04; x86_64) xterm-256color",
    "codex_vscode/0.38.0 (Mac OS 15.1; arm64)",
    "Cline/3.35.0",
    "Continue/1.2.0 node-fetch",
    "aider/0.86.1",
    "opencode/1.0.20 ai-sdk/provider-utils/3.0.9",
]


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_coding_agent_is_known_by_its_name(agent: str) -> None:
    async with running(ok_chat) as rig:
        answer = await rig.ask(post(CHAT, chat("hi"), f"user-agent: {agent}"))
        assert answer.header("x-gateway-class") == "coding"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {"max_tokens": 5}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "read"}}]}),
        (CHAT, {"messages": [{"role": "user", "content": "long " * 16_000}]}),
    ],
)
async def test_and_else_by_what_it_asks(path: str, more: dict[str, object]) -> None:
    async with running(ok_chat) as rig:
        answer = await rig.ask(post(path, chat("hi") | more, "user-agent: OpenAI/Python 2.1"))
        assert answer.header("x-gateway-class") == "coding"


@pytest.mark.parametrize(
    "agent", ["OpenAI/Python 2.1", "curl/8.5", "my-claude-cli", "python-httpx"]
)
async def test_who_is_no_agent_is_chat(agent: str) -> None:
    async with running(ok_chat) as rig:
        answer = await rig.ask(post(CHAT, chat("hi"), f"user-agent: {agent}"))
        assert answer.header("x-gateway-class") == "chat"


async def test_fill_in_the_middle_can_have_a_class_of_its_own() -> None:
    async with running(ok_chat, settings=("classes.fim.match=[{suffix: true}]",)) as rig:
        body = {"model": "m", "prompt": "def f(", "max_tokens": 5}
        whole = await rig.ask(post("/v1/completions", body))
        middle = await rig.ask(post("/v1/completions", body | {"suffix": "return x"}))
        assert whole.header("x-gateway-class") == "chat"
        assert middle.header("x-gateway-class") == "fim"


@pytest.mark.parametrize(
    "name",
    [
        "X-Claude-Code-Session-Id",
        "session_id",
        "conversation_id",
        "x-session-affinity",
        "x-opencode-session",
        "X-Task-ID",
        "X-Session-ID",
        "x-gateway-session",
    ],
)
def test_the_session_headers_of_agents_name_the_conversation(name: str) -> None:
    picked, _ = sort_headers([(name.encode(), b"abc-1")])
    assert session_of(picked) == "abc-1"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"x-gateway-deadline-ms": "1500"}, 1.5),
        ({"x-stainless-read-timeout": "600", "x-gateway-deadline-ms": "250"}, 0.25),
        ({"x-stainless-read-timeout": "20", "x-stainless-timeout": "600"}, 20.0),
        ({"x-stainless-timeout": "30"}, 30.0),
        ({"x-gateway-deadline-ms": "soon"}, None),
        ({"x-gateway-deadline-ms": "-5"}, None),
        ({"x-gateway-deadline-ms": "nan", "x-stainless-timeout": "30"}, 30.0),
        ({}, None),
    ],
)
def test_the_least_that_a_client_states_bounds_its_wait(
    headers: dict[str, str], seconds: float | None
) -> None:
    picked, _ = sort_headers([(k.encode(), v.encode()) for k, v in headers.items()])
    assert patience_of(picked) == seconds


async def test_a_stated_deadline_bounds_the_wait_and_goes_to_no_backend() -> None:
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, ask("a", "x " * 4000, "x-gateway-deadline-ms: 60000"))
        await backend.saw(1)
        answer = await rig.ask(ask("late", "x " * 4000, "x-gateway-deadline-ms: 150"))
        assert (answer.status, answer.code) == (429, "queue_timeout")
        assert rig.backends[0].received[0].header("x-gateway-deadline-ms") is None
        backend.go.release()
        await asyncio.gather(*tasks)


PRIORITY = (
    "classes.chat.default=true",
    "classes.chat.engine_priority=7",
    "classes.b.match=[{tools: true}]",
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent", [{}, {"priority": -100}])
async def test_d47_a_class_has_its_engine_priority_written_into_its_bodies(
    sent: dict[str, int], *, stream: bool
) -> None:
    async with running(ok_chat, settings=PRIORITY) as rig:
        body = orjson.dumps(chat("hi", stream=stream, **sent))
        answer = await rig.ask(post(CHAT, body, "x-vllm-priority: -100"))
        assert answer.status == 200
        got = rig.backends[0].received[0]
        assert orjson.loads(got.body)["priority"] == 7
        assert got.header("x-vllm-priority") is None
        if not stream and not sent:
            assert got.body == body[:-1] + b',"priority":7}'


async def test_d47_a_key_that_may_choose_keeps_its_own_and_nothing_is_written_otherwise() -> None:
    chosen = keyed("choose_priority: true", *PRIORITY)
    async with running(ok_chat, settings=chosen) as rig:
        await rig.ask(post(CHAT, chat("hi", priority=3), AUTH))
        await rig.ask(post(CHAT, chat("hi"), AUTH))
        tools = [{"type": "function", "function": {"name": "f"}}]
        await rig.ask(post(CHAT, chat("hi", tools=tools), AUTH))
        await rig.ask(post("/v1/embeddings", {"model": "m", "input": "x"}, AUTH))
        bodies = [orjson.loads(one.body) for one in rig.backends[0].received]
        assert [body.get("priority") for body in bodies] == [3, 7, None, None]
