"""What a simulated engine's cache did, in the words of vLLM's KV events. Values only, no socket.

One event per run of blocks stored together and one per evicted block, in the order they happened.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.sim.tokens import TOKEN_BYTES


class Journal:
    """Collects events until `take`. `arrays` = the older encoding, as SGLang's and older vLLM's.

    Hashes are the simulator's own chained ones. A run's token ids are cut from its job's at once:
    the job may be gone when the batch is written.
    """

    def __init__(self, block_tokens: int, *, arrays: bool = False) -> None:
        self._block_tokens = block_tokens
        self._arrays = arrays
        self._events: list[dict[str, Any]] = []

    def stored(self, hashes: Sequence[int], at: int, ids: bytes, salt: str) -> None:
        """Note that block `at` of a sequence is cached now; `ids` are its packed tokens."""
        size = self._block_tokens * TOKEN_BYTES
        tokens = array("I", ids[at * size : (at + 1) * size]).tolist()
        keys = [salt] if salt and not at else None
        last = self._events[-1] if self._events else {}
        if at and last.get("token_ids") and last["block_hashes"][-1] == hashes[at - 1]:
            last["block_hashes"].append(hashes[at])
            last["token_ids"] += tokens
            last["extra_keys"].append(keys)
            return
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [hashes[at]],
                "parent_block_hash": hashes[at - 1] if at else None,
                "token_ids": tokens,
                "block_size": self._block_tokens,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [keys],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def evicted(self, block: int) -> None:
        """Note that a cached block lost its content."""
        self._events.append(
            {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
        )

    def cleared(self) -> None:
        """Note that nothing is cached any more."""
        self._events.append({"type": "AllBlocksCleared"})

    def take(self) -> Sequence[Mapping[str, Any] | list[Any]]:
        """Return the events since the last call, in their encoding."""
        events, self._events = self._events, []
        return [list(event.values()) for event in events] if self._arrays else events
