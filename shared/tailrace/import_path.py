"""Functions and classes that users name in their configuration by import path: `package.module:name`.

`package.module.name` means the same. Python looks for modules in the folder of the experiment, in the
folder where Tailrace was started, on `PYTHONPATH` and among the installed packages, in this order.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.config import ConfigError
from tailrace.config.suggestions import closest
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.start import no_garbage_collection


def load_object(import_path: str, key: str) -> Callable[..., Any]:
    """Imports a function or class; `ConfigError` names `key`, the missing part and the remedy."""
    module_name, colon, name = import_path.partition(":")
    if not colon:
        module_name, _, name = import_path.rpartition(".")
    if not module_name or not name or module_name.startswith(".") or "/" in module_name:
        raise ConfigError(f"{key}: {import_path!r} must look like package.module:name")
    module = _module(module_name, key)
    found = getattr(module, name, None)
    if found is None:
        near = closest(name, (known for known in vars(module) if not known.startswith("_")))
        remedy = f"did you mean {near!r}?" if near else "correct the name"
        raise ConfigError(f"{key}: module {module_name!r} has no {name!r}: {remedy}")
    if not callable(found):
        raise ConfigError(
            f"{key}: {import_path!r} is a {type(found).__name__}, not a function or a class"
        )
    return found  # type: ignore[no-any-return]


def load_extra(module_name: str, extra: str, key: str) -> Any:
    """Imports a module of an optional package; `ConfigError` names `key` and the extra to install.

    Only a run that needs the package pays for its import.
    """
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name or module_name
        raise ConfigError(f"{key} needs {missing}: pip install 'tailrace[{extra}]'") from error


def looks_like_path(name: str) -> bool:
    """True if `name` can only be a path, not the name of a model or data set of the hub."""
    is_marked = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    return is_marked or name.count("/") > 1


@contextmanager
def importable_from(folder: Path) -> Iterator[None]:
    """Lets modules in `folder`, that of the experiment, and in the current one be imported.

    They come in the order that services have (`python_path`).
    """
    added = [str(folder), str(Path.cwd())]
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)


def python_path(folder: Path, inherited: str) -> str:
    """`PYTHONPATH` of processes that import modules of an experiment in `folder`."""
    folders = dict.fromkeys([str(folder), str(Path.cwd()), *inherited.split(os.pathsep)])
    return os.pathsep.join(filter(None, folders))


def module_options(environment: Mapping[str, str]) -> list[str]:
    """Options of Python before the name of a module to run with `environment`.

    Python puts the current folder first. Where `PYTHONPATH` gives it a place, it stays there (`-P`).
    """
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ["-m"]
    return ["-P", "-m"] if here in folders else ["-m"]


def _module(name: str, key: str) -> object:
    try:
        with foreign_code(f"{key}: importing {name!r}"), no_garbage_collection():
            return importlib.import_module(name)
    except SystemExit as error:
        raise ConfigError(
            f"{key}: importing {name!r} ended its process ({error!r}): put the part of the module that "
            'is a script under `if __name__ == "__main__":`'
        ) from error
    except ForeignCodeError as error:
        if not isinstance(error.error, ImportError):
            raise ConfigError(str(error)) from error
        remedy = _remedy(error.error, name)
        raise ConfigError(f"{key}: cannot import {name!r} ({error.error}): {remedy}") from error


def _remedy(error: ImportError, name: str) -> str:
    """Remedy for a module that is not there, or that imports what is not there."""
    missing = error.name or name
    if not isinstance(error, ModuleNotFoundError):
        return "correct its imports"
    if f"{name}.".startswith(f"{missing}."):
        place = "the folder that holds the module"
        return f"correct the name, start Tailrace in {place}, or install its package"
    return f"install the package of {missing!r}, which it imports, or correct the import"
