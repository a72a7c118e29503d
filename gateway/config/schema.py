"""Every configuration key there is: its type, default, unit, range and one line of meaning.

Attribute names are the YAML keys (`class_` is `class`). `reference.py`, `validate.py` and the
documents are driven by the `Key` beside each field, so a key without one cannot exist. Nothing
here reads a file, an environment variable or a secret.
"""

from typing import Annotated, Literal

import msgspec

from gateway.config.admission import (
    BUILTIN_CLASSES,
    BucketConfig,
    ClassConfig,
    KeyConfig,
    MatchConfig,
    QueueConfig,
    SloConfig,
    UsageLogConfig,
)
from gateway.config.discovery import DiscoveryConfig, KubernetesConfig, ReloadConfig
from gateway.config.keys import Key
from gateway.config.reporting import LogConfig, TracesConfig
from gateway.config.routing import RoutingConfig
from gateway.config.state import StateConfig
from gateway.config.tls import BackendTlsConfig, ListenTlsConfig

__all__ = [
    "BUILTIN_CLASSES",
    "AdminConfig",
    "BackendConfig",
    "BackendTlsConfig",
    "BucketConfig",
    "ClassConfig",
    "Config",
    "CorsConfig",
    "DiscoveryConfig",
    "Engine",
    "HealthConfig",
    "IndexConfig",
    "KeyConfig",
    "KubernetesConfig",
    "LimitsConfig",
    "ListenConfig",
    "ListenTlsConfig",
    "LogConfig",
    "MatchConfig",
    "ModelConfig",
    "PollConfig",
    "QueueConfig",
    "ReloadConfig",
    "RetriesConfig",
    "SloConfig",
    "StateConfig",
    "StreamsConfig",
    "TimeoutsConfig",
    "TracesConfig",
    "UsageLogConfig",
]

Engine = Literal["auto", "vllm", "sglang", "llamacpp"]


class _Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mapping of the YAML file."""


class ListenConfig(_Section, frozen=True):
    """The data listener: what clients connect to."""

    host: Annotated[str, Key("Address to bind; 0.0.0.0 for all.", form="host")] = "127.0.0.1"
    port: Annotated[int, Key("Port to bind; 0 lets the system choose.", ge=0, le=65535)] = 8080
    tls: Annotated[ListenTlsConfig | None, Key("TLS. None = plain HTTP.")] = None


class AdminConfig(_Section, frozen=True):
    """The admin listener: metrics, status, live page, reload, drain. Keep it private."""

    host: Annotated[
        str, Key("Address to bind; give a key when it is not loopback.", form="host")
    ] = "127.0.0.1"
    port: Annotated[int, Key("Port to bind; 0 lets the system choose.", ge=0, le=65535)] = 9090
    key_env: Annotated[
        str | None,
        Key(
            "Environment variable with the key that everything but /healthz and /readyz asks for, "
            "e.g. RADIXGATE_ADMIN_KEY. Without any of the three it is open.",
            form="env_name",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Key("File with such a key; read at start and reload.", form="text"),
    ] = None
    sha256: Annotated[
        str | None,
        Key("SHA-256 of such a key in hex, as `radixgate key new admin` prints it.", form="sha256"),
    ] = None


class BackendConfig(_Section, frozen=True):
    """One engine process with one URL, or all that dns, srv, file or kubernetes tells of."""

    name: Annotated[
        str | None,
        Key(
            "Name shown in headers, metrics and status. None = backend-1, backend-2, ...",
            form="name",
            example="a",
        ),
    ] = None
    url: Annotated[
        str | None,
        Key("Root of the engine's server, without /v1.", form="url", example="https://vllm-a:8000"),
    ] = None
    engine: Annotated[Engine, Key("What runs there; auto = recognised by its metrics page.")] = (
        "auto"
    )
    api_key_env: Annotated[
        str | None,
        Key(
            "Environment variable with the key sent to this backend, e.g. VLLM_KEY.",
            form="env_name",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Key("File with that key, e.g. /run/secrets/vllm; read at start and reload.", form="text"),
    ] = None
    kv_events: Annotated[
        str | None,
        Key(
            "ZMQ endpoint of the engine's KV events, e.g. tcp://vllm-a:5557: its prefix index "
            "becomes exact (needs the model's tokenizer and the extra events). With dns, srv or "
            "kubernetes, tcp://*:PORT.",
            form="zmq",
        ),
    ] = None
    kv_replay: Annotated[
        str | None,
        Key(
            "ZMQ endpoint of their replays. None = the port after kv_events', as vLLM's "
            "examples have it.",
            form="zmq",
        ),
    ] = None
    dns: Annotated[
        str | None,
        Key("Instead of url: a name whose addresses are all backends; re-resolved.", form="host"),
    ] = None
    port: Annotated[int | None, Key("Port of every address behind dns.", ge=1, le=65535)] = None
    tls: Annotated[
        BackendTlsConfig | None,
        Key(
            "TLS of an https url; what dns, srv or kubernetes tells of is asked over https. None = "
            "defaults."
        ),
    ] = None
    srv: Annotated[
        str | None,
        Key(
            "Instead of url: a DNS SRV name, e.g. _http._tcp.vllm.internal, whose targets of the "
            "best priority are all backends; needs the extra `discovery`.",
            form="host",
        ),
    ] = None
    file: Annotated[
        str | None,
        Key(
            "Instead of url: a JSON or YAML file with a list of backends (name, url, ...), watched.",
            form="text",
        ),
    ] = None
    kubernetes: Annotated[
        KubernetesConfig | None,
        Key("Instead of url: a Service whose ready endpoints are all backends.", apart=True),
    ] = None


class ModelConfig(_Section, frozen=True):
    """A model id clients send, and the backends that serve it."""

    name: Annotated[
        str, Key("The id clients send and the backends know.", form="text", example="qwen3-coder")
    ]
    aliases: Annotated[
        list[str], Key("Other ids clients may send; rewritten to name.", form="text")
    ] = []
    tokenizer: Annotated[
        str | None,
        Key(
            "tokenizer.json or its directory: exact token counts (extra `tokens`; `tokens-fast` "
            "encodes ten times as fast or more). None = byte blocks and a learnt bytes-per-token ratio.",
            form="text",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Key(
            "File with the chat template the engine was given (vLLM's --chat-template). None = the "
            "tokenizer's own.",
            form="text",
        ),
    ] = None
    backends: Annotated[list[BackendConfig], Key("The backends that serve it.")] = []


class PollConfig(_Section, frozen=True):
    """Reading the backends' /metrics."""

    interval_s: Annotated[
        float, Key("Pause between two reads of one backend.", unit="s", ge=0.01, le=60)
    ] = 0.25
    timeout_s: Annotated[float, Key("Longest one read may take.", unit="s", ge=0.01, le=60)] = 1.0


