"""What a backend's cache is believed to hold, held against what the engine reports.

The prefix index is an LRU of what we sent; an engine is one too, of another size, and it may lose
everything at once. A report says how much of an indexed prefix was there; the prefix's last use
says what that proves of all others: what was used before a prefix that has gone has gone too.

- capacity: the index of a backend shrinks to what proved to fit and grows when it is beaten, beyond
  what the engine claims as well (it may offload), by steps that halve with each change of direction;
- loss: prefixes missing in a row, with nothing of their age or younger found, are no matter of
  size: all that was used before the first miss is forgotten;
- trust: what remains, such as caching switched off, scales predictions as a plain average.

One odd report proves nothing: engines skip their cache for some requests. Must never touch the
books of load, look at a clock, or grow.
"""

from math import exp, inf, nextafter
from typing import TYPE_CHECKING, NamedTuple

from gateway.core.types import Ticket

if TYPE_CHECKING:  # an account has a belief
    from gateway.core.ledger import Account
    from gateway.core.trie import RadixTrie

# One report moves the trust by a fifth: ten wrong ones leave a tenth of it. A backend that is not
# believed gets no requests that could prove it, so unheard of it is trusted again within minutes.
_TRUST_WEIGHT = 0.2
_TRUST_RECOVERY_S = 60.0
_UNHEARD_S = 10.0
_FULL_TRUST = 0.98
# Engines count cached tokens in whole blocks and never the last token: less than this is no miss.
SLACK_TOKENS = 64
# A hit is one if nine tenths were there, a miss if less than half was; between, the text differs.
_HIT, _MISS = 0.9, 0.5
# Misses in a row, nothing as old being found, after which the cache is taken for lost, if one was
# of a prefix used so recently that even half the capacity would still have held it.
_LOST_AFTER, _RECENT = 3, 0.45
# Misses in a row after which it is no matter of size or loss any more.
_DOUBTED_AFTER = 5
# A capacity moves by this share at most and at least; an index this full evicts.
_MOST_STEP, _LEAST_STEP = 0.5, 0.02
_FULL = 0.95
# At first and after a surprise, this many answers are looked at for how much fits, later one in so
# many; each costs 0.1 us per visit.
_WATCHED, _SELDOM, _LOOK = 64, 64, 1000
_LEAST_BY_TAILS = 0.5  # a template that rewrites earlier answers must not cost the whole index
LEAST_SHARE, MOST_SHARE = 1 / 64, 8.0
# Weight of the newest answer in the error that is shown: about the last twenty count.
_ERROR_WEIGHT = 0.05


class Claim(NamedTuple):
    """What was expected of a cache when a prompt was sent, in tokens.

    `indexed` = what the index held, before any distrust; `last_use` = when its deepest block was
    last used, and how many blocks were then; None = not worth learning from.
    """

    predicted: int
    indexed: int
    prompt: int
    last_use: tuple[float, int] | None
    asked_at: float


class Belief:
    """What reports have shown of one backend's cache beyond the numbers in its account.

    `missed_at` is the last use of the youngest prefix found missing, and `lost_at` when it was
    missed, while nothing contradicts that all before is lost; None = nothing is suspected. `streak`
    counts the misses since the last hit. `fits` blocks were seen to fit, `over` were seen not to;
    it is looked for `watch` more answers, then seldom. `told_at` is when an answer last reported
    cached tokens.
    """

    __slots__ = (
        "count_from",
        "counted",
        "fits",
        "grew",
        "lost_at",
        "missed_at",
        "missed_over",
        "misses",
        "nobody",
        "over",
        "predicted",
        "reported",
        "step",
        "streak",
        "told_at",
        "watch",
    )

    def __init__(self) -> None:
        self.told_at = -inf
        self.counted: list[Claim] | None = None  # see core/counted.py
        self.count_from = (0.0, 0.0, 0, 0)
        self.nobody = 0
        self.missed_at: float | None = None
        self.missed_over = self.over = inf
        self.fits = 0.0
        self.watch = _WATCHED
        self.lost_at = 0.0
        self.misses = 0
        self.streak = 0
        self.step = _MOST_STEP
        self.grew: bool | None = None
        self.predicted = self.reported = 0.0

    @property
    def error_ratio(self) -> float | None:
        """How far recent predictions were off in sum, as a share of the hits; None = no hits."""
        most = max(self.predicted, self.reported)
        return abs(self.predicted - self.reported) / most if most >= 1.0 else None

    def count(self, predicted: int, reported: int) -> None:
        """Count one answer towards `error_ratio`."""
        self.predicted += _ERROR_WEIGHT * (predicted - self.predicted)
        self.reported += _ERROR_WEIGHT * (reported - self.reported)

    def clear(self) -> None:
        """Suspect nothing: the backend's cache is known to be empty, or a suspicion was wrong."""
        self.missed_at = None
        self.missed_over = inf
        self.misses = 0

    def stride(self, *, grow: bool) -> float:
        """Return the next step of the capacity: shorter after a turn, longer on the same way."""
        if self.grew is not None:
            factor = 1.5 if self.grew is grow else 0.5
            self.step = min(_MOST_STEP, max(_LEAST_STEP, self.step * factor))
        self.grew = grow
        return self.step


def trust(row: "Account", now: float) -> float:
    """Return the share of an indexed hit that this backend is likely to serve from its cache."""
    if row.trust == 1.0:
        return 1.0
    unheard = now - row.trust_at - _UNHEARD_S
    if unheard <= 0.0:
        return row.trust
    now_trust = 1.0 - (1.0 - row.trust) * exp(-unheard / _TRUST_RECOVERY_S)
    return 1.0 if now_trust > _FULL_TRUST else now_trust


