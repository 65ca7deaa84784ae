"""Names of functions and classes in configurations."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace.import_path import importable_from, load_object, module_options, python_path


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


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("lacks_a_package", "import nmupy", "install the package of 'nmupy', which it imports"),
        ("lacks_a_part", "import json.nowhere", "install the package of 'json.nowhere'"),
        ("lacks_a_name", "from json import nothing", "correct its imports"),
        ("begins_again", "from begins_again import later\nlater = 1", "correct its imports"),
        ("not_there.at_all", "", "correct the name, start Tailrace in the folder"),
    ],
)
def test_the_remedy_tells_a_missing_module_from_what_it_imports(
    name: str, text: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text:
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot import '{name}' .*: {remedy}"):
        load_object(f"{name}:f", "agents.x")


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


def test_a_module_beside_the_experiment_comes_before_one_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "standing_twice.py").write_text(f"def where(): return {folder!r}\n")
    monkeypatch.chdir(tmp_path / "other")
    with importable_from(tmp_path / "mine"):
        assert load_object("standing_twice:where", "agents.x")() == "mine"


def test_python_leaves_the_current_folder_where_the_path_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = python_path(Path("/mine"), f"/more{os.pathsep}/mine")
    assert path.split(os.pathsep) == ["/mine", str(tmp_path), "/more"]
    assert module_options({"PYTHONPATH": path}) == ["-P", "-m"]
    assert module_options({"PYTHONPATH": "/more"}) == ["-m"]
    tmp_path.rmdir()
    assert module_options({"PYTHONPATH": path}) == ["-m"]
