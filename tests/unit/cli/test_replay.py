"""`radixgate replay`: what it prints, and how it fails."""

from pathlib import Path

import orjson
import pytest

from gateway.cli.main import main

SHIPPED = str(Path(__file__).parents[2] / "traces" / "mix.jsonl.gz")
KEYS = {  # contract, section 8
    "trace",
    "policy",
    "load",
    "replicas",
    "requests",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "tpot_p95_s",
    "e2e_mean_s",
    "slo_ratio",
    "goodput_rps",
    "hit_rate",
    "imbalance",
    "refused",
}


def test_json_is_a_list_with_the_contracts_keys(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--policy", "cost", "--policy", "random", "--rate", "1,2", "--replicas", "2"]
    assert main(["replay", SHIPPED, *asked, "--jobs", "1", "--json"]) == 0

    shown = capsys.readouterr()
    assert shown.err == ""  # nobody watches
    rows = orjson.loads(shown.out)
    assert [(row["rate"], row["policy"]) for row in rows] == [
        (1.0, "cost"),
        (1.0, "random"),
        (2.0, "cost"),
        (2.0, "random"),
    ]
    for row in rows:
        assert set(row) >= KEYS | {"classes"}
        for part in row["classes"].values():
            assert set(part) >= KEYS
        assert sum(part["requests"] for part in row["classes"].values()) == row["requests"]


def test_the_table_has_a_line_per_policy_and_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", SHIPPED, "--policy", "cost", "--rate", "1", "--jobs", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mix.jsonl.gz: rate 1, 8 replicas"
    assert [line.split()[0] for line in lines[2:]] == ["cost", "chat", "coding"]


def test_child_processes_give_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["replay", "synthetic:groups", "--requests", "200", "--rate", "10", "--json"]
    policies = ["--policy", "cost", "--policy", "lmetric", "--replicas", "2"]
    assert main([*asked, *policies, "--jobs", "1"]) == 0
    alone = capsys.readouterr().out
    assert main([*asked, *policies, "--jobs", "2"]) == 0
    assert capsys.readouterr().out == alone


def test_a_load_is_a_share_of_what_the_fleet_can_bear(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--policy", "lmetric", "--replicas", "1", "--load", "0.5,1.5", "--requests", "300"]
    assert main(["replay", "synthetic:unique", *asked, "--jobs", "1", "--json"]) == 0

    half, much = orjson.loads(capsys.readouterr().out)
    assert much["rate"] == pytest.approx(3 * half["rate"], rel=1e-3)
    assert (half["load"], much["load"]) == (0.5, 1.5)
    assert half["slo_ratio"] >= 0.9 > much["slo_ratio"]


def test_events_happen(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--policy", "cost", "--replicas", "2", "--rate", "3", "--requests", "300", "--json"]
    assert main(["replay", "synthetic:unique", *asked, "--event", "3:dies:1", "--jobs", "1"]) == 0
    (row,) = orjson.loads(capsys.readouterr().out)
    assert row["imbalance"] == 1.0  # only one is left


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["synthetic:nothing"], "unknown synthetic workload 'nothing': one of coding, chat"),
        ([__file__], "must end in .jsonl"),
        (["synthetic:chat", "--policy", "nonsense"], "invalid choice: 'nonsense'"),
        (["synthetic:chat", "--load", "0"], "must be above 0"),
        (["synthetic:chat", "--load", "nan"], "must be above 0"),
        (["synthetic:chat", "--load", "0.5,2x"], "argument --load: must be above 0, not '2x'"),
        (["synthetic:chat", "--load", "1", "--rate", "1"], "not allowed with"),
        (["synthetic:chat", "--event", "1:explodes:0"], "not SECONDS:WHAT:REPLICA"),
        (["synthetic:chat", "--event", "1:dies:8"], "the one that dies is 0 to 7"),
        (["synthetic:chat", "--event", "1:joins:3"], "the one that joins is 8"),
        (["synthetic:chat", "--replicas", "0"], "must be at least 1"),
    ],
)
def test_bad_usage_is_told_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err
