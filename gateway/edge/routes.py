"""The data listener's allow-list: what is not in this table is a JSON 404."""

import re
from dataclasses import dataclass
from enum import Enum, unique

from gateway.core.types import Api
from gateway.errors import GatewayError, MethodNotAllowed, NotFound


@unique
class Local(Enum):
    """Routes the gateway answers itself."""

    MODELS = "/v1/models"
    MODEL = "/v1/models/{id}"
    HEALTHZ = "/healthz"
    READYZ = "/readyz"


@dataclass(slots=True, frozen=True)
class Route:
    """A matched route. `path` is the canonical one, sent upstream; `id` the path's parameter.

    `shown` is what logs and traces say: without the parameter, which is the client's.
    """

    path: str
    methods: tuple[str, ...]
    api: Api | None = None
    local: Local | None = None
    id: str | None = None
    open: bool = False
    multipart: bool = False
    pattern: str | None = None

    @property
    def shown(self) -> str:
        """Return the path's pattern."""
        return self.pattern or self.path

    @property
    def anthropic(self) -> bool:
        """Return whether errors take Anthropic's form."""
        return self.path.startswith("/v1/messages")


_GET = ("GET", "HEAD")
_MULTIPART = (Api.TRANSCRIPTIONS, Api.TRANSLATIONS)
_TABLE: dict[str, Route] = {
    api.value: Route(api.value, ("POST",), api=api, multipart=api in _MULTIPART) for api in Api
} | {
    "/v1/models": Route("/v1/models", _GET, local=Local.MODELS),
    "/healthz": Route("/healthz", _GET, local=Local.HEALTHZ, open=True),
    "/readyz": Route("/readyz", _GET, local=Local.READYZ, open=True),
}
_RESPONSE = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
_SLASHES = re.compile(r"/{2,}")


def canonical_path(path: str) -> str:
    """Return `path` with doubled and trailing slashes removed."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/" if path.endswith("/") else path


def find(method: str, path: str) -> Route:
    """Return the route for a request.

    Raises:
        NotFound: the path is not in the allow-list.
        MethodNotAllowed: it is, for another method.
    """
    route = _TABLE.get(path)
    if route is None:
        path = canonical_path(path)
        route = _TABLE.get(path) or _parametrised(path)
    if route is None:
        raise NotFound(
            "Unknown path. OpenAI's and Anthropic's APIs are served under /v1: OpenAI clients want "
            "a base URL that ends in /v1, Anthropic clients one without."
        )
    if method not in route.methods and method != "OPTIONS":
        raise _not_allowed(route)
    return route


def _not_allowed(route: Route) -> GatewayError:
    allowed = ", ".join(route.methods)
    return MethodNotAllowed(f"Use {allowed} for {route.path}.", headers=(("allow", allowed),))


def _parametrised(path: str) -> Route | None:
    if path.startswith("/v1/models/"):
        return Route("/v1/models", _GET, local=Local.MODEL, id=path.removeprefix("/v1/models/"))
    match = _RESPONSE.fullmatch(path)
    if match is None:
        return None
    methods = ("POST",) if match[2] else _GET
    pattern = "/v1/responses/{id}" + (match[2] or "")
    return Route(path, methods, api=Api.RESPONSES, id=match[1], pattern=pattern)