def claim_of(ticket: Ticket) -> Claim:
    """Return what the decision about `ticket` expected of its backend's cache."""
    chain = ticket.query.chain
    return Claim(
        ticket.hit_tokens,
        chain.hit_tokens(ticket.known_blocks),
        chain.tokens,
        ticket.last_use,
        ticket.dispatched_at,
    )


def learn_cache(
    row: "Account", trie: "RadixTrie", claim: Claim, cached_tokens: int, now: float
) -> bool:
    """Compare a claim with the report; return whether `index_share` changed.

    Forgets in `trie` what the report proves to be gone.
    """
    belief = row.belief
    row.hit_tokens_predicted += claim.predicted
    row.hit_tokens_reported += cached_tokens
    belief.count(claim.predicted, cached_tokens)
    indexed = claim.indexed
    before = row.index_share
    if cached_tokens > indexed * 1.1 + SLACK_TOKENS:
        belief.watch = _WATCHED
        _beaten(row, trie, 1.0 - indexed / cached_tokens)
    elif indexed > SLACK_TOKENS:
        held = min(1.0, (cached_tokens + SLACK_TOKENS) / indexed)
        belief.watch = belief.watch - 1 if held >= _HIT else _WATCHED
        if claim.last_use is not None:
            if held < _MISS:
                _missed(row, trie, claim, cached_tokens)
            elif held >= _HIT:
                _found(row, trie, claim)
            else:
                _fell_short(row, 1.0 - held)
        belief.streak = belief.streak + 1 if held < _MISS else 0
        if not 0 < belief.streak < _DOUBTED_AFTER:
            _weigh(row, held, now)
    return row.index_share != before


def _weigh(row: "Account", held: float, now: float) -> None:
    """Let the trust follow what was held. A miss or two are a matter of size or loss, not of it."""
    believed = trust(row, now)
    row.trust = believed + _TRUST_WEIGHT * (held - believed)
    if row.trust > _FULL_TRUST:
        row.trust = 1.0
    row.trust_at = now


def _beaten(row: "Account", trie: "RadixTrie", part: float) -> None:
    """The engine holds what the index had no room for: `part` of what was reported."""
    if trie.blocks(row.slot) < _FULL * row.index_capacity_blocks:
        return
    belief, now = row.belief, row.index_capacity_blocks
    grown = now * (1.0 + part * belief.stride(grow=True))
    if belief.over <= now:
        belief.over = inf
    if grown > belief.over:
        grown = 0.5 * (now + belief.over)
    row.index_share = min(MOST_SHARE, row.index_share * grown / max(1, now))


def _fell_short(row: "Account", part: float) -> None:
    """The last `part` of a prefix was missing: evicted, or told apart by the engine alone."""
    share = row.index_share * (1.0 - part * row.belief.stride(grow=False))
    row.index_share = max(share, min(row.index_share, _LEAST_BY_TAILS))


def _missed(row: "Account", trie: "RadixTrie", claim: Claim, cached_tokens: int) -> None:
    """A prefix has gone: by the second time, what was used before it has, too."""
    belief, asked = row.belief, claim.asked_at
    used, own = claim.last_use or (-inf, 0)
    since = trie.used_between(row.slot, used, asked, _LOOK)
    over = inf
    if since is not None:
        gone = (claim.indexed - cached_tokens) / row.tokens_per_block if row.tokens_per_block else 0
        over = since + max(0.0, own - gone)
    if belief.missed_at is None:
        belief.missed_at, belief.missed_over = used, over
        belief.lost_at, belief.misses = asked, 1
    elif used >= belief.lost_at:  # it was used since, and has gone again: the cache is small
        trie.forget(row.slot, min(used, belief.missed_at))
        _shrink(row, over)
        belief.missed_at, belief.missed_over = used, over
        belief.lost_at, belief.misses = asked, 1
    else:
        belief.misses += 1
        belief.missed_at = max(used, belief.missed_at)
        belief.missed_over = min(over, belief.missed_over)
        recent = belief.missed_over < _RECENT * row.index_capacity_blocks
        if belief.misses >= _LOST_AFTER and recent:  # but what was sent at the first miss is back
            belief.missed_at = nextafter(belief.lost_at, -inf)
        trie.forget(row.slot, belief.missed_at)


def _found(row: "Account", trie: "RadixTrie", claim: Claim) -> None:
    """A prefix is there: nothing used after it is missing for want of room."""
    belief = row.belief
    used, own = claim.last_use or (-inf, 0)
    had_fitted = belief.fits
    if belief.watch > 0 or belief.watch % _SELDOM == 0:
        since = trie.used_between(row.slot, used, claim.asked_at, _LOOK)
        if since is not None and since + own > belief.fits:
            belief.fits = since + own
            if belief.fits > belief.over:
                belief.over = inf
    if belief.missed_at is None or used >= belief.lost_at:
        return
    if used > belief.missed_at:  # younger than what is missing, older than its miss
        trie.forget(row.slot, belief.missed_at)
        if had_fitted > belief.missed_over:  # what has gone had room: this one came after a loss
            return
        _shrink(row, belief.missed_over)
    belief.clear()


def _shrink(row: "Account", over: float) -> None:
    """Make the capacity less than `over` blocks, but no less than what was seen to fit."""
    belief, now = row.belief, max(1, row.index_capacity_blocks)
    step = belief.stride(grow=False)
    belief.over = min(belief.over, over)
    if belief.fits > belief.over:
        belief.fits = 0.0
    fitting = 0.5 * (belief.fits + belief.over) if belief.fits else belief.over
    keep = max(1.0 - step, min(1.0 - _LEAST_STEP, fitting / now))
    row.index_share = max(LEAST_SHARE, row.index_share * keep)
