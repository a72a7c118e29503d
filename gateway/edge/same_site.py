"""Whether a browser's request to the admin listener comes from the listener's own page.

Another site's page must not drain, reload, or take viewers' places. Must never believe a host name
that is not ours.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import PermissionDenied

Served = Callable[[web.Request], Awaitable[web.StreamResponse]]
_FOREIGN = "this request comes from another site's page"


def same_site_only(admin_host: str) -> Middleware:
    """Refuse what a browser sends for another site's page: it must not drain or reload."""

    @web.middleware
    async def refuse_other_sites(request: web.Request, handler: Served) -> web.StreamResponse:
        origin = request.headers.get("origin")
        if (
            request.method == "POST"
            and origin is not None
            and not _is_ours(origin, request.headers.get("host", ""), admin_host)
        ):
            raise PermissionDenied(_FOREIGN)
        return await handler(request)

    return refuse_other_sites


def refuse_foreign_view(request: web.Request) -> None:
    """Refuse a lasting GET for another site's page: it could not read it, but would keep a place.

    Raises:
        PermissionDenied: the browser says that it comes from elsewhere.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise PermissionDenied(_FOREIGN)


def _is_ours(origin: str, host: str, admin_host: str) -> bool:
    """Return whether `origin` is this listener's page.

    A name is believed only if it is ours: any site can make its own name resolve to our address
    (DNS rebinding), and then sends its page's requests here with matching Origin and Host.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if urlsplit(origin).netloc.lower() != host.lower():
            return False
    except ValueError:
        return False
    if name in ("localhost", admin_host.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
