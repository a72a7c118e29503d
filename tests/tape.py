"""Records what is asked of a dispatcher, and asks another one the same: same inputs, same state."""

from random import Random
from typing import Any

from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import CoreSettings
from gateway.core.types import Refusal, Ticket

# All calls of the facade that decide, book or teach. What only looks (status, explain) is left out.
CALLS = (
    "apply",
    "classify",
    "expected_output",
    "admit",
    "reassign",
    "attempt_failed",
    "first_token",
    "finish",
    "grow",
    "take_started",
    "due",
    "observe",
    "set_up",
    "drain",
    "undrain",
)


class Tape:
    """`calls` are (name, arguments, state of the random numbers before, what was answered).

    A ticket among the arguments is its number in the order of admission.
    """

    def __init__(self) -> None:
        self.start: tuple[CoreSettings, Any, float] | None = None
        self.calls: list[tuple[str, tuple[Any, ...], Any, Any]] = []
        self._tickets: list[Ticket] = []

    def attach(self, core: QueuedDispatcher) -> None:
        """Write down every call of `core` from now on."""
        for name in CALLS:
            setattr(core, name, self._recording(core, name, getattr(core, name)))

    def _recording(self, core: QueuedDispatcher, name: str, call: Any) -> Any:
        def recorded(*args: Any, **more: Any) -> Any:
            assert not more, "the facade is called by position"
            state = core._rng.getstate()
            plain = tuple(self._plain(value) for value in args)
            result = call(*args)
            if isinstance(result, Ticket):
                self._tickets.append(result)
            self.calls.append((name, plain, state, shown(result)))
            return result

        return recorded

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Ticket):
            return _Number(next(i for i, t in enumerate(self._tickets) if t is value))
        return value

    def play(self, core: QueuedDispatcher, rng: Random) -> list[tuple[str, Any]]:
        """Ask `core`, whose random numbers are `rng`, the same; return its answers by name."""
        tickets: list[Ticket] = []
        answers = []
        for name, args, state, _ in self.calls:
            rng.setstate(state)
            given = [tickets[a.value] if isinstance(a, _Number) else a for a in args]
            result = getattr(core, name)(*given)
            if isinstance(result, Ticket):
                tickets.append(result)
            answers.append((name, shown(result)))
        return answers

    @property
    def answers(self) -> list[tuple[str, Any]]:
        return [(name, result) for name, _, _, result in self.calls]

    @property
    def asked(self) -> set[str]:
        return {name for name, *_ in self.calls}

    def decisions(self) -> list[Any]:
        return [result for name, result in self.answers if name in {"admit", "reassign"}]


class _Number:
    def __init__(self, value: int) -> None:
        self.value = value


def shown(result: Any) -> Any:
    """What of an answer two dispatchers must agree on: all figures of a decision."""
    if isinstance(result, list):
        return [shown(one) for one in result]
    if isinstance(result, Ticket):
        return (
            result.backend,
            result.policy,
            result.reason,
            result.hit_tokens,
            result.uncached_tokens,
            result.prefill_s,
            result.reserved_tokens,
        )
    if isinstance(result, list):
        return [shown(one) for one in result]
    if isinstance(result, Refusal):
        return (result.kind, result.retry_after_s, result.detail)
    return result
