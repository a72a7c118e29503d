import datetime as dt
import ssl
from pathlib import Path

import pytest
import trustme

from gateway.config.validity import SOON_S, Validity, validity_of

DAY_S = 86_400.0


def seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ("2026-11-30 12:34:56", "2027-02-28 01:02:03"),
        ("1999-12-31 23:59:59", "2049-12-31 23:59:59"),
        ("2049-12-31 23:59:59", "2050-01-01 00:00:00"),  # from where years have four digits
        ("2026-01-01 00:00:00", "9999-12-31 23:59:59"),  # "no end"
    ],
)
@pytest.mark.parametrize("key_type", list(trustme.KeyType))
def test_the_validity_is_that_of_the_certificate_that_is_shown(
    begins: str, ends: str, key_type: trustme.KeyType, tmp_path: Path
) -> None:
    issued = trustme.CA(key_type=key_type).issue_cert(
        "gw.test",
        key_type=key_type,
        not_before=dt.datetime.fromisoformat(begins),
        not_after=dt.datetime.fromisoformat(ends),
    )
    for name, blob in (
        ("both.pem", issued.private_key_and_cert_chain_pem.bytes()),
        ("text.pem", b"Certificate:\n  Data: - of it\n" + issued.cert_chain_pems[0].bytes()),
    ):
        file = tmp_path / name
        file.write_bytes(blob)
        assert validity_of(str(file)) == Validity(seconds(begins), seconds(ends))


def test_what_openssl_passes_over_is_not_looked_at(tmp_path: Path) -> None:
    def pem(ends: str) -> bytes:
        since, until = (dt.datetime.fromisoformat(day) for day in ("2020-01-01", ends))
        issued = trustme.CA().issue_cert("h", not_before=since, not_after=until)
        return issued.private_key_and_cert_chain_pem.bytes()

    old, good = pem("2021-01-01"), pem("2040-01-01")
    file = tmp_path / "x.pem"
    for mark in (b"# ", b" ", b"#"):
        passed_over = b"".join(mark + line for line in old.splitlines(keepends=True))
        file.write_bytes(passed_over + good)
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(file)
        valid = validity_of(str(file))
        assert valid is not None
        assert valid.ends == seconds("2040-01-01")

    valid = validity_of(str(file))
    for text in (b"\xef\xbb\xbf" + good, good.replace(b"\n", b"\r\n")):
        file.write_bytes(text)
        assert validity_of(str(file)) == valid


def test_what_is_no_certificate_has_no_validity(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    issued = trustme.CA().issue_cert("h")
    pem = issued.cert_chain_pems[0].bytes()
    assert validity_of(str(file)) is None
    for blob in (b"", b"rubbish", issued.private_key_pem.bytes(), pem[:200], pem[:200] + pem[-30:]):
        file.write_bytes(blob)
        assert validity_of(str(file)) is None


def test_every_cut_of_a_certificate_is_no_certificate_or_itself(tmp_path: Path) -> None:
    """A file that is half written must not raise, whatever half it is."""
    file = tmp_path / "x.pem"
    issued = trustme.CA().issue_cert("h")
    lines = issued.cert_chain_pems[0].bytes().splitlines(keepends=True)
    whole = b"".join(lines)
    file.write_bytes(whole)
    valid = validity_of(str(file))
    assert valid is not None
    for count in range(1, len(lines) - 1):
        file.write_bytes(b"".join([*lines[:count], lines[-1]]))
        assert validity_of(str(file)) is None
    file.write_bytes(whole * 2)
    assert validity_of(str(file)) == valid


def test_a_warning_comes_before_the_end_and_a_fault_after_it_and_before_the_beginning() -> None:
    valid = Validity(begins=seconds("2026-11-01"), ends=seconds("2026-12-31"))
    end = valid.ends

    assert valid.fault(end) is None
    assert valid.warning(end - SOON_S - 1) is None
    assert valid.warning(end - 2.5 * DAY_S) == (
        "the certificate expires on 2026-12-31 00:00 UTC, within 3 days"
    )
    assert valid.fault(end + 1) == "the certificate expired on 2026-12-31 00:00 UTC"
    assert valid.warning(end + 1) == valid.fault(end + 1)
    assert valid.fault(valid.begins - 1) == (
        "the certificate is not valid before 2026-11-01 00:00 UTC"
    )
    assert valid.warning(valid.begins - 1) == valid.fault(valid.begins - 1)
    assert valid.early(valid.begins - 1)
    assert not valid.early(end + 1)