class HealthConfig(_Section, frozen=True):
    """Asking the backends whether they serve, and letting in those that begin to."""

    interval_s: Annotated[
        float,
        Key(
            "Pause between two probes of one backend; half of it while it is down.",
            unit="s",
            ge=0.05,
            le=60,
        ),
    ] = 1.0
    timeout_s: Annotated[
        float,
        Key(
            "Longest a probe may take; three in a row that fail are down.", unit="s", ge=0.05, le=60
        ),
    ] = 2.0
    warm_up_s: Annotated[
        float,
        Key(
            "A backend that comes up gets 8 requests at once, growing to what the others have over "
            "this time. 0 = all at once.",
            unit="s",
            ge=0,
            le=3_600,
        ),
    ] = 5.0


class IndexConfig(_Section, frozen=True):
    """The index of prompt prefixes believed cached on each backend."""

    max_mib: Annotated[
        int, Key("Memory cap; the oldest entries go first.", unit="MiB", ge=1, le=1_048_576)
    ] = 512
    block_bytes: Annotated[
        int,
        Key("Prompt bytes per block, for models without tokenizer.", unit="B", ge=16, le=65_536),
    ] = 256
    conversation_mib: Annotated[
        int,
        Key(
            "Memory cap, per tokenizer, of what is known of conversations, so that a turn costs its "
            "new messages; encoded texts may take as much again.",
            unit="MiB",
            ge=1,
            le=1_048_576,
        ),
    ] = 64
    isolate_keys: Annotated[
        bool,
        Key(
            "Credit no key with prefixes that another key's requests put into a cache. The engine "
            "shares them all the same unless the clients send cache_salt.",
        ),
    ] = False


class LimitsConfig(_Section, frozen=True):
    """What a client may send and how many may be served at once."""

    body_mib: Annotated[int, Key("Largest request body.", unit="MiB", ge=1, le=4096)] = 64
    header_kib: Annotated[int, Key("Largest header block.", unit="KiB", ge=1, le=1024)] = 64
    header_count: Annotated[int, Key("Most header fields.", ge=8, le=10_000)] = 256
    streams: Annotated[int, Key("Most requests in progress.", ge=1, le=1_000_000)] = 10_000


