"""Names of functions and classes in configurations."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace.import_path import load_object


@pytest.mark.parametrize(
    "dotted", ["tailrace.import_path:load_object", "tailrace.import_path.load_object"]
)
def test_a_name_is_found_behind_a_colon_and_behind_a_dot(dotted: str) -> None:
    assert load_object(dotted, "agents.x") is load_object


@pytest.mark.parametrize(
    ("dotted", "remedy"),
    [
        ("loads", "must look like package.module:name"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        ("json:dump_all", "module 'json' has no 'dump_all'"),
        ("json:__name__", "is a str, not a function or a class"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_its_key(dotted: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        load_object(dotted, "agents.x")
    assert str(caught.value).startswith("agents.x: ")


def test_a_module_that_raises_is_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_done.py").write_text("raise RuntimeError('half done')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="half done"):
        load_object("half_done:f", "agents.x")


@pytest.mark.parametrize("ending", ["", "raise RuntimeError\n"])
def test_garbage_is_collected_again_after_an_import(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"imported_{len(ending)}"
    text = f"import gc, sys\nsys.collected = gc.isenabled()\ndef make(): ...\n{ending}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.suppress(ConfigError):
        load_object(f"{name}:make", "agents.x")
    assert (sys.collected, gc.isenabled()) == (False, True)  # type: ignore[attr-defined]
