"""Who the client is behind proxies: the last address in `X-Forwarded-For` that is no proxy of ours.

Whatever stands before that one, anybody may have written. Must never return what is no address.
"""

import ipaddress
from collections.abc import Iterable

_HOPS_MAX = 16  # a list may be as long as the headers; more proxies than this are nobody's


class Proxies:
    """The proxies of `trusted_proxies`."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(net, strict=False) for net in networks]

    def trusts(self, peer: str) -> bool:
        """Return whether what `peer` says of its own peers is believed."""
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def client(self, claimed: bytes | None, peer: str) -> str:
        """Return the client's address, given the header that `peer` sent."""
        if claimed is None or not self.trusts(peer):
            return peer
        found = peer
        for hop in reversed(claimed.decode("latin-1").rsplit(",", _HOPS_MAX)):
            try:
                found = str(ipaddress.ip_address(hop.strip()))
            except ValueError:
                break
            if not self.trusts(found):
                break
        return found
