"""Logs: one structured line per event on stderr, with ids.

Each line, of any thread, has `service`, `run`, `instance_id` and the ids bound to the current task
(`bound(episode_id=...)`), and the `trace_id` of a sampled episode. `TAILRACE_LOG=json|console` sets
the form (default: console on a terminal, else json), and `TAILRACE_LOG_LEVEL` the lowest level
(default info).
"""

import logging
import os
import sys
from contextlib import AbstractContextManager, suppress
from typing import Any, TextIO, cast

import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from tailrace.config import ConfigError
from tailrace.tracing import current_traceparent

FORMS = ("json", "console")
# Without variables: these may be keys, and whole batches.
_process_ids: dict[str, str] = {}  # no context variables: a thread begins without those of its parent
_exceptions = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


class _Stderr:
    """Current `sys.stderr`; a closed stderr must not end the service."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # broken pipe, closed file
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def get_logger(name: str) -> FilteringBoundLogger:
    """Returns a logger whose lines name their module; safe to call at import."""
    return cast(FilteringBoundLogger, structlog.get_logger(module=name))


def bound(**ids: Any) -> AbstractContextManager[None]:
    """Adds ids to each line that this task, and tasks it starts, log inside the `with` block."""
    return cast(AbstractContextManager[None], bound_contextvars(**ids))


def configure(
    *, service: str = "", run: str = "", instance_id: str = "", form: str = "", level: str = "info"
) -> None:
    """Sets up the logging of this process, once at start. `form` and `level` override the defaults,
    not `TAILRACE_LOG` and `TAILRACE_LOG_LEVEL`.
    """
    shared, renderers = _shared_processors(), _renderers(form)
    _process_ids.clear()
    handler = logging.StreamHandler(cast(TextIO, _Stderr()))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    lowest = _level(level)
    logging.basicConfig(handlers=[handler], level=max(lowest, logging.WARNING), force=True)
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        cache_logger_on_first_use=True,
    )
    bind(service=service, run=run, instance_id=instance_id)


def bind(**ids: str) -> None:
    """Adds ids to all later lines of this process; omits empty ids."""
    _process_ids.update({key: value for key, value in ids.items() if value})


def _shared_processors() -> list[Processor]:
    return [
        merge_contextvars,
        _add_process,
        _add_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _add_process(_logger: object, _method: str, event: EventDict) -> EventDict:
    return {**_process_ids, **event}


def _add_trace(_logger: object, _method: str, event: EventDict) -> EventDict:
    if traceparent := current_traceparent():
        event["trace_id"] = traceparent[3:35]
    return event


def _renderers(form: str) -> list[Processor]:
    default = "console" if sys.stderr.isatty() else "json"
    form = os.environ.get("TAILRACE_LOG") or form or default
    if form not in FORMS:
        raise ConfigError(f"TAILRACE_LOG={form!r}: use one of {', '.join(FORMS)}")
    if form == "console":
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return [
        structlog.processors.ExceptionRenderer(_exceptions),
        structlog.processors.JSONRenderer(),
    ]


def _level(default: str) -> int:
    name = os.environ.get("TAILRACE_LOG_LEVEL", default)
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ConfigError(f"TAILRACE_LOG_LEVEL={name!r}: use debug, info, warning or error")
    return level
