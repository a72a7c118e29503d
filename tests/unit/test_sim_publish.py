"""The simulated publisher speaks vLLM's frames, and fails as a listener should."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from gateway.sim.publish import Publisher
from tests.kv_kit import SAMPLES

ANY = "tcp://127.0.0.1:*"
END = b"\xff" * 8


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


async def replay(publisher: Publisher, context: Any, start: int) -> list[list[bytes]]:
    """Ask as vLLM's example subscriber does; every reply, the end included."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    replies: list[list[bytes]] = []
    while not replies or replies[-1][-2] != END:
        publisher._serve()
        if dealer.poll(20):
            replies.append(dealer.recv_multipart())
    dealer.close(0)
    return replies


async def test_a_replay_has_the_frames_recorded_from_vllm(context: Any) -> None:
    publisher = Publisher(ANY, ANY, topic="kv@127.0.0.1:18001")
    try:
        for _ in range(3):
            publisher.publish([{"type": "AllBlocksCleared"}])
        replies = await replay(publisher, context, 1)
    finally:
        publisher.close()

    lines = (SAMPLES / "kv_events_replay_ends.jsonl").read_bytes().splitlines()
    first, last = (msgspec.json.decode(line) for line in lines)
    assert [len(frames) for frames in replies] == [first["frames"]] * 3 == [last["frames"]] * 3
    assert [frames[1].decode() for frames in replies] == [first["topic"]] * 2 + [last["topic"]]
    assert [frames[2] for frames in replies[:2]] == [(n).to_bytes(8, "big") for n in (1, 2)]
    assert replies[-1][2].hex() == last["seq_bytes_hex"]
    assert len(replies[-1][3]) == last["payload_bytes"] == 0


async def test_the_replay_buffer_keeps_the_last_batches(context: Any) -> None:
    publisher = Publisher(ANY, ANY, buffer_batches=2)
    try:
        for _ in range(5):
            publisher.publish([{"type": "AllBlocksCleared"}])
        replies = await replay(publisher, context, 0)
    finally:
        publisher.close()

    assert [int.from_bytes(frames[2], "big") for frames in replies[:-1]] == [3, 4]


async def test_a_batch_without_events_is_not_sent(context: Any) -> None:
    publisher = Publisher(ANY, ANY)
    try:
        publisher.publish([])
        replies = await replay(publisher, context, 0)
    finally:
        publisher.close()

    assert len(replies) == 1


async def test_an_address_in_use_is_an_os_error_and_leaves_nothing_open() -> None:
    publisher = Publisher(ANY, ANY)
    try:
        with pytest.raises(OSError, match="in use"):
            Publisher(ANY, publisher.endpoint)
    finally:
        publisher.close()
