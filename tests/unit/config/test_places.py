from gateway.config.places import Places
from gateway.config.problems import Report, Where

TOP = Where("f", 1)


def _places(report: Report) -> Places:
    return Places({"a": Where("f", 2), "a.b[0]": Where("f", 3)}, TOP, report)


def test_a_path_stands_where_it_or_what_holds_it_stands() -> None:
    at = _places(Report())

    assert at.of("a.b[0]").line == at.of("a.b[0].c").line == 3
    assert at.of("a.b[1].c").line == 2
    assert at.of("x.y") == TOP


def test_what_is_below_a_wrong_value_is_wrong() -> None:
    report = Report()
    at = _places(report)
    at.add("a.b", "wrong", "expected right")

    assert at.bad("a.b[0].c")
    assert not at.bad("a")
    assert not at.bad("a.c")


def test_entries_are_sure_unless_some_were_passed_over() -> None:
    report = Report()
    at = _places(report)
    report.add(TOP, "twice", "given twice", kept=True)
    report.add(TOP, "wrong", "wrong")
    report.add(TOP, "part.<<", "<< needs a mapping")

    assert not any(at.sure(path) for path in ("twice", "wrong", "part"))
    assert at.sure("a")
    assert at.merged("twice")
    assert not at.merged("part")
    report.add(TOP, "<<", "<< needs a mapping")
    assert not at.sure("a")
