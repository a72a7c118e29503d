"""Which backend made a response of `/v1/responses`, and for whom: nobody else may read or cancel it.

Must stay bounded, and must never tell one key that another's response exists.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass

_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,120})"')
_RESPONSES_MAX = 10_000


@dataclass(slots=True, frozen=True)
class Home:
    """Who made a response: the backend, the model, and for which key (None without keys)."""

    backend: str
    model: str
    key: str | None


class ResponseHomes:
    """Who made which `/v1/responses` id; the newest `_RESPONSES_MAX`."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def learn(self, opening: bytes, home: Home) -> None:
        """Note the response id an answer began with.

        The first key keeps it: vLLM lets a client choose the id of its response.
        """
        match = _RESPONSE_ID.search(opening)
        if match is None:
            return
        response_id = match[1].decode()
        known = self._homes.get(response_id)
        if known is None or known.key == home.key:
            self._homes[response_id] = home
        if len(self._homes) > _RESPONSES_MAX:
            self._homes.popitem(last=False)

    def get(self, response_id: str) -> Home | None:
        """Return who made it, None if unknown."""
        return self._homes.get(response_id)
