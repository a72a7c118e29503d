"""Policies that know nothing of prefixes: the baselines every table must have (prior-art.md)."""

from math import inf
from random import Random

from gateway.core.cost import Demand, Held
from gateway.core.policies.base import Policy, Rows, cheapest, requests, scored


def least_requests(rows: Rows, _demand: Demand, _rng: Random) -> None:
    """Take the one with the fewest requests in flight."""
    for row in rows:
        row.cost = float(requests(row))
        row.terms = (row.cost,)


def least_requests_narrow(rows: Rows, _held: Held, _demand: Demand, _rng: Random) -> Rows:
    """Keep those with the fewest."""
    return cheapest(rows, [row.in_flight + row.other_in_flight for row in rows], 0)


def power_of_two(rows: Rows, _demand: Demand, rng: Random) -> None:
    """Take the less busy of two drawn at random."""
    count = len(rows)
    first = int(rng.random() * count)
    second = (first + 1 + int(rng.random() * (count - 1))) % count if count > 1 else first
    for index, row in enumerate(rows):
        in_flight = float(requests(row))
        row.cost = in_flight if index in (first, second) else inf
        row.terms = (in_flight,)


def power_of_two_narrow(rows: Rows, _held: Held, _demand: Demand, rng: Random) -> Rows:
    """Draw the two."""
    return rng.sample(rows, 2)


def round_robin(rows: Rows, demand: Demand, _rng: Random) -> None:
    """Take turns."""
    for index, row in enumerate(rows):
        row.cost = float((index - demand.cursor) % len(rows))
        row.terms = (row.cost,)


def round_robin_narrow(rows: Rows, _held: Held, demand: Demand, _rng: Random) -> Rows:
    """Keep the one whose turn it is."""
    return [rows[demand.cursor % len(rows)]]


def at_random(rows: Rows, _demand: Demand, _rng: Random) -> None:
    """Take any."""
    for row in rows:
        row.cost = 0.0
        row.terms = ()


def at_random_narrow(rows: Rows, _held: Held, _demand: Demand, rng: Random) -> Rows:
    """Draw it."""
    return [rows[int(rng.random() * len(rows))]]


LEAST_REQUESTS = Policy(
    "least_requests", scored(least_requests), ("in_flight",), least_requests_narrow
)
POWER_OF_TWO = Policy("power_of_two", scored(power_of_two), ("in_flight",), power_of_two_narrow)
ROUND_ROBIN = Policy("round_robin", scored(round_robin), ("turns_away",), round_robin_narrow)
RANDOM = Policy("random", scored(at_random), (), at_random_narrow)
