"""What is wrong with certificate files, in words, and which contexts are made of them."""

import datetime as dt
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from gateway.config.problems import ConfigErrors
from gateway.config.schema import (
    BackendConfig,
    BackendTlsConfig,
    Config,
    ListenConfig,
    ListenTlsConfig,
)
from gateway.edge.tls import Handshakes
from gateway.tls import Certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a chain, its key, another key, an encrypted one and an authority."""
    directory = tmp_path_factory.mktemp("pem")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.pem")
    issued = ca.issue_cert("h")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(directory / "both.pem")
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(directory / "cert.pem", append=number > 0)
    ca.issue_cert("h").private_key_pem.write_to_path(directory / "other.pem")
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (directory / "locked.pem").write_bytes(locked)
    (directory / "rubbish.pem").write_text("rubbish")
    return directory


def certificates() -> Certificates:
    return Certificates(Handshakes(lambda _: None, lambda: 0.0), lambda _: None)


def listening(directory: Path, **files: str) -> Config:
    paths: Any = {name: str(directory / file) for name, file in files.items()}
    return Config(listen=ListenConfig(tls=ListenTlsConfig(**paths)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cert": "none.pem"}, "No such file"),
        ({"cert": "cert.pem", "key": "none.pem"}, "No such file"),
        ({"cert": "rubbish.pem"}, "no PEM certificate or key"),
        ({"cert": "cert.pem"}, "no PEM certificate or key"),
        ({"cert": "cert.pem", "key": "other.pem"}, "the key is not this certificate's"),
        ({"cert": "cert.pem", "key": "locked.pem"}, "encrypted"),
        ({"cert": "both.pem", "client_ca": "rubbish.pem"}, "no PEM certificate in it"),
    ],
)
def test_an_unusable_file_is_named_with_the_reason(
    files: Path, given: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        certificates().read(listening(files, **given))
    text = str(caught.value)
    assert reason in text
    assert text.startswith("listen.tls: ")


@pytest.mark.parametrize(
    "given",
    [
        {"cert": "both.pem"},
        {"cert": "cert.pem", "key": "key.pem"},
        {"cert": "both.pem", "client_ca": "ca.pem"},
    ],
)
def test_usable_files_make_a_context(files: Path, given: dict[str, str]) -> None:
    made, config = certificates(), listening(files, **given)
    made.read(config)
    assert made.listener(config) is not None
    assert not made.refresh()


def test_backends_over_http_have_none_and_those_of_one_mind_share_one(files: Path) -> None:
    def secure(port: int, name: str | None = None) -> BackendConfig:
        tls = BackendTlsConfig(ca=str(files / "ca.pem"), server_name=name)
        return BackendConfig(url=f"https://h:{port}", tls=tls)

    plain, first, second = BackendConfig(url="http://h:1"), secure(2), secure(3, "named")
    made = certificates()
    made.read(Config(backends=[plain, first, second]))
    assert made.of(plain) == (None, None)
    assert made.of(first)[1] is None
    assert made.of(second)[1] == "named"
    assert made.of(first)[0] is made.of(second)[0]


@pytest.mark.parametrize(
    "group",
    [
        BackendConfig(dns="h", port=1, tls=BackendTlsConfig(verify=False)),
        BackendConfig(file="/backends.yaml", tls=BackendTlsConfig(verify=False)),
        BackendConfig(file="/backends.yaml"),
    ],
)
def test_members_of_a_group_find_their_context_made(group: BackendConfig) -> None:
    made = certificates()
    made.read(Config(backends=[group]))
    held = dict(made._held)
    assert made.of(BackendConfig(url="https://h:1", tls=group.tls))[0] is not None
    assert made._held == held


def test_what_no_configuration_needs_any_more_is_dropped(files: Path) -> None:
    made = certificates()
    made.read(listening(files, cert="both.pem"))
    assert made.any
    made.read(Config())
    assert not made.any


# --- dates

DAY_S = 86_400.0
NOW = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)


class Dated:
    """Certificates at a date of the test's, of files that it writes."""

    def __init__(self, directory: Path) -> None:
        self.now = NOW.timestamp()
        self.counted: list[str] = []
        self.file = directory / "dated.pem"
        self.config = Config(listen=ListenConfig(tls=ListenTlsConfig(cert=str(self.file))))
        handshakes = Handshakes(lambda _: None, lambda: 0.0)
        self.held = Certificates(handshakes, self.counted.append, lambda: self.now)
        self._ca = trustme.CA()

    def write(self, begins: int, ends: int) -> None:
        """Put a certificate there that is valid between these days from the first date on."""
        since, until = (NOW + dt.timedelta(days=days) for days in (begins, ends))
        issued = self._ca.issue_cert("h", not_before=since, not_after=until)
        self.file.unlink(missing_ok=True)
        issued.private_key_and_cert_chain_pem.write_to_path(self.file)

    def ends(self) -> float:
        """Return in how many days from the first date the certificate in force ends."""
        [(side, backend, ends)] = self.held.expiries()
        assert (side, backend) == ("listener", "")
        return round((ends - NOW.timestamp()) / DAY_S, 6)

    def context(self) -> object:
        return self.held.listener(self.config)


