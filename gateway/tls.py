"""Certificates: from the files that the configuration names to the TLS contexts in force.

Reading them takes milliseconds, a system's authorities tens of them: all of it belongs in a thread,
except where a context is only looked up. Must never log or keep a key.
"""

import logging
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import time  # noqa: TID251 - certificates have dates
from typing import NamedTuple, TypeVar

import msgspec

from gateway.config.backends import backends_of
from gateway.config.problems import ConfigErrors, ConfigProblem
from gateway.config.schema import BackendConfig, BackendTlsConfig, Config, ListenTlsConfig
from gateway.config.validity import Validity, validity_of
from gateway.edge.tls import Handshakes, ListenerContext

_log = logging.getLogger("radixgate.tls")
_PLAIN = BackendTlsConfig()
_HTTPS = "https:"

Settings = ListenTlsConfig | BackendTlsConfig
_Stamp = tuple[tuple[int, int, int] | None, ...]
_Context = TypeVar("_Context", bound=ssl.SSLContext)


class CertificateFault(ValueError):
    """A file that cannot be used; the message names its key, its path and the reason.

    `again_at` is the Unix time from which the same file may do.
    """

    def __init__(self, message: str, again_at: float = inf) -> None:
        super().__init__(message)
        self.again_at = again_at


class Use(NamedTuple):
    """What a certificate is for: `side` is listener or backend, `backend` which listing's."""

    side: str
    backend: str = ""

    def __str__(self) -> str:
        return "listen.tls" if self.side == LISTENER else f"backend {self.backend} tls"


LISTENER, BACKEND = "listener", "backend"


@dataclass(slots=True)
class _Held:
    """A context with the stamp of the files it was made of.

    `broken` is the stamp of newer, unusable ones, which are looked at again from `again_at` on;
    `told` what was last said about the certificate's dates.
    """

    context: ssl.SSLContext
    stamp: _Stamp
    validity: Validity | None
    broken: _Stamp | None = None
    again_at: float = inf
    told: str | None = None


class Plan(NamedTuple):
    """What a configuration needs: contexts by their settings, and which of them are for what."""

    held: dict[Settings, _Held]
    uses: Mapping[Use, Settings]


class Certificates:
    """The contexts of one gateway, by their settings: backends that say the same share one."""

    def __init__(
        self,
        handshakes: Handshakes,
        count: Callable[[str], None],
        date: Callable[[], float] = time,
    ) -> None:
        """`count` hears `ok` or `failed` for each set of changed files; `date` is Unix seconds."""
        self._handshakes = handshakes
        self._count = count
        self._date = date
        self._held: dict[Settings, _Held] = {}
        self._uses: Mapping[Use, Settings] = {}
        self._begun = False

    @property
    def any(self) -> bool:
        """Return whether there is any context."""
        return bool(self._held)

    def read(self, config: Config) -> None:
        """Make and take what `config` needs; as `plan`."""
        with self.taking(self.plan(config)):
            pass

    @contextmanager
    def taking(self, plan: "Plan") -> Iterator[None]:
        """Take what was planned for the block; put back what was held if the block is refused."""
        before = self._held, self._uses, self._begun
        self._held, self._uses, self._begun = plan.held, plan.uses, True
        try:
            yield
        except BaseException:
            self._held, self._uses, self._begun = before
            raise

    def plan(self, config: Config) -> "Plan":
        """Make what `config` needs and is not held yet, or was made of other files; blocking.

        What is held stays in force, and is renewed as before, until the plan is taken. A certificate that is out of date is taken by the first call only: a gateway that starts had
        better serve with it than not at all, one that runs had better go on with what it has.

        Raises:
            ConfigErrors: a file cannot be used.
        """
        made: dict[Settings, _Held] = {}
        uses = _wanted(config)
        for use, settings in uses.items():
            held = self._held.get(settings)
            if held is None or held.stamp != _stamp(settings):
                try:
                    held = self._make(settings, held, strict=self._begun)
                except CertificateFault as fault:
                    key, _, reason = str(fault).partition(": ")
                    problem = ConfigProblem(
                        str(use), None, key, reason, "expected usable PEM files"
                    )
                    raise ConfigErrors([problem]) from None
            made[settings] = held
        return Plan(made, uses)

    def refresh(self) -> bool:
        """Take changed files; return whether any context is another. Blocking.

        Files that cannot be used are logged and counted once, and the old context stays: also a
        certificate that has expired, or is not valid yet, which is taken as soon as it is.
        """
        changed = False
        for settings, held in list(self._held.items()):
            changed = self._renew(settings, held) or changed
            self._tell_dates(settings, held)
        return changed

    def _renew(self, settings: Settings, held: _Held) -> bool:
        stamp, now = _stamp(settings), self._date()
        if stamp == held.stamp or (stamp == held.broken and now < held.again_at):
            return False
        try:
            fresh = self._make(settings, held, strict=True)
        except CertificateFault as fault:
            held.broken, held.again_at = stamp, fault.again_at
            self._count("failed")
            _log.error("the old certificate stays in force: %s", fault)
            return False
        held.context, held.stamp, held.validity = fresh.context, fresh.stamp, fresh.validity
        held.broken, held.again_at = None, inf
        self._count("ok")
        _log.info("new certificate in force: %s", _shown(settings))
        return True

    def _tell_dates(self, settings: Settings, held: _Held) -> None:
        """Say once when a certificate will end soon, and once when it has."""
        warning = None if held.validity is None else held.validity.warning(self._date())
        kind = warning and warning.split(" on ")[0]
        if warning is not None and kind != held.told:
            _log.warning("%s: %s", settings.cert, warning)
        held.told = kind

    def expiries(self) -> list[tuple[str, str, float]]:
        """Return side, backend and the Unix time of the end of each certificate that is shown."""
        return [
            (*use, held.validity.ends)
            for use, settings in self._uses.items()
            if (held := self._held.get(settings)) is not None and held.validity is not None
        ]

    def listener(self, config: Config) -> ssl.SSLContext | None:
        """Return the data listener's context; None = plain HTTP."""
        return None if config.listen.tls is None else self._context(config.listen.tls)

    def of(self, backend: BackendConfig) -> tuple[ssl.SSLContext | None, str | None]:
        """Return a backend's context and the name to ask for (None = its host); (None, None) = http."""
        if not (backend.url or "").lower().startswith(_HTTPS):
            return None, None
        settings = backend.tls or _PLAIN
        return self._context(_shared(settings)), settings.server_name

    def _context(self, settings: Settings) -> ssl.SSLContext:
        held = self._held.get(settings)
        if held is None:  # a backend that turned up since `read`
            held = self._held[settings] = self._make(settings)
        return held.context

    def _make(self, settings: Settings, old: _Held | None = None, *, strict: bool = False) -> _Held:
        """Read the files; `strict` = one out of date is refused, unless what is held is so too."""
        stamp = _stamp(settings)  # before: a file that changes meanwhile is read again
        validity = None if settings.cert is None else validity_of(settings.cert)
        if isinstance(settings, ListenTlsConfig):
            context: ssl.SSLContext = listener_context(settings, self._handshakes)
        else:
            context = backend_context(settings)
        if strict and validity is not None:
            self._check_dates(settings, validity, old)
        return _Held(context, stamp, validity)

    def _check_dates(self, settings: Settings, validity: Validity, old: _Held | None) -> None:
        now = self._date()
        fault = validity.fault(now)
        worn = old is not None and old.validity is not None and old.validity.fault(now) is not None
        if fault is not None and not worn:
            again_at = validity.begins if validity.early(now) else inf
            raise CertificateFault(f"cert: {settings.cert}: {fault}", again_at)


