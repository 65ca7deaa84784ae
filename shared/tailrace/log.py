"""Logs: one structured line per event on stderr, with the ids of who and what it is about.

Every line carries `service`, `run`, `instance_id` and whatever ids were bound to the current task
(`bound(episode_id=...)`). `TAILRACE_LOG=json|console` chooses the form (default: console on a
terminal, else json), `TAILRACE_LOG_LEVEL` the least level (default info).
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager
from typing import Any, cast

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars
from structlog.typing import FilteringBoundLogger, Processor

from tailrace.config import ConfigError

FORMS = ("json", "console")


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines name their module; safe to make at import."""
    return cast(FilteringBoundLogger, structlog.get_logger(module=name))


def bound(**ids: Any) -> AbstractContextManager[None]:
    """Add ids to every line logged by this task (and tasks it starts) inside the `with` block."""
    return cast(AbstractContextManager[None], bound_contextvars(**ids))


def configure(*, service: str, run: str = "", instance_id: str = "") -> None:
    """Set up this process's logging, once, at start."""
    shared = _shared_processors()
    handler = logging.StreamHandler(sys.stderr)
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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    ids = {"service": service, "run": run, "instance_id": instance_id}
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
    name = os.environ.get("TAILRACE_LOG_LEVEL", "info").upper()
    levels = logging.getLevelNamesMapping()
    if name not in levels:
        raise ConfigError(f"TAILRACE_LOG_LEVEL={name!r}: use debug, info, warning or error")
    return levels[name]
