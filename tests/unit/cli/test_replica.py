"""`radixgate replica`: how it fails."""

import socket

import pytest

from gateway.cli.main import main


def test_a_port_in_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]

        code = main(["replica", "--port", str(port)])

    shown = capsys.readouterr()
    assert code == 1
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert str(port) in shown.err
    assert "address already in use" in shown.err
