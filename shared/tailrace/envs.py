"""Redirects `tailrace.envs` and its submodules to the package `tailrace_envs`.

Experiment files and user code may name `tailrace.envs.game` or `tailrace.envs.sokoban.expert`. Each
such module is the module of `tailrace_envs` itself, so that no class exists twice.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

__path__: list[str] = []  # makes Python ask for submodules; the finder below answers

_TARGET = "tailrace_envs"


class _Redirect(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_below = fullname.startswith(f"{__name__}.")
        return spec_from_loader(fullname, self) if is_below else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(_TARGET + name.removeprefix(__name__))


# First, because the path of a redirected package leads to files that would be loaded a second time.
sys.meta_path.insert(0, _Redirect())


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module(_TARGET), name)
