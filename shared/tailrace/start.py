"""Start of a service: `python -m tailrace.start MODULE ...` runs sooner than `python -m MODULE ...`.

Garbage collection takes a quarter of the time in which torch and its like are imported. Packages that
libraries import for what a service does not use take a quarter of the start of the smallest services.

Most systems let a process open 1,024 files unless it asks for more. The start does, since each call of
an agent is a connection of its own.
"""

import gc
import importlib
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MAX_FILES = 65_536


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as the system lets it; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system with another limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For imports: a collection looks at all modules and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _leave_out() -> None:
    """Import libraries without a package that they can do without; who asks for it later gets it."""
    unused = {"structlog": "rich"}  # for coloured tracebacks
    if not os.environ.get("TAILRACE_NATS_URL", "").startswith("ws"):
        unused["nats.aio.transport"] = "aiohttp"  # for WebSockets
    for library, package in unused.items():
        sys.modules[package] = None  # type: ignore[assignment]  # Python takes it for not installed
        with suppress(ImportError):
            importlib.import_module(library)
        del sys.modules[package]


def main() -> int:
    """Import the service's module and run it with the other arguments; returns its exit code."""
    allow_many_files()
    module = f"{sys.argv.pop(1)}.__main__"
    with no_garbage_collection():
        _leave_out()
        run = importlib.import_module(module).main
    gc.freeze()
    code: int = run()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
