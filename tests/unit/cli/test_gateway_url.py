import pytest

from gateway.cli.gateway_url import GatewayUrl, NoGatewayUrl, parse
from gateway.cli.main import main


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://gw:9090", GatewayUrl("http://gw:9090", False, "gw", 9090, "")),
        ("http://gw:9090/", GatewayUrl("http://gw:9090", False, "gw", 9090, "")),
        ("https://gw/radix/", GatewayUrl("https://gw/radix", True, "gw", None, "/radix")),
        ("http://[::1]:9090", GatewayUrl("http://[::1]:9090", False, "::1", 9090, "")),
    ],
)
def test_a_url_gives_where_to_connect_and_what_to_ask_below(text: str, url: GatewayUrl) -> None:
    assert parse(text) == url


@pytest.mark.parametrize(
    "text",
    ["", "gw:9090", "ftp://gw", "http://", "http://gw:99999", "http://[::1", "http://gw?a=b"],
)
@pytest.mark.parametrize("command", [["top"], ["explain", "tests/golden/conversations.json"]])
def test_what_is_no_url_is_told_by_each_command_that_takes_one(
    text: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoGatewayUrl, match="is no URL"):
        parse(text)
    assert main([*command, "--gateway", text]) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"radixgate {command[0]}: {text} is no URL")
