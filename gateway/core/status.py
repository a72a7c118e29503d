"""Live figures of backends and classes, copied out for `/status` and the metrics. Reads only."""

from gateway.core.belief import trust
from gateway.core.breaker import State
from gateway.core.bucket import Bucket
from gateway.core.ledger import Account
from gateway.core.types import BackendStatus, ClassStatus, EventStatus

_NO_EVENTS = EventStatus()


def backend_status(
    row: Account, index_blocks: int, now: float, kv_events: EventStatus = _NO_EVENTS
) -> BackendStatus:
    """Return one backend's figures; the engine's own counts are 0 until it was scraped once."""
    snapshot = row.snapshot
    return BackendStatus(
        name=row.name,
        up=row.up and row.breaker.state is State.CLOSED,
        draining=row.draining,
        in_flight=row.in_flight,
        in_flight_prefill_tokens=row.owed_tokens,
        owed_prefill_s=row.owed_s,
        context_tokens=row.context_tokens,
        kv_utilization=None if snapshot is None else snapshot.kv_utilization,
        queue_depth=0 if snapshot is None else snapshot.waiting,
        running=0 if snapshot is None else snapshot.running,
        snapshot_age_s=None if snapshot is None else max(0.0, now - snapshot.at),
        prefill_tokens_per_s=row.engine.prefill_tokens_per_s,
        index_blocks=index_blocks,
        hit_tokens_predicted=row.hit_tokens_predicted,
        hit_tokens_reported=row.hit_tokens_reported,
        kv_events=kv_events,
        index_capacity_blocks=row.index_capacity_blocks,
        index_capacity_ratio=row.index_share,
        prefix_trust_ratio=trust(row, now),
        prefix_error_ratio=row.belief.error_ratio,
        saved_prefill_s=row.saved_s,
        breaker=row.breaker.shown(now),
        breaker_opens=row.breaker.opens,
        warming=row.warm_from is not None,
    )


def class_status(
    name: str, bucket: Bucket | None, admitted: int, rejected: int, now: float
) -> ClassStatus:
    """Return one class's figures, without the queue's."""
    return ClassStatus(
        name=name,
        waiting=0,
        waiting_bytes=0,
        bucket_tokens=None if bucket is None else bucket.available(now),
        admitted=admitted,
        rejected=rejected,
    )
