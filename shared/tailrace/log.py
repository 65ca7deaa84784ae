"""Logs: one structured line per event on stderr, with the ids of who and what it is about.

Every line carries `service`, `run`, `instance_id` and whatever ids were bound to the current task
(`bound(episode_id=...)`). `TAILRACE_LOG=json|console` chooses the form (default: console on a
terminal, else json), `TAILRACE_LOG_LEVEL` the least level (default info).
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager, suppress
from typing import Any, TextIO, cast

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars
from structlog.typing import FilteringBoundLogger, Processor

from tailrace.config import ConfigError

FORMS = ("json", "console")


class _Stderr:
    """Whatever `sys.stderr` is at the time of a line; nobody reading it must not end the service."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # broken pipe, closed file
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines name their module; safe to make at import."""
    return cast(FilteringBoundLogger, structlog.get_logger(module=name))


def bound(**ids: Any) -> AbstractContextManager[None]:
    """Add ids to every line logged by this task (and tasks it starts) inside the `with` block."""
    return cast(AbstractContextManager[None], bound_contextvars(**ids))


def configure(*, service: str = "", run: str = "", instance_id: str = "") -> None:
    """Set up this process's logging, once, at start."""
    shared = _shared_processors()
    handler = logging.StreamHandler(cast(TextIO, _Stderr()))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers()],
        )
    )
    level = _level()
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    structlog.configure(
        processors=[*shared, *_renderers()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        cache_logger_on_first_use=True,
    )
    bind(service=service, run=run, instance_id=instance_id)


def bind(**ids: str) -> None:
    """Add ids to every line from here on; empty ones are left out."""
    bind_contextvars(**{key: value for key, value in ids.items() if value})


def _shared_processors() -> list[Processor]:
    return [
        merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers() -> list[Processor]:
    form = os.environ.get("TAILRACE_LOG") or ("console" if sys.stderr.isatty() else "json")
    if form not in FORMS:
        raise ConfigError(f"TAILRACE_LOG={form!r}: use one of {', '.join(FORMS)}")
    if form == "console":
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]


def _level() -> int:
    name = os.environ.get("TAILRACE_LOG_LEVEL", "info")
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ConfigError(f"TAILRACE_LOG_LEVEL={name!r}: use debug, info, warning or error")
    return level
