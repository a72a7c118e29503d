"""What is wrong with certificate files, in words, and which contexts are made of them."""

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
