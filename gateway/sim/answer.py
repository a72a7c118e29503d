"""One answer in the making: its choices, their text, and the counts every wire shape reports.

Values only. The engine decides when a token exists; `wire` decides how it looks.
"""

from dataclasses import dataclass, field

from gateway.sim import tokens
from gateway.sim.asked import Asked, Limits
from gateway.sim.engine import Job


@dataclass(slots=True)
class Choice:
    """One generated sequence. `text` is all it will say, four ASCII bytes a token, known ahead."""

    index: int
    job: Job
    text: str
    finish: str
    stop_reason: str | None
    produced: int = 0
    sent: int = 0
    stopped_text: str | None = None

    def unsent(self) -> str:
        """Return the text of the tokens produced and not sent, and count them as sent."""
        start, self.sent = self.sent, self.produced
        whole = self.text if self.stopped_text is None else self.stopped_text
        return whole[start * tokens.TOKEN_BYTES : self.produced * tokens.TOKEN_BYTES]

    @property
    def full_text(self) -> str:
        """Return all the client gets to see."""
        return self.text if self.stopped_text is None else self.stopped_text


@dataclass(slots=True)
class Answer:
    """A request's choices, one per prompt and `n`, and its identity on the wire."""

    asked: Asked
    id: str
    created: int
    choices: list[Choice]
    block_tokens: int
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(tokens.count(prompt) for prompt in self.asked.prompts)

    def echo(self, choice: Choice) -> str:
        """Return the prompt's text where the request asked for it before the answer."""
        asked = self.asked
        return tokens.decode(asked.prompts[choice.index // asked.n]) if asked.echo else ""

    @property
    def completion_tokens(self) -> int:
        """Return the tokens produced so far, over all choices."""
        return sum(choice.produced for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Return the first choice's prefix hit, as vLLM reports it."""
        return self.choices[0].job.cached_tokens

    @property
    def created_cache_tokens(self) -> int:
        """Return the prompt tokens in full blocks that were not cached before."""
        job = self.choices[0].job
        full = job.prompt_tokens // self.block_tokens * self.block_tokens
        return max(0, full - job.cached_tokens)


def compose(
    asked: Asked,
    limits: Limits,
    voice: tokens.Voice,
    block_tokens: int,
    *,
    answer_id: str,
    now: int,
) -> Answer:
    """Return the whole answer to a request, its jobs ready to be submitted."""
    choices = []
    for position, prompt in enumerate(asked.prompts):
        for copy in range(asked.n):
            index = position * asked.n + copy
            choices.append(_choice(asked, limits, voice, block_tokens, (answer_id, index, prompt)))
    return Answer(asked, answer_id, now, choices, block_tokens)


def _choice(
    asked: Asked,
    limits: Limits,
    voice: tokens.Voice,
    block_tokens: int,
    what: tuple[str, int, bytes],
) -> Choice:
    answer_id, index, prompt = what
    room = limits.max_model_len - tokens.count(prompt)
    length = asked.max_tokens or voice.length(prompt, index)
    finish = "length" if asked.max_tokens or length >= room else "stop"
    length = min(length, room)
    said = voice.answer(prompt, length, index)
    text, stop_reason, shown = said.decode(), None, None
    if cut := _first_stop(text, asked.stop):
        at, stop_reason = cut
        finish, shown = "stop", text[:at]
        length = (at + len(stop_reason) - 1) // tokens.TOKEN_BYTES + 1
        said = said[: length * tokens.TOKEN_BYTES]
    ids = prompt + said
    hashes = tokens.chain(ids, block_tokens, asked.salt)
    job = Job(f"{answer_id}-{index}", tokens.count(prompt), length, hashes, ids, asked.salt)
    return Choice(index, job, text[: length * tokens.TOKEN_BYTES], finish, stop_reason, 0, 0, shown)


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return where the first stop string begins, and which one it is."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found) if found else None
