import socket

from gateway.sim.ports import all_free, free_port


def test_ports_in_a_row_are_free_and_no_outgoing_connections() -> None:
    for count in (1, 2, 5):
        first = free_port(count)
        assert first > 1024
        assert first + count <= 32_768


def test_no_port_is_given_twice() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert not all_free(range(taken, taken + 1))
        assert not all_free(range(taken - 1, taken + 1))
