import hashlib
from pathlib import Path

import pytest

from gateway.config.problems import ConfigErrors
from gateway.config.schema import BackendConfig
from gateway.config.secrets import backend_key, hash_key, new_key


def test_new_keys_are_long_unlike_and_header_safe() -> None:
    keys = {new_key() for _ in range(50)}

    assert len(keys) == 50
    assert all(key.startswith("rg-") and len(key) >= 3 + 43 and key.isascii() for key in keys)


def test_the_hash_is_sha256_of_the_whole_key() -> None:
    assert hash_key("rg-x") == hashlib.sha256(b"rg-x").hexdigest()


def test_any_text_can_be_hashed() -> None:
    assert len(hash_key("\ud800")) == 64


def test_a_backends_key_comes_from_its_variable_or_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-file\n")

    assert backend_key(BackendConfig(), {}) is None
    assert backend_key(BackendConfig(api_key_env="K"), {"K": "from-env"}) == "from-env"
    assert backend_key(BackendConfig(api_key_file=str(file)), {}) == "from-file"


def test_an_unusable_secret_is_a_mistake_that_does_not_tell_it(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    cases = [
        (BackendConfig(name="a", api_key_env="K"), {}, "K is not set"),
        (BackendConfig(name="a", api_key_env="K"), {"K": "s3cr3t\nx: y"}, "sent in a header"),
        (BackendConfig(name="a", api_key_file=str(tmp_path)), {}, "cannot be read"),
        (BackendConfig(name="a", api_key_file=str(empty)), {}, "is empty"),
        (BackendConfig(name="a", api_key_file=str(binary)), {}, "not UTF-8"),
    ]
    for backend, env, part in cases:
        with pytest.raises(ConfigErrors, match=part) as caught:
            backend_key(backend, env)
        assert ", expected the backend's key in it" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)
