"""Stand-ins of `torchvision` and `sgl_kernel` for engines on a CPU: imports succeed, every call raises.

SGLang imports both at its start, vLLM the first for models that also see. The one has no build for
torch's CPU wheels, the other needs CUDA; text on a CPU calls neither. The environments of both engines
have a copy of this module, which a `.pth` file loads in each process. A real package of the same name
wins.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import NoReturn

_NAMES = ("torchvision", "sgl_kernel")


class _Name:
    """A function, class or constant of a stand-in."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *values: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stand-in that can only be imported")


class _StandIn(ModuleType):
    __version__ = "0"  # transformers reads it

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds the stand-ins and all modules in them, after every real package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