def listener_context(settings: ListenTlsConfig, handshakes: Handshakes) -> ListenerContext:
    """Return the context for clients' connections.

    Raises:
        CertificateFault: a file cannot be used.
    """
    context = _hardened(ListenerContext(ssl.PROTOCOL_TLS_SERVER))
    context.handshakes = handshakes
    context.options |= ssl.OP_NO_RENEGOTIATION
    _show(context, settings.cert, settings.key)
    if settings.client_ca is not None:
        _believe(context, "client_ca", settings.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def backend_context(settings: BackendTlsConfig) -> ssl.SSLContext:
    """Return the context for connections to a backend.

    Raises:
        CertificateFault: a file cannot be used.
    """
    context = _hardened(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif settings.ca is not None:
        _believe(context, "ca", settings.ca)
    else:
        context.load_default_certs()
    if settings.cert is not None:
        _show(context, settings.cert, settings.key)
    return context


def _hardened(context: _Context) -> _Context:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _show(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    _readable("cert", cert)
    if key is not None:
        _readable("key", key)
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        reason = _REASONS.get(error.reason or "", "no PEM certificate or key in it")
        raise CertificateFault(f"cert: {cert} with {key or 'its own key'}: {reason}") from None


_REASONS = {
    "KEY_VALUES_MISMATCH": "the key is not this certificate's",
    "EE_KEY_TOO_SMALL": "the key is too small to be safe",
    "CA_MD_TOO_WEAK": "signed with a hash that is no longer safe",
}


def _refuse_password() -> str:
    raise CertificateFault("key: the file is encrypted, and nobody is there to ask")


def _believe(context: ssl.SSLContext, key: str, path: str) -> None:
    _readable(key, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise CertificateFault(
            f"{key}: {path}: no PEM certificate in it ({error.reason})"
        ) from None


def _readable(key: str, path: str) -> None:
    try:
        with open(path, "rb"):  # noqa: PTH123 - only whether it opens
            pass
    except OSError as error:
        raise CertificateFault(f"{key}: {path} cannot be read: {error.strerror}") from None


def _wanted(config: Config) -> Mapping[Use, Settings]:
    """Return the settings that need a context, by what it is for."""
    found: dict[Use, Settings] = {}
    if config.listen.tls is not None:
        found[Use(LISTENER)] = config.listen.tls
    for backend in backends_of(config):
        secure = (backend.url or "").lower().startswith(_HTTPS)
        group = backend.url is None and (backend.tls is not None or backend.file is not None)
        if secure or group:  # those of a file may be of either kind
            found[Use(BACKEND, backend.name or "")] = _shared(backend.tls or _PLAIN)
    return found


def _shared(settings: BackendTlsConfig) -> BackendTlsConfig:
    """Return what decides the context: the name is asked for with each connection."""
    return msgspec.structs.replace(settings, server_name=None)


def _files(settings: Settings) -> Iterable[str]:
    trusted = settings.client_ca if isinstance(settings, ListenTlsConfig) else settings.ca
    return (path for path in (settings.cert, settings.key, trusted) if path is not None)


def _stamp(settings: Settings) -> _Stamp:
    """Return what changes when a file does; Kubernetes swaps a link, so links are followed."""
    return tuple(_stat(path) for path in _files(settings))


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - no object per look
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _shown(settings: Settings) -> str:
    return ", ".join(_files(settings)) or "the system's authorities"
