"""From a body to what the dispatcher decides on: shared by live requests and `/explain`."""

from gateway.config.schema import KeyConfig
from gateway.core.classify import Features
from gateway.core.dispatcher import Dispatcher
from gateway.core.prompter import PendingChain, Prompter
from gateway.core.request import ParsedRequest, RequestFault, parse_json, parse_multipart
from gateway.core.types import Api, Chain, Query
from gateway.edge.routes import Route
from gateway.errors import InvalidJson, InvalidRequest, ModelNotFound, NoBackend

# The other routes read a prompt and write no token.
_GENERATE = frozenset(
    {
        Api.CHAT,
        Api.COMPLETIONS,
        Api.RESPONSES,
        Api.MESSAGES,
        Api.TRANSCRIPTIONS,
        Api.TRANSLATIONS,
    }
)
# These run no model: the engine's tokenizer answers, and nothing gets into its cache.
_TOKENIZER_ONLY = frozenset({Api.COUNT_TOKENS, Api.TOKENIZE, Api.DETOKENIZE})
_STARTING = "No backend that is up serves this model, and some have not told their models yet."
_SHOWN = 100  # characters of a client's model id that an error repeats


def parse_body(route: Route, body: bytes, content_type: str) -> ParsedRequest:
    """Read a request body.

    Raises:
        InvalidJson: not one JSON object.
        InvalidRequest: a field that routing reads is missing or of a wrong kind.
    """
    assert route.api is not None
    try:
        if route.multipart:
            return parse_multipart(route.api, content_type, body)
        return parse_json(route.api, body)
    except RequestFault as fault:
        error = InvalidJson if fault.code == "invalid_json" else InvalidRequest
        raise error(fault.message, param=fault.param) from None


def resolve_model(dispatcher: Dispatcher, asked: str | None, *, awaiting: bool = False) -> str:
    """Return the configured name of the model a request means.

    `awaiting` = some backend has not told its models yet, so nothing is known not to exist.

    Raises:
        InvalidRequest: none named, and more than one is served.
        ModelNotFound: nobody serves it.
        NoBackend: perhaps a backend that is still starting will.
    """
    if asked is None:
        served = dispatcher.models
        if len(served) == 1:
            return served[0].name
        if not served and awaiting:
            raise NoBackend(_STARTING)
        raise InvalidRequest("`model` is required: several models are served.", param="model")
    name = dispatcher.resolve(asked)
    if name is None:
        raise NoBackend(_STARTING) if awaiting else model_not_found(asked)
    return name


def model_not_found(asked: str) -> ModelNotFound:
    """Return the error for a model nobody serves."""
    return ModelNotFound(f"The model `{asked[:_SHOWN]}` does not exist.", param="model")


def start_chain(
    prompter: Prompter, parsed: ParsedRequest, model: str, isolation: str = ""
) -> Chain | PendingChain:
    """Begin a prompt's chain. An alias shares its model's prefixes: `model` is the model's own name.

    Prompts of another `isolation` share none (`index.isolate_keys`: the key's name).
    """
    asked, parsed.model = parsed.model, model
    chain = prompter.start(parsed, isolation=isolation) if isolation else prompter.start(parsed)
    parsed.model = asked
    return chain


def build_query(
    dispatcher: Dispatcher,
    chain: Chain,
    parsed: ParsedRequest,
    model: str,
    *,
    path: str,
    user_agent: str = "",
    key: KeyConfig | None = None,
    forced_class: str | None = None,
    session: str | None = None,
    body_bytes: int = 0,
    patience_s: float | None = None,
) -> Query:
    """Classify the request and return what `Dispatcher.admit` takes."""
    name, key_class = (None, None) if key is None else (key.name, key.class_)
    # positional: half the price of keywords
    features = Features(
        path,
        parsed.has_tools,
        chain.tokens,
        user_agent,
        name,
        model,
        forced_class,
        key_class,
        bool(parsed.data.get("suffix")),
    )
    cls, rule = dispatcher.classify(features)
    output, prefills = 0, True
    if parsed.api in _GENERATE:
        output = dispatcher.expected_output(model, cls, parsed.max_tokens)
    elif parsed.api in _TOKENIZER_ONLY:
        prefills = False
    return Query(
        model,
        cls,
        chain,
        output,
        session or parsed.session,
        rule,
        name,
        parsed.stream,
        prefills,
        body_bytes,
        patience_s,
    )
