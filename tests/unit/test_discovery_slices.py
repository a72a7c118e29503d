"""EndpointSlices as backends: conditions, ports, names, and one engine counted once."""

from typing import Any

import pytest

from gateway.discovery.slices import SliceProblem, members_of, read_slice


def _endpoint(address: str, pod: str | None = None, **conditions: bool | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"addresses": [address], "conditions": conditions}
    if pod is not None:
        entry["targetRef"] = {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"}
    return entry


def _slice(*endpoints: Any, family: str = "IPv4", ports: Any = ({"port": 8000},)) -> dict[str, Any]:
    return {"addressType": family, "endpoints": list(endpoints), "ports": list(ports)}


def _told(*items: dict[str, Any], port: str | None = None) -> list[tuple[str | None, str | None]]:
    return [(m.name, m.url) for m in members_of([read_slice(item) for item in items], port)]


def test_ready_endpoints_are_backends_named_by_their_pods() -> None:
    told = _told(_slice(_endpoint("10.0.0.2", "vllm-b", ready=True), _endpoint("10.0.0.1")))

    assert told == [(None, "http://10.0.0.1:8000"), ("vllm-b", "http://10.0.0.2:8000")]


@pytest.mark.parametrize(
    ("conditions", "taken"),
    [
        ({}, True),
        ({"ready": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),  # publishNotReadyAddresses
    ],
)
def test_the_conditions_say_who_gets_requests(
    conditions: dict[str, bool | None], taken: bool
) -> None:
    told = _told(_slice(_endpoint("10.0.0.1", "a", **conditions), _endpoint("10.0.0.9", "z")))

    assert ("a" in [name for name, _ in told]) is taken


def test_while_none_is_ready_those_that_end_but_serve_are_taken() -> None:
    ending = {"ready": False, "terminating": True}
    told = _told(
        _slice(
            _endpoint("10.0.0.1", "a", serving=True, **ending),
            _endpoint("10.0.0.2", "b", serving=False, **ending),
            _endpoint("10.0.0.3", "c", ready=False, serving=False),
        )
    )
    assert told == [("a", "http://10.0.0.1:8000")]


def test_a_pod_with_two_families_is_one_backend() -> None:
    told = _told(
        _slice(_endpoint("fd00::1", "a"), family="IPv6"),
        _slice(_endpoint("10.0.0.1", "a"), family="IPv4"),
        _slice(_endpoint("fd00::2", "b"), family="IPv6"),
    )
    assert told == [("a", "http://10.0.0.1:8000"), ("b", "http://[fd00::2]:8000")]


def test_an_endpoint_in_two_slices_is_one_backend_and_ready_if_either_says_so() -> None:
    told = _told(
        _slice(_endpoint("10.0.0.1", "a", ready=False)), _slice(_endpoint("10.0.0.1", "a"))
    )
    assert told == [("a", "http://10.0.0.1:8000")]


PORTS = ({"name": "http", "port": 8000}, {"name": "metrics", "port": 9100}, {"name": "none"})


@pytest.mark.parametrize(("port", "number"), [("http", 8000), ("metrics", 9100), ("7000", 7000)])
def test_the_port_is_a_name_or_a_number(port: str, number: int) -> None:
    told = _told(_slice(_endpoint("10.0.0.1"), ports=PORTS), port=port)

    assert told == [(None, f"http://10.0.0.1:{number}")]


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (None, "kubernetes.port is needed, the Service has 2: http, metrics"),
        ("web", "no port is named web: there is http, metrics"),
    ],
)
def test_a_port_that_is_not_told_is_a_problem(port: str | None, message: str) -> None:
    with pytest.raises(SliceProblem, match=message):
        _told(_slice(_endpoint("10.0.0.1"), ports=PORTS), port=port)


def test_a_slice_without_endpoints_needs_no_port() -> None:
    assert _told({"addressType": "IPv4", "endpoints": None, "ports": None}) == []


def test_parts_of_another_form_are_passed_over() -> None:
    odd: list[Any] = [None, 5, {}, {"addresses": []}, {"addresses": [5]}, {"addresses": "10.0.0.1"}]
    odd.append({"addresses": ["10.0.0.1"], "conditions": 5, "targetRef": "x"})
    told = _told(_slice(*odd, ports=(5, {"port": "x"}, {"port": 1})))

    assert told == [(None, "http://10.0.0.1:1")]


def test_a_pod_s_name_that_is_no_name_is_not_used() -> None:
    assert _told(_slice(_endpoint("10.0.0.1", "p" * 200)))[0][0] is None
