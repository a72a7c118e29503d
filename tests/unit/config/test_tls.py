from pathlib import Path

import pytest

from gateway.config.backends import backends_of
from gateway.config.groups import expand
from gateway.config.load import load
from gateway.config.problems import ConfigErrors
from gateway.config.schema import BackendConfig
from tests.unit.config import ONE_BACKEND, load_text


def mistakes(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load_text(tmp_path, text)
    return [f"{problem.key}: {problem.message}" for problem in caught.value.problems]


def test_tls_belongs_to_an_https_url(tmp_path: Path) -> None:
    text = "backends: [{url: 'http://h:1', tls: {}}]\n"
    assert mistakes(tmp_path, text) == ["backends[0].tls: the url is not https"]
    assert load_text(tmp_path, "backends: [{url: 'https://h:1', tls: {}}]\n").warnings == ()


def test_a_backends_key_needs_its_certificate(tmp_path: Path) -> None:
    text = "backends: [{url: 'https://h:1', tls: {key: k.pem}}]\n"
    assert mistakes(tmp_path, text) == ["backends[0].tls.key: a key without its certificate"]


def test_no_authority_is_asked_without_verification(tmp_path: Path) -> None:
    text = "backends: [{url: 'https://h:1', tls: {ca: c.pem, verify: false}}]\n"
    assert mistakes(tmp_path, text) == ["backends[0].tls.ca: verify: false asks no authority"]


def test_a_listener_under_tls_needs_a_certificate(tmp_path: Path) -> None:
    text = ONE_BACKEND + "\nlisten: {tls: {key: k.pem}}\n"
    assert mistakes(tmp_path, text) == ["listen.tls.cert: is missing"]


def test_an_unverified_backend_is_warned_of(tmp_path: Path) -> None:
    text = "backends: [{url: 'https://h:1', tls: {verify: false}}]\n"
    (warning,) = load_text(tmp_path, text).warnings
    assert warning.key == "backends[0].tls.verify"


def test_variables_set_the_listeners_certificate() -> None:
    env = {"RADIXGATE_LISTEN__TLS__CERT": "c.pem", "RADIXGATE_LISTEN__TLS__KEY": "k.pem"}
    tls = load(None, backends=("http://h:1",), env=env).config.listen.tls
    assert tls is not None
    assert (tls.cert, tls.key, tls.client_ca) == ("c.pem", "k.pem", None)


def test_addresses_behind_a_name_are_asked_over_https_by_that_name(tmp_path: Path) -> None:
    text = "backends: [{name: d, dns: engines.internal, port: 8443, tls: {ca: c.pem}}]\n"
    found = {"dns:engines.internal:8443": (BackendConfig(url="http://10.0.0.1:8443"),)}
    config = expand(load_text(tmp_path, text).config, found)
    (backend,) = backends_of(config)
    assert backend.url == "https://10.0.0.1:8443"
    assert backend.tls is not None
    assert (backend.tls.server_name, backend.tls.ca) == ("engines.internal", "c.pem")


def test_a_backend_listed_twice_has_its_tls_from_either_listing(tmp_path: Path) -> None:
    text = """
models:
  - {name: x, backends: [{name: a, url: 'https://h:1', tls: {ca: c.pem}}]}
  - {name: y, backends: [{name: a}]}
"""
    (backend,) = backends_of(load_text(tmp_path, text).config)
    assert backend.tls is not None
    assert backend.tls.ca == "c.pem"
