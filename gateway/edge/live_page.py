"""The live page: one static file, served under a policy that lets nothing else run.

Must never put a figure into the page: it has none until it is told by `/events`.
"""

import base64
import re
from hashlib import sha256
from importlib import resources

from aiohttp import web


class LivePage:
    """`GET /`; what it allows is worked out once, from the file itself."""

    def __init__(self) -> None:
        self.html = resources.files("gateway.edge").joinpath("page/index.html").read_bytes()
        self._headers = {
            "content-security-policy": policy_of(self.html),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def page(self, _request: web.Request) -> web.Response:
        """Answer `GET /`."""
        return web.Response(
            body=self.html, content_type="text/html", charset="utf-8", headers=self._headers
        )


def policy_of(html: bytes) -> str:
    """Return a policy under which the page's own script and style run, and nothing else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(html, b'script')}",
            f"style-src {_hash(html, b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(html: bytes, tag: bytes) -> str:
    (inside,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(inside).digest()).decode()}'"
