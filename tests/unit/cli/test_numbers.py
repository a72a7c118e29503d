import argparse

import pytest

from gateway.cli.main import available, main
from gateway.cli.numbers import count, port, positive, seconds, several


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (count, "3", 3),
        (positive, "0.5", 0.5),
        (port, "0", 0),
        (seconds, "0", 0.0),
        (several(count), "4,8", [4, 8]),
    ],
)
def test_a_number_that_is_allowed_is_taken(parse: object, text: str, value: object) -> None:
    assert callable(parse)
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (count, "0", "must be at least 1, not '0'"),
        (count, "1.5", "must be at least 1, not '1.5'"),
        (positive, "inf", "must be above 0, not 'inf'"),
        (port, "70000", "must be 0 to 65535, not '70000'"),
        (seconds, "-1", "must be 0 or more, not '-1'"),
        (several(positive), "1,\u00fc", r"must be above 0, not '\xfc'"),
    ],
)
def test_what_is_no_such_number_is_told_with_what_would_be(
    parse: object, text: str, told: str
) -> None:
    assert callable(parse)
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse(text)

    assert str(caught.value) == told


@pytest.mark.parametrize("name", available())
def test_no_help_shows_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0

    shown = capsys.readouterr().out
    assert all(word not in shown for word in ("None", "[8]", "%(", "PosixPath"))
