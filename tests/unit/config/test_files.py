import datetime as dt
from pathlib import Path

import pytest
import trustme

from gateway.config.load import load

MODEL = 'backends: [{name: a, url: "https://h:1"%s}]\n'


def warned(tmp_path: Path, text: str) -> list[tuple[int | None, str, str]]:
    file = tmp_path / "g.yaml"
    file.write_text(text)
    return [(found.line, found.key, found.message) for found in load(file).warnings]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MODEL % "" + "listen: {tls: {cert: HERE, key: GONE}}\n", "listen.tls.key"),
        (
            MODEL % "" + "listen: {tls: {cert: HERE, key: HERE, client_ca: GONE}}\n",
            "listen.tls.client_ca",
        ),
        (MODEL % "" + "admin: {key_file: GONE}\n", "admin.key_file"),
        (MODEL % ", api_key_file: GONE", "backends[0].api_key_file"),
        (MODEL % ", tls: {ca: GONE}", "backends[0].tls.ca"),
        ("backends: [{name: a, file: GONE}]\n", "backends[0].file"),
    ],
)
def test_a_file_that_is_to_be_read_and_is_not_there_is_warned_of(
    text: str, key: str, tmp_path: Path
) -> None:
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.write_text("")

    found = warned(tmp_path, text.replace("HERE", str(here)).replace("GONE", str(gone)))

    line = 1 if key.startswith("backends") else 2
    assert found == [(line, key, f"{gone} does not exist on this machine")]
    assert warned(tmp_path, text.replace("HERE", str(here)).replace("GONE", str(here))) == []


@pytest.mark.parametrize(
    ("days", "message"),
    [(-1, "the certificate expired on "), (3, "the certificate expires on "), (60, None)],
)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MODEL % "" + "listen: {tls: {cert: CERT}}\n", "listen.tls.cert"),
        (MODEL % ", tls: {cert: CERT}", "backends[0].tls.cert"),
    ],
)
def test_a_certificate_that_ends_soon_or_has_ended_is_warned_of(
    text: str, key: str, days: int, message: str | None, tmp_path: Path
) -> None:
    cert = tmp_path / "cert.pem"
    ends = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
    issued = trustme.CA().issue_cert("h", not_before=ends - dt.timedelta(days=90), not_after=ends)
    issued.private_key_and_cert_chain_pem.write_to_path(cert)

    found = warned(tmp_path, text.replace("CERT", str(cert)))

    if message is None:
        assert found == []
    else:
        [(line, where, told)] = found
        assert (line, where) == (1 if key.startswith("backends") else 2, key)
        assert told.startswith(f"{cert}: {message}{ends:%Y-%m-%d %H:%M} UTC")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("state: {path: FILE}\n", "state.path"),
        ("record: FILE\n", "record"),
        ("usage_log: {path: FILE}\n", "usage_log.path"),
    ],
)
def test_a_file_that_is_to_be_written_needs_its_directory(
    text: str, key: str, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"

    found = warned(tmp_path, MODEL % "" + text.replace("FILE", str(gone / "file")))

    assert found == [(2, key, f"there is no directory {gone} on this machine")]
    assert warned(tmp_path, MODEL % "" + text.replace("FILE", str(tmp_path / "file"))) == []
