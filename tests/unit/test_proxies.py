import pytest

from gateway.edge.proxies import Proxies

OURS = ("10.0.0.0/8", "fd00::/8")


@pytest.mark.parametrize(
    ("claimed", "peer", "client"),
    [
        (None, "10.0.0.1", "10.0.0.1"),
        (b"1.2.3.4", "10.0.0.1", "1.2.3.4"),
        (b"6.6.6.6, 1.2.3.4", "10.0.0.1", "1.2.3.4"),  # the first is the client's own word
        (b"1.2.3.4, 10.0.0.2", "10.0.0.1", "1.2.3.4"),
        (b"2001:db8::1,fd00::2", "10.0.0.1", "2001:db8::1"),
        (b"10.0.0.3, 10.0.0.2", "10.0.0.1", "10.0.0.3"),  # the client is one of ours
        (b"1.2.3.4, rubbish", "10.0.0.1", "10.0.0.1"),
        (b"1.2.3.4, rubbish, 10.0.0.2", "10.0.0.1", "10.0.0.2"),
        (b"", "10.0.0.1", "10.0.0.1"),
        (b"1.2.3.4", "5.6.7.8", "5.6.7.8"),
        (b"1.2.3.4", "", ""),
    ],
)
def test_the_client_is_the_last_address_that_is_no_proxy_of_ours(
    claimed: bytes | None, peer: str, client: str
) -> None:
    assert Proxies(OURS).client(claimed, peer) == client


def test_a_list_without_end_is_not_walked() -> None:
    claimed = b",".join([b"10.0.0.2"] * 5000)
    assert Proxies(OURS).client(claimed, "10.0.0.1") == "10.0.0.2"
