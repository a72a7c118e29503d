"""Every command in the documents works, every piece of configuration loads, every link leads on."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway.cli.main import COMMANDS, main
from gateway.config.load import load
from gateway.config.meta import keys_of
from gateway.config.schema import Config
from tests.e2e.docs_kit import ROOT, Block, anchors, blocks, commands, documents, links
from tests.e2e.docs_walk import (
    AT_ONCE,
    MODEL,
    Unknown,
    Walk,
    parse,
    parser_of,
    replicas,
    wait_until_ready,
    walk,
)
from tests.e2e.fleet import fetch, start_gateway

BLOCKS = [block for page in documents() for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.is_shell]
YAML = [block for block in BLOCKS if block.language in {"yaml", "yml"}]
# Files of other programs begin with one of these.
FOREIGN = frozenset(
    {"apiVersion", "scrape_configs", "services", "groups", "global", "receivers", "schema"}
)
_INLINE = re.compile(r"`(?:\S*/)?radixgate ([a-z]+)((?: [^`]*)?)`")


def name(block: Block | Path) -> str:
    return str(block.relative_to(ROOT)) if isinstance(block, Path) else str(block)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Someone who types what the documents say, page after page."""
    with walk(tmp_path_factory.mktemp("reader")) as begun:
        yield begun


@pytest.mark.parametrize("block", SHELL, ids=name)
def test_what_a_page_says_to_type_works(
    block: Block, reader: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands(block):
        if block.excuse is not None:  # what is ours is at least spelled right
            if command.program == "radixgate" and command.words[1] in COMMANDS:
                parse(command.words[1:])
            continue
        for variable, value in command.variables.items():
            monkeypatch.setenv(variable, value)
        reader.run(command)


@pytest.mark.parametrize("block", YAML, ids=name)
def test_what_a_page_says_to_configure_loads(
    block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for document in yaml.safe_load_all(block.text):
        if block.excuse is not None or FOREIGN & set(document):
            continue
        assert set(document) <= set(keys_of(Config)), "not a configuration: mark the block"
        file = tmp_path / "page.yaml"
        pool = "" if {"models", "backends"} & set(document) else 'backends: [{url: "http://h:1"}]\n'
        file.write_text(block.text + pool, encoding="utf-8")
        assert main(["check", str(file)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", documents(), ids=name)
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


@pytest.mark.parametrize("page", documents(), ids=name)
def test_commands_within_a_pages_text_have_the_options_they_are_given(page: Path) -> None:
    for command, rest in _INLINE.findall(page.read_text(encoding="utf-8")):
        assert command in COMMANDS, command
        if rest.strip():
            given = set(re.findall(r"(?<![\w-])--[a-z-]+", rest))
            shown = set(re.findall(r"--[a-z-]+", parser_of(command).format_help()))
            assert given <= shown, f"radixgate {command}{rest}"


def test_every_page_can_be_found_from_another() -> None:
    found = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in documents()
        for link in links(page)
        if "://" not in link
    }

    assert {page for page in documents() if page.parent.name != "adr"} - found == set()


def test_recorded_traffic_is_replayed_as_the_tuning_guide_has_it(reader: Walk) -> None:
    trace = reader.home / "recorded.jsonl"
    record = ["--set", f"record={trace}", "--backend", reader.replicas[0], *AT_ONCE]
    with start_gateway(record, reader.home) as gateway:
        wait_until_ready(gateway)
        for number in range(20):
            body = {"model": MODEL, "prompt": f"{'word ' * 2000}{number % 4}", "max_tokens": 2}
            answer = fetch(f"{gateway.url}/v1/completions", method="POST", body=body)
            assert answer.status == 200
    assert len(trace.read_bytes().splitlines()) == 20

    words = ["replay", str(trace), "--rate", "1", "--replicas", "2", "--jobs", "1"]
    assert main([*words, "--policy", "round_robin", "--policy", "cost"]) == 0


def test_a_page_cannot_say_what_nobody_runs(reader: Walk, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nfrobnicate --all\n```\n\n<!-- not run: why -->\n```bash\nx\n```\n")
    judged, excused = blocks(page)

    with pytest.raises(Unknown, match="frobnicate: what is it"):
        reader.run(next(commands(judged)))
    assert excused.excuse == "why"


@pytest.mark.parametrize(
    "line",
    [
        "radixgate serve --bakend http://h:1",
        "radixgate nosuch",
        "pip install '.[nosuch]'",
        "make nosuch",
        "curl --nosuch http://127.0.0.1:8080/v1/models",
        "curl http://127.0.0.1:8080/v1/nosuch",
        "docker compose --profile nosuch up",
        "kubectl apply -f nosuch.yaml",
        "python -m loadtest.nosuch",
    ],
)
def test_a_slip_in_a_page_fails(line: str, reader: Walk) -> None:
    block = Block("page.md", 1, "bash", f"{line}\n")

    with pytest.raises((AssertionError, SystemExit)):
        reader.run(next(commands(block)))


def test_commands_are_found_in_every_form_of_a_block() -> None:
    text = (
        "A=1 radixgate check x.yaml > out 2>&1   # a remark\n"
        "cat > f <<'EOF'\nradixgate no command\nEOF\n"
        "curl -d '\n  {\"a\": 1}' \\\n  http://h && make demo | head\n"
    )
    found = list(commands(Block("p", 1, "bash", text)))

    assert [command.words for command in found] == [
        ["radixgate", "check", "x.yaml"],
        ["cat"],
        ["curl", "-d", '\n  {"a": 1}', "http://h"],
        ["make", "demo"],
        ["head"],
    ]
    assert found[0].variables == {"A": "1"}
    shown = Block("p", 1, "console", "$ make demo\nradixgate: printed\n$ make test\n")
    assert [command.words for command in commands(shown)] == [["make", "demo"], ["make", "test"]]


def test_replicas_leave_when_they_are_told_to() -> None:
    with replicas(["--port", "0"], 1) as urls:
        assert fetch(f"{urls[0]}/health").status == 200
    with pytest.raises(OSError, match="refused"):
        fetch(f"{urls[0]}/health")


def test_the_shipped_configuration_is_what_the_readme_shows() -> None:
    assert load(ROOT / "config" / "gateway.yaml").config.models[0].name == MODEL
