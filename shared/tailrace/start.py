"""Start of a service: `python -m tailrace.start MODULE ...` runs sooner than `python -m MODULE ...`.

Garbage collection takes a quarter of the time in which torch and its like are imported.
"""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


def main() -> int:
    """Import the service's module and run it with the other arguments; returns its exit code."""
    module = f"{sys.argv.pop(1)}.__main__"
    with no_garbage_collection():
        run = importlib.import_module(module).main
    gc.freeze()
    code: int = run()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
