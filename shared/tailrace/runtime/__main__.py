"""Starts a service sooner than `python -m MODULE ...` does: `python -m tailrace.runtime MODULE ...`."""

import gc
import importlib
import sys

from tailrace.import_path import no_garbage_collection


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
