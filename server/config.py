"""The server's settings: each field is a server flag of the command line."""

import math
import re
from dataclasses import dataclass

from pagedjax import UserError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
TOOL_CALL_PARSERS = ("auto", "hermes", "mistral", "llama3_json", "pythonic")
REASONING_PARSERS = ("none", "think")

_METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*|")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve. Times are in seconds.

    Attributes:
        port: 0 takes any free one.
        api_keys: any of them opens the door; none leaves it open.
        served_model_name: what clients call the model; None takes the engine's name.
        shutdown_timeout: how long running requests may go on after SIGTERM.
        hang_timeout: work that waits so long without a step ending turns ``/health`` to 503.
        request_timeout: how long one request may take; None for no limit.
        tool_call_parser: how the model writes its calls of functions; ``auto`` goes by its chat template.
        reasoning_parser: ``think`` parts ``<think>...</think>`` from the answer.
        log_requests: log each request's parameters (never its text).

    Raises:
        UserError: a value is out of its range, or names a feature that is not built yet.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    shutdown_timeout: float = 30.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    cors_origin: str | None = None
    metrics_prefix: str = "pagedjax:"
    log_level: str = "info"
    log_format: str = "text"
    log_requests: bool = False
    hang_timeout: float = 60.0
    request_timeout: float | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port must be from 0 to 65535, got {self.port}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise UserError("--api-key must be printable ASCII and not empty")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise UserError("--ssl-certfile and --ssl-keyfile go together: give both")
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise UserError(f"--metrics-prefix must be letters, digits, _ and :, got {self.metrics_prefix!r}")
        for flag, value, choices in (
            ("--log-level", self.log_level, LOG_LEVELS),
            ("--log-format", self.log_format, LOG_FORMATS),
            ("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value not in choices:
                raise UserError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise UserError(f"--shutdown-timeout must be at least 0 seconds and finite, got {self.shutdown_timeout:g}")
        for flag, seconds in (
            ("--hang-timeout", self.hang_timeout),
            ("--request-timeout", self.request_timeout),
        ):
            if seconds is not None and not 0 < seconds < math.inf:
                raise UserError(f"{flag} must be above 0 seconds and finite, got {seconds:g}")
