import pytest

from gateway.config.problems import ConfigErrors, ConfigProblem, Report, Where


def test_a_problem_reads_file_line_key_wrong_allowed() -> None:
    problem = ConfigProblem("g.yaml", 3, "a.b", "5 is not valid", "expected text")

    assert str(problem) == "g.yaml:3: a.b: 5 is not valid, expected text"


def test_a_problem_of_an_option_has_no_line() -> None:
    assert str(ConfigProblem("--set a.b", None, "a.b", "wrong")) == "--set a.b: a.b: wrong"


def test_problems_come_in_the_order_of_lines_and_options_last() -> None:
    report = Report()
    report.add(Where("--set x"), "x", "wrong")
    report.add(Where("f", 9), "b", "wrong")
    report.add(Where("f", 2), "a", "wrong")

    with pytest.raises(ConfigErrors) as caught:
        report.raise_any()

    assert [problem.key for problem in caught.value.problems] == ["a", "b", "x"]


def test_no_problem_raises_nothing() -> None:
    Report().raise_any()


def test_a_file_of_mistakes_gives_a_bounded_list_that_counts_the_rest() -> None:
    report = Report()
    for line in range(1000):
        report.add(Where("f", line), f"k{line}", "wrong")

    with pytest.raises(ConfigErrors) as caught:
        report.raise_any()

    assert len(caught.value.problems) == 201
    assert "800 more" in caught.value.problems[-1].message


def test_a_mistake_beside_a_value_leaves_the_value_to_be_judged() -> None:
    report = Report()
    report.add(Where("f", 1), "a", "wrong")
    report.add(Where("f", 2), "b", "given twice", kept=True)

    assert (report.bad, report.doubtful) == ({"a"}, {"b"})
    assert len(report.problems) == 2
