"""`radixgate explain`: asks a running gateway what it would do with a request, and prints it.

Nothing is sent to a backend and nothing is counted. Must never print the request.
"""

import argparse
import http.client
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from gateway.cli import gateway_url
from gateway.cli.admin_key import NoAdminKey, add_argument, admin_headers
from gateway.config.overlay import ADMIN_KEY

HELP = "what would happen to this request now: class, prefix hits, cost per backend, the winner"

_TIMEOUT_S = 30.0
_TOLD = "="  # before a hit that the engine itself tells
_NO_ROUTE = ("not_found", None)  # the data listener's answer; a key or model unknown has its param
_LEAST_TERM = 1e-6  # below the fourth place of any cost


class ExplainError(Exception):
    """Why there is no explanation, said to the user."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("request", metavar="REQUEST.json", help="the request's body; - reads stdin")
    gateway_url.add_argument(parser)
    parser.add_argument(
        "--path",
        metavar="PATH",
        help="route it would be sent to, such as /v1/messages (default: by its fields)",
    )
    parser.add_argument(
        "--key",
        metavar="NAME",
        help="name of the key it would come with: its class, and its hits if keys are isolated",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as it came")
    add_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and print; 1 when there is no explanation."""
    try:
        headers = admin_headers(args)
    except NoAdminKey as error:
        print(f"radixgate explain: {error}", file=sys.stderr)
        return 2
    try:
        answer = ask(args.gateway, _body(args.request), args.path, args.key, headers)
    except ExplainError as error:
        print(f"radixgate explain: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
    else:
        print(render(answer))
    return 0


def ask(
    gateway: str,
    body: bytes,
    path: str | None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the explanation of `body` by the gateway whose admin listener is at `gateway`.

    `headers` bring that listener's own key, if it has one.

    Raises:
        ExplainError: the URL is none, nothing answers there, or the answer is a refusal.
    """
    url = _parse(gateway)
    kind = http.client.HTTPSConnection if url.tls else http.client.HTTPConnection
    connection = kind(url.host, url.port, timeout=_TIMEOUT_S)
    route = url.base + "/explain"
    given = {"path": path, "key": key}
    asked = {name: value for name, value in given.items() if value is not None}
    if asked:
        route += "?" + urlencode(asked, safe="/", quote_via=quote)
    try:
        sent = {"content-type": "application/json", **(headers or {})}
        connection.request("POST", route, body, sent)
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ExplainError(f"no gateway answers at {gateway} ({reason})") from error
    finally:
        connection.close()
    return _answer(status, text)


def render(answer: dict[str, Any]) -> str:
    """Return the explanation for people."""
    about = "exact" if answer["prompt_tokens_exact"] else "estimated"
    lines = [
        f"class    {answer['class']} ({answer['class_rule']})",
        f"prompt   {answer['prompt_tokens']} tokens ({about})",
        f"policy   {answer['policy']}",
        f"winner   {answer['winner'] or 'none'}: {answer['reason']}",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("backend", "hit", "uncached", "in flight", "owed s", "cost s", "")
    ]
    rows += [_row(backend, answer["winner"]) for backend in answer["backends"]]
    told = any(backend.get("index") == "exact" for backend in answer["backends"])
    note = ["", f"{_TOLD} as the engine's KV events tell"] if told else []
    why = [("  " + b["name"], b["why_hit"]) for b in answer["backends"] if b.get("why_hit")]
    believed = ["", *_aligned([("prefix on", "believed because"), *why])] if why else []
    return "\n".join(lines + _aligned(rows) + note + believed)


def _body(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ExplainError(f"cannot read {name}: {error.strerror}") from error


def _parse(gateway: str) -> gateway_url.GatewayUrl:
    try:
        return gateway_url.parse(gateway)
    except gateway_url.NoGatewayUrl as error:
        raise ExplainError(str(error)) from error


def _answer(status: int, text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ExplainError(f"the answer is no gateway's (status {status})")
    if status == 401:
        wanted = f"the admin listener wants its key, in {ADMIN_KEY} or as --admin-key-env says"
        raise ExplainError(f"refused with 401: {wanted}")
    if status != 200:
        error = value.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        if isinstance(error, dict) and (error.get("code"), error.get("param")) == _NO_ROUTE:
            message = "that is no admin listener's address (admin.port, 9090 by default)"
        raise ExplainError(f"refused with {status}: {message}")
    if "winner" not in value:
        raise ExplainError("the answer is no explanation")
    return value


def _row(backend: dict[str, Any], winner: str | None) -> tuple[str, ...]:
    cost = backend["cost_s"]
    mark = "* " if backend["name"] == winner else "  "
    terms = " ".join(f"{name}={_figure(value)}" for name, value in backend["terms"].items())
    return (
        mark + backend["name"],
        (_TOLD if backend.get("index") == "exact" else "") + str(backend["hit_tokens"]),
        str(backend["uncached_tokens"]),
        str(backend["in_flight"]),
        f"{backend['owed_prefill_s']:.3f}",
        "-" if cost is None else f"{cost:.4f}",
        terms if backend["eligible"] else f"not eligible: {backend['why_not']}",
    )


def _figure(value: float) -> str:
    """Return a term; what is too small to decide anything is 0, not 1.8e-11."""
    return f"{value:.4g}" if abs(value) >= _LEAST_TERM else "0"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *figures, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(figures, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines
