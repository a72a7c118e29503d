"""KV events in pieces of a size that one look at the clock is worth: small ones joined, long ones cut.

What the pieces say is what the events said. Must never look into what an event means.
"""

from collections.abc import Iterator, Sequence

from gateway.core.kv_events import Cleared, Event, Removed, Stored


def pieces(events: Sequence[Event], most: int) -> Iterator[Event]:
    """Yield the same in events of about `most` blocks; takes over their lists."""
    for event in _folded(events, most):
        if isinstance(event, Cleared) or len(event.block_hashes) < 2 * most:
            yield event
        elif isinstance(event, Removed):
            for start in range(0, len(event.block_hashes), most):
                part = event.block_hashes[start : start + most]
                yield Removed(part, event.medium, event.group_idx)
        elif (
            not event.token_ids
            or len(event.token_ids) == len(event.block_hashes) * event.block_size
        ):
            yield from _cut(event, most)
        else:  # contradicts itself: no block of it is taken
            yield event


def _cut(event: Stored, most: int) -> Iterator[Stored]:
    """Yield a stored event as several, each going on from the last block of the one before."""
    parent, hashes, size = event.parent_block_hash, event.block_hashes, event.block_size
    keys = event.extra_keys
    for start in range(0, len(hashes), most):
        stop = start + most
        yield Stored(
            block_hashes=hashes[start:stop],
            parent_block_hash=parent,
            token_ids=event.token_ids[start * size : stop * size],
            block_size=size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
            extra_keys=None if keys is None else keys[start:stop],
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
        )
        parent = hashes[min(stop, len(hashes)) - 1]


def _folded(events: Sequence[Event], most: int) -> Sequence[Event]:
    """Return the events with those that go on one another as one; takes over their lists.

    vLLM tells every eviction by itself, SGLang every stored block too. None gets longer than a step
    should be.
    """
    folded: list[Event] = []
    last: Event | None = None
    for event in events:
        if last is not None and _goes_on(last, event, most):
            last.block_hashes += event.block_hashes  # type: ignore[union-attr]
            if isinstance(last, Stored):
                last.token_ids += event.token_ids  # type: ignore[union-attr]
            continue
        folded.append(event)
        last = event
    return folded


def _goes_on(last: Event, event: Event, most: int) -> bool:
    """Return whether two events in a row say the same as one with both their lists."""
    if isinstance(event, Removed):
        return (
            isinstance(last, Removed)
            and last.medium == event.medium
            and last.group_idx == event.group_idx
            and len(last.block_hashes) < most
        )
    return (
        isinstance(event, Stored)
        and isinstance(last, Stored)
        and event.parent_block_hash is not None
        and bool(last.block_hashes)
        and event.parent_block_hash == last.block_hashes[-1]
        and len(last.token_ids) == len(last.block_hashes) * last.block_size
        and last.block_size == event.block_size
        and last.medium == event.medium
        and last.group_idx == event.group_idx
        and (last.lora_name, last.lora_id) == (event.lora_name, event.lora_id)
        and not any(event.extra_keys or ())
        and len(last.block_hashes) < most
    )