class TimeoutsConfig(_Section, frozen=True):
    """Deadlines. 0 means none where the line says so."""

    connect_s: Annotated[float, Key("Connecting to a backend.", unit="s", gt=0, le=300)] = 2.0
    first_byte_s: Annotated[
        float, Key("Waiting for a backend's answer to begin. 0 = none.", unit="s", ge=0, le=86_400)
    ] = 600.0
    idle_s: Annotated[
        float, Key("Silence within an answer. 0 = none.", unit="s", ge=0, le=86_400)
    ] = 600.0
    total_s: Annotated[float, Key("A whole request. 0 = none.", unit="s", ge=0, le=86_400)] = 0.0
    drain_delay_s: Annotated[
        float,
        Key(
            "After SIGTERM the gateway is not ready but serves on for so long, until load "
            "balancers have seen it; SIGINT (Ctrl-C) does not wait.",
            unit="s",
            ge=0,
            le=3_600,
        ),
    ] = 5.0
    drain_s: Annotated[
        float,
        Key("Then, the listener closed: finishing open requests.", unit="s", ge=0, le=86_400),
    ] = 30.0
    header_s: Annotated[
        float, Key("Receiving a client's request head.", unit="s", gt=0, le=3_600)
    ] = 10.0
    body_s: Annotated[
        float, Key("Silence while receiving a client's body.", unit="s", gt=0, le=3_600)
    ] = 60.0
    keepalive_s: Annotated[
        float, Key("Idle client connections stay open this long.", unit="s", gt=0, le=3_600)
    ] = 75.0


class StreamsConfig(_Section, frozen=True):
    """Streamed answers."""

    keepalive_s: Annotated[
        float,
        Key(
            "SSE comment after this much silence, also while a request waits for a backend. 0 = off.",
            unit="s",
            ge=0,
            le=3_600,
        ),
    ] = 0.0
    inject_usage: Annotated[
        bool, Key("Ask the engine for usage on streams that did not; removed again for the client.")
    ] = True


class RetriesConfig(_Section, frozen=True):
    """Trying another backend when a request surely did not start on the first."""

    attempts: Annotated[int, Key("Backends tried at most, the first included.", ge=1, le=16)] = 2


class CorsConfig(_Section, frozen=True):
    """Browsers."""

    origins: Annotated[
        list[str], Key('Allowed origins, e.g. https://ui.example.com, or "*".', form="origin")
    ] = []


class Config(_Section, frozen=True):
    """The whole file."""

    listen: Annotated[ListenConfig, Key("The data listener, for clients.")] = ListenConfig()
    admin: Annotated[
        AdminConfig, Key("The admin listener: metrics, status, reload. Keep it private.")
    ] = AdminConfig()
    models: Annotated[list[ModelConfig], Key("Model ids and who serves them.")] = []
    backends: Annotated[
        list[BackendConfig],
        Key("Backends whose models are read from their /v1/models; what --backend adds to."),
    ] = []
    routing: Annotated[RoutingConfig, Key("How a backend is chosen.")] = RoutingConfig()
    classes: Annotated[
        dict[str, ClassConfig],
        Key("Traffic classes by name. None given = the built-in coding and chat.", form="name"),
    ] = {}
    keys: Annotated[list[KeyConfig], Key("API keys. None given = open to everyone.")] = []
    queue: Annotated[QueueConfig, Key("Requests held at the gateway.")] = QueueConfig()
    poll: Annotated[PollConfig, Key("Reading the backends' metrics.")] = PollConfig()
    health: Annotated[HealthConfig, Key("Whether backends serve.")] = HealthConfig()
    discovery: Annotated[DiscoveryConfig, Key("Finding backends.")] = DiscoveryConfig()
    reload: Annotated[ReloadConfig, Key("Taking a changed configuration.")] = ReloadConfig()
    index: Annotated[IndexConfig, Key("Index of cached prefixes.")] = IndexConfig()
    limits: Annotated[LimitsConfig, Key("What is accepted.")] = LimitsConfig()
    timeouts: Annotated[TimeoutsConfig, Key("Deadlines.")] = TimeoutsConfig()
    streams: Annotated[StreamsConfig, Key("Streamed answers.")] = StreamsConfig()
    retries: Annotated[RetriesConfig, Key("Trying another backend.")] = RetriesConfig()
    cors: Annotated[CorsConfig, Key("Cross-origin requests of browsers; off by default.")] = (
        CorsConfig()
    )
    trusted_proxies: Annotated[
        list[str], Key("Addresses or networks whose X-Forwarded-For is believed.", form="network")
    ] = []
    debug_headers: Annotated[
        bool, Key("Send x-gateway-backend, -class, -policy, -prefix, -queue-ms, -attempts.")
    ] = True
    log: Annotated[LogConfig, Key("Logs.")] = LogConfig()
    traces: Annotated[TracesConfig, Key("OpenTelemetry traces; off by default.")] = TracesConfig()
    usage_log: Annotated[UsageLogConfig, Key("Who used how many tokens.")] = UsageLogConfig()
    state: Annotated[StateConfig, Key("What is kept over a restart.")] = StateConfig()
    record: Annotated[
        str | None,
        Key(
            "File that gets a line per request, for `radixgate replay`: times, lengths, salted block "
            "hashes, no text; 64 MiB, then three older ones. None = off.",
            form="text",
        ),
    ] = None
