"""KV events in pieces of a size that one look at the clock is worth: small ones joined, long ones cut.

What the pieces say is what the events said. Must never look into what an event means.
"""

from collections.abc import Iterable, Iterator

from gateway.core.kv_events import Cleared, Event, Removed, Stored


def pieces(events: Iterable[Event], most: int, size: int) -> Iterator[Event | list[Stored]]:
    """Yield the same in events of about `most` blocks; takes over their lists.

    vLLM tells every eviction by itself, and SGLang every stored block: those that go on one another
    are joined. Stored blocks of `size` tokens that are told one by one come as they are, in lists:
    they are applied in less time than it takes to join them.
    """
    ones: list[Stored] = []
    last: Event | None = None
    for event in events:
        if isinstance(event, Stored) and event.block_size == size and len(event.block_hashes) == 1:
            if last is not None:
                yield from _cut(last, most)
                last = None
            ones.append(event)
            if len(ones) == most:
                yield ones
                ones = []
            continue
        if ones:
            yield ones
            ones = []
        if last is None or not _join(last, event, most):
            yield from _cut(last, most)
            last = event
    if ones:
        yield ones
    yield from _cut(last, most)


def _cut(event: Event | None, most: int) -> Iterator[Event]:
    """Yield an event as several if it is long."""
    if event is None:
        return
    if isinstance(event, Cleared) or len(event.block_hashes) < 2 * most:
        yield event
    elif isinstance(event, Removed):
        for start in range(0, len(event.block_hashes), most):
            part = event.block_hashes[start : start + most]
            yield Removed(part, event.medium, event.group_idx)
    elif not event.token_ids or _is_whole(event):
        yield from _cut_stored(event, most)
    else:  # contradicts itself: no block of it is taken
        yield event


def _cut_stored(event: Stored, most: int) -> Iterator[Stored]:
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


def _join(last: Event, event: Event, most: int) -> bool:
    """Let one event say what both say, if it can; return whether it does."""
    if not _goes_on(last, event, most):
        return False
    last.block_hashes += event.block_hashes  # type: ignore[union-attr]
    if isinstance(last, Stored):
        last.token_ids += event.token_ids  # type: ignore[union-attr]
    return True


def _is_whole(event: Stored) -> bool:
    """Return whether every block has its tokens."""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


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
        and _is_whole(last)
        and _is_whole(event)  # else both would be lost
        and last.block_size == event.block_size
        and last.medium == event.medium
        and last.group_idx == event.group_idx
        and (last.lora_name, last.lora_id) == (event.lora_name, event.lora_id)
        and not any(event.extra_keys or ())
        and len(last.block_hashes) < most
    )
