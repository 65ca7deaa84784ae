"""The house: rooms of each service, the atlas of the wire, and what may be imported where."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace_protos

ROOT = Path(__file__).parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").glob("tailrace_*"))
ACTORS = [name for name in SERVICES if name != "tailrace_cli"]
ROOMS = {
    "README.md", "__init__.py", "__main__.py", "config.py", "handlers.py", "core", "ports.py",
    "adapters", "metrics.py", "engine", "py.typed", "__pycache__",
}  # fmt: skip
SOURCES = sorted(
    path
    for root in ("protos", "shared", "services")
    for path in (ROOT / root).rglob("*.py")
    if "__pycache__" not in path.parts
)


@pytest.mark.parametrize("service", ACTORS)
def test_every_service_has_the_same_rooms_and_no_others(service: str) -> None:
    found = {path.name for path in (ROOT / "services" / service).iterdir()}
    assert {"README.md", "__main__.py", "config.py", "metrics.py"} <= found
    parts_of_config = {name for name in found if name.startswith("config_")}
    outside = found - ROOMS - parts_of_config
    assert not outside, f"rooms outside the plan: {outside}"


@pytest.mark.parametrize("service", ACTORS)
def test_every_config_field_has_prose_under_it(service: str) -> None:
    sources = sorted((ROOT / "services" / service).glob("config*.py"))
    bare = [
        f"{kind.name}.{field.target.id}"
        for source in sources
        for kind in ast.walk(ast.parse(source.read_text()))
        if isinstance(kind, ast.ClassDef)
        for field, after in zip(kind.body, [*kind.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert not bare, f"fields without prose: {bare}"


def test_the_atlas_lists_every_module_of_the_wire() -> None:
    atlas = tailrace_protos.__doc__ or ""
    modules = {path.stem for path in (ROOT / "protos/tailrace_protos").glob("*.py")} - {"__init__"}
    assert {module for module in modules if f"| `{module}` |" not in atlas} == set()


def test_configs_and_protos_import_without_torch() -> None:
    configs = "\n".join(f"import {name}.config" for name in SERVICES)
    protos = "\n".join(
        f"import tailrace_protos.{path.stem}"
        for path in (ROOT / "protos/tailrace_protos").glob("*.py")
        if path.stem != "__init__"
    )
    program = f"{configs}\n{protos}\nimport sys\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_only_the_runtime_has_a_broad_except() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and not _reraises(node)
    ]
    assert all(place.startswith("shared/tailrace/runtime") for place in places), places
    assert len(places) <= 1, places


def _reraises(handler: ast.ExceptHandler) -> bool:
    """Clean-up handlers that end in a bare `raise` swallow nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_every_module_opens_with_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not silent


def test_every_message_tag_is_written_out_and_used_once() -> None:
    tags: dict[str, str] = {}
    for path in sorted((ROOT / "protos/tailrace_protos").glob("*.py")):
        module = importlib.import_module(
            f"tailrace_protos.{path.stem}" if path.stem != "__init__" else "tailrace_protos"
        )
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef) and any(k.arg == "tag" for k in kind.keywords):
                tag = getattr(module, kind.name).__struct_config__.tag
                assert isinstance(tag, str)
                assert tag not in tags, f"{tag} is both {tags[tag]} and {kind.name}"
                tags[tag] = kind.name
    assert len(tags) > 20


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    questions = ("What", "Who", "Which", "How", "Whether", "Whose", "Where", "When", "Why")
    opened = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and text.split()[0].strip("`,") in questions
    ]
    assert not opened


def test_the_page_of_the_architecture_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 150
