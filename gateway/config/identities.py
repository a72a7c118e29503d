"""Which listings mean the same backend, and where they contradict each other. Changes nothing.

A listing whose address is unusable still has its name, and the other way round: what can be read
is judged, what can't is never guessed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.config.backends import KINDS, MERGED, Names, address, occurrences
from gateway.config.places import Places
from gateway.config.schema import BackendConfig, Config
from gateway.core.trie import MAX_SLOTS

_ADDRESS = (
    *KINDS,
    "port",
    *("kubernetes.service", "kubernetes.namespace", "kubernetes.port"),
)


@dataclass(slots=True, frozen=True)
class _Listing:
    """One listing as far as it can be read.

    `holder` is the list it stands in. `address` None: it has none, or (`unclear`) an unusable one.
    """

    path: str
    holder: str
    backend: BackendConfig
    name: str | None
    address: str | None
    unclear: bool

    @property
    def key(self) -> str:
        """The key path that gives its identity."""
        if self.backend.name is not None:
            return f"{self.path}.name"
        kinds = (kind for kind in KINDS if getattr(self.backend, kind) is not None)
        return f"{self.path}.{next(kinds, 'dns')}"


def check_backends(config: Config, at: Places) -> None:
    """Report wrong addresses, names and addresses used twice, and listings that disagree."""
    listings = list(_listings(config, at))
    _count(listings, at)
    _addresses(config, listings, at)
    identities = _Identities(Names(config), listings, at)
    for listing in listings:
        identities.check(listing)


def _listings(config: Config, at: Places) -> Iterator[_Listing]:
    for path, backend in occurrences(config):
        if at.bad(path):
            continue
        bad = any(at.bad(f"{path}.{key}") for key in _ADDRESS)
        unclear = bad or (backend.dns is not None and backend.port is None)
        where = None if unclear else address(backend)
        yield _Listing(path, path.rpartition("[")[0], backend, backend.name, where, unclear)


def _count(listings: list[_Listing], at: Places) -> None:
    """Count what surely are different backends."""
    found: set[object] = set()
    unnamed: dict[str, int] = {}
    for listing in listings:
        if listing.address is not None:
            found.add(listing.address)
        elif listing.unclear and listing.name is None:
            unnamed[listing.holder] = unnamed.get(listing.holder, 0) + 1
    named = {listing.name for listing in listings if listing.address is not None}
    found |= {listing.name for listing in listings if listing.unclear} - named - {None}
    count = len(found) + max(unnamed.values(), default=0)
    if count > MAX_SLOTS:
        at.add("", f"{count} backends are given", f"expected at most {MAX_SLOTS}")


def _addresses(config: Config, listings: list[_Listing], at: Places) -> None:
    lists = ["models", "backends", *(f"models[{i}].backends" for i in range(len(config.models)))]
    sure = all(at.sure(path) for path in lists)
    defined = {listing.name for listing in listings if listing.unclear or listing.address}
    for listing in listings:
        path, name = listing.path, listing.name
        kinds = [kind for kind in KINDS if _given(listing, kind, at)]
        if kinds:
            _one_kind(listing, kinds, at)
        elif not at.bad(f"{path}.name") and (
            at.merged(path) and (name is None or (sure and name not in defined))
        ):
            allowed = "expected url, or dns and port, or srv, file or kubernetes"
            at.add(f"{path}.url", "the backend has no address", allowed)
        if _given(listing, "api_key_env", at) and _given(listing, "api_key_file", at):
            at.add(f"{path}.api_key_file", "api_key_env is given as well", "expected one of them")


def _one_kind(listing: _Listing, kinds: list[str], at: Places) -> None:
    """Report what contradicts the way in which the address is given."""
    path, port = listing.path, _given(listing, "port", at)
    if len(kinds) > 1:
        message = f"both {kinds[0]} and {kinds[1]} are given"
        at.add(f"{path}.{kinds[1]}", message, "expected one of them")
    elif kinds == ["dns"] and not port:
        at.add(f"{path}.port", "dns is given without port", "expected a port from 1 to 65535")
    elif kinds != ["dns"] and port:
        where = "inside url" if kinds == ["url"] else "as the source tells it"
        at.add(f"{path}.port", "port belongs to dns", f"expected the port {where}")


def _given(listing: _Listing, key: str, at: Places) -> bool:
    return getattr(listing.backend, key) is not None or at.bad(f"{listing.path}.{key}")


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


class _Identities:
    """What the listings so far have named, addressed and stated."""

    def __init__(self, names: Names, listings: list[_Listing], at: Places) -> None:
        self._names = names
        self._at = at
        self._address_of: dict[str, str] = {}
        for listing in listings:
            if listing.name is not None and listing.address is not None:
                self._address_of.setdefault(listing.name, listing.address)
        self._by_name: dict[str, _Listing] = {}
        self._by_address: dict[str, _Listing] = {}
        self._in_list: dict[tuple[str, str], _Listing] = {}
        self._stated: dict[tuple[str, str], tuple[object, str]] = {}

    def check(self, listing: _Listing) -> None:
        """Report what contradicts the listings before this one."""
        wrong = self._name(listing)
        if not self._address(listing, reported=wrong) and not wrong:
            self._agree(listing)

    def _name(self, listing: _Listing) -> bool:
        name = listing.name
        if name is None:
            return False
        held = self._by_name.get(name)
        beside = self._in_list.setdefault((listing.holder, name), listing)
        if held is None or held.address is None:
            self._by_name[name] = listing
        message, allowed = "", "expected a name of its own"
        if held is not None and _differ(held.address, listing.address):
            message = f"{name!a} is already another backend, on {self._at.of(held.path)}"
        elif beside is not listing and (listing.unclear or beside.unclear):
            message = f"{name!a} is already the backend on {self._at.of(beside.path)}"
        elif beside is not listing:
            message, allowed = f"{name!a} is listed twice", "expected each backend once"
        if message:
            self._at.add(listing.key, message, allowed)
        return bool(message)

    def _address(self, listing: _Listing, *, reported: bool) -> bool:
        where, name = listing.address, listing.name
        if where is None:
            return False
        held = self._by_address.get(where)
        beside = self._in_list.setdefault((listing.holder, f"at {where}"), listing)
        if held is None or held.name is None:
            self._by_address[where] = listing
        if held is not None and _differ(held.name, name):
            message = f"{name!a} has the same address as {held.name!a}"
            self._at.add(listing.key, message, "expected one name per address")
            return True
        if beside is not listing and not reported:
            shown = self._names.of(listing.backend)
            self._at.add(listing.key, f"{shown!a} is listed twice", "expected each backend once")
            return True
        return False

    def _agree(self, listing: _Listing) -> None:
        """Report an attribute that this listing states otherwise than one before it."""
        where = listing.address or self._address_of.get(listing.name or "")
        if where is None and listing.name is None:
            return
        who = f"named {listing.name}" if where is None else f"at {where}"
        plain = BackendConfig()
        for key in MERGED:
            value = getattr(listing.backend, key)
            if value == getattr(plain, key):
                continue
            first, path = self._stated.setdefault((who, key), (value, f"{listing.path}.{key}"))
            if first != value:
                message = f"differs from the same backend on {self._at.of(path)}"
                self._at.add(f"{listing.path}.{key}", message, "expected the same value")
