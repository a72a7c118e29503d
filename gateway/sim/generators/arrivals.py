"""When dialogues begin, and how lengths scatter. Only `random.Random` given by the caller."""

from collections.abc import Iterator
from math import exp, log
from random import Random


def poisson(rng: Random, rate: float, seconds: float) -> Iterator[float]:
    """Yield the times of independent arrivals, `rate` per second."""
    now = rng.expovariate(rate)
    while now < seconds:
        yield now
        now += rng.expovariate(rate)


def bursty(rng: Random, rate: float, seconds: float, cv: float) -> Iterator[float]:
    """Yield arrivals with gamma gaps of coefficient of variation `cv`: bursts when above 1."""
    form = 1 / cv**2
    scale = 1 / (rate * form)
    now = rng.gammavariate(form, scale)
    while now < seconds:
        yield now
        now += rng.gammavariate(form, scale)


def around(rng: Random, mean: float, *, least: int = 4, most: float = 4.0) -> int:
    """Return an exponential length of that mean, at most `most` times it."""
    return max(least, round(min(rng.expovariate(1 / mean), most * mean)))


def log_normal(rng: Random, mean: float, sigma: float, *, least: int, most: int) -> int:
    """Return a log-normal length of that mean (before it is cut to `least`..`most`)."""
    mu = log(mean) - sigma * sigma / 2
    return max(least, min(most, round(exp(rng.gauss(mu, sigma)))))


def geometric(rng: Random, mean: float, most: int) -> int:
    """Return how often something is done that stops each time with chance 1/`mean`."""
    count = 1
    while count < most and rng.random() > 1 / mean:
        count += 1
    return count
