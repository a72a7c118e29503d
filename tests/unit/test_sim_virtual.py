from gateway.sim.virtual import Agenda


def test_things_happen_in_order_of_time_and_then_of_entry() -> None:
    agenda = Agenda()
    done: list[tuple[float, str]] = []

    def do(now: float, what: str) -> None:
        assert agenda.now == now
        done.append((now, what))
        if what == "a":
            agenda.at(now, do, "d")  # at once, but after what was entered before
            agenda.at(now + 1, do, "e")

    for when, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        agenda.at(when, do, what)
    agenda.run(lambda: True)
    assert done == [(1.0, "a"), (1.0, "b"), (1.0, "d"), (2.0, "c"), (2.0, "e")]


def test_it_ends_when_told() -> None:
    agenda = Agenda()
    done: list[int] = []
    for number in range(5):
        agenda.at(float(number), lambda _, what: done.append(what), number)
    agenda.run(lambda: len(done) < 3)
    assert done == [0, 1, 2]
