"""A simulated replica's KV events on the wire: vLLM's publisher, frame by frame.

PUB socket with (topic, number, payload), ROUTER socket for replays out of a buffer of the last
batches. Needs the `events` extra. Never waits: what a slow subscriber does not take is dropped, as
vLLM drops it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.extras import load_zmq

BUFFER_BATCHES = 10_000  # vLLM's `buffer_steps`
HIGH_WATER = 100_000  # vLLM's `hwm`
_END = (2**64 - 1).to_bytes(8, "big")


class Publisher:
    """Binds at once. `endpoint` and `replay_endpoint` are where it listens, ports filled in.

    Raises:
        MissingExtra: pyzmq is not installed.
        OSError: an address is in use, or none of ours.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_batches: int = BUFFER_BATCHES,
    ) -> None:
        self._zmq = zmq = load_zmq("publishing KV events")
        self._topic = topic.encode()
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_batches)
        self._context = zmq.Context(io_threads=1)
        self._pub = self._bind(zmq.PUB, endpoint, HIGH_WATER)
        self.endpoint: str = self._pub.get_string(zmq.LAST_ENDPOINT)
        self._router: Any = None
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            self._router = self._bind(zmq.ROUTER, replay_endpoint, 0)
            self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
            self._loop.add_reader(self._router.getsockopt(zmq.FD), self._serve)

    def publish(self, events: Sequence[Any]) -> None:
        """Send one batch; none if there are no events."""
        if not events:
            return
        number = self._number.to_bytes(8, "big")
        self._number += 1
        now = time.time()  # noqa: TID251 - `ts` is a date
        payload = msgspec.msgpack.encode([now, events, 0])
        self._buffer.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload), self._zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets; what is unsent is lost."""
        if self._router is not None:
            self._loop.remove_reader(self._router.getsockopt(self._zmq.FD))
            self._router.close(0)
        self._pub.close(0)
        self._context.term()

    def _bind(self, kind: int, endpoint: str, high_water: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(0)
            raise OSError(error.errno, f"{endpoint}: {error.strerror}") from None
        return socket

    def _serve(self) -> None:
        """Answer every waiting request: the descriptor is told of only once."""
        while True:
            try:
                client, *_, start = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            for number, payload in self._buffer:
                if number >= start:
                    self._answer(client, self._topic, number, payload)
            self._answer(client, b"", _END, b"")

    def _answer(self, *frames: bytes) -> None:
        client, *rest = frames
        self._router.send_multipart((client, b"", *rest), self._zmq.NOBLOCK)