@pytest.fixture
def dated(tmp_path: Path) -> Dated:
    return Dated(tmp_path)


def test_a_gateway_starts_with_a_certificate_that_is_out_of_date(dated: Dated) -> None:
    dated.write(-90, -1)
    dated.held.read(dated.config)

    assert dated.context() is not None
    assert dated.ends() == -1


def test_a_plan_that_is_refused_leaves_the_certificate_in_force_and_its_renewal(
    dated: Dated, files: Path
) -> None:
    dated.write(-30, 60)
    dated.held.read(dated.config)
    before = dated.context()
    other = listening(files, cert="both.pem")

    plan = dated.held.plan(other)
    assert dated.ends() == 60  # nothing is taken yet
    with suppress(ZeroDivisionError), dated.held.taking(plan):
        assert dated.held.listener(other) is not before
        raise ZeroDivisionError
    assert dated.context() is before
    assert dated.ends() == 60

    dated.write(-1, 90)
    assert dated.held.refresh()
    assert dated.ends() == 90


@pytest.mark.parametrize(("begins", "ends"), [(-90, -1), (1, 90)])
def test_a_valid_certificate_is_not_replaced_by_one_out_of_date(
    begins: int, ends: int, dated: Dated, caplog: pytest.LogCaptureFixture
) -> None:
    dated.write(-30, 60)
    dated.held.read(dated.config)
    before = dated.context()
    dated.write(begins, ends)

    assert not dated.held.refresh()
    assert not dated.held.refresh()  # it is told once
    with pytest.raises(ConfigErrors, match=r"the certificate (expired on|is not valid before) "):
        dated.held.read(dated.config)

    assert dated.context() is before
    assert dated.ends() == 60
    assert dated.counted == ["failed"]
    assert len([text for text in caplog.messages if "stays in force" in text]) == 1


def test_a_certificate_that_is_not_valid_yet_is_taken_when_it_is(dated: Dated) -> None:
    dated.write(-30, 60)
    dated.held.read(dated.config)
    dated.write(1, 90)
    assert not dated.held.refresh()

    dated.now += DAY_S - 1
    assert not dated.held.refresh()
    dated.now += 1
    assert dated.held.refresh()

    assert dated.ends() == 90
    assert dated.counted == ["failed", "ok"]


def test_what_is_out_of_date_itself_is_replaced_by_anything(dated: Dated) -> None:
    dated.write(-90, -2)
    dated.held.read(dated.config)
    dated.write(-90, -1)
    assert dated.held.refresh()
    dated.write(1, 90)
    dated.held.read(dated.config)

    assert dated.ends() == 90


def test_a_certificate_in_force_may_expire_and_a_reload_goes_on(dated: Dated) -> None:
    dated.write(-30, 60)
    dated.held.read(dated.config)
    dated.now += 61 * DAY_S
    dated.held.read(dated.config)

    assert dated.ends() == 60


def test_the_end_is_told_once_before_it_and_once_after_it(
    dated: Dated, caplog: pytest.LogCaptureFixture
) -> None:
    dated.write(-30, 60)
    dated.held.read(dated.config)
    for _ in range(65):
        assert not dated.held.refresh()
        dated.now += DAY_S

    said = [text.removeprefix(f"{dated.file}: ") for text in caplog.messages]
    assert said == [
        "the certificate expires on 2027-01-30 00:00 UTC, within 13 days",
        "the certificate expired on 2027-01-30 00:00 UTC",
    ]


def test_certificates_shown_to_backends_are_told_by_backend(files: Path) -> None:
    mine = BackendTlsConfig(cert=str(files / "both.pem"))
    held = certificates()
    held.read(
        Config(
            backends=[
                BackendConfig(name="a", url="https://a:1", tls=mine),
                BackendConfig(name="b", url="https://b:1"),
                BackendConfig(name="c", url="http://c:1"),
                BackendConfig(name="pool", dns="h", port=1, tls=mine),
            ]
        )
    )

    assert [told[:2] for told in held.expiries()] == [("backend", "a"), ("backend", "pool")]
