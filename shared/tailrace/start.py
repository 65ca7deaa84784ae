"""Start of a service: `python -m tailrace.start MODULE ...` runs sooner than `python -m MODULE ...`.

Garbage collection takes a quarter of the time in which torch and its like are imported. Packages that
libraries import for what a service does not use take a quarter of the start of the smallest services.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
    module = f"{sys.argv.pop(1)}.__main__"
    with no_garbage_collection():
        _leave_out()
        run = importlib.import_module(module).main
    gc.freeze()
    code: int = run()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
