"""Every key of an experiment is read by its own service, and changed by a test of that service."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tailrace.channel import ClientChannelConfig
from tailrace_cli.reference import Entry, entries
from tests.world.channel_keys import CASES

ROOT = Path(__file__).parents[2]
# Folders of tests that run a service of another name.
FOLDERS = {
    "cluster": "cli",
    "terminal": "cli",
    "weights": "weight_sync",
    "workflows": "agents",
    "frameworks": "agents",
}
CHANNEL = re.compile(r"(agents|gateway)\.channel\.(\w+)")
KEYS = [entry for entry in entries() if "env_config" not in entry.part]  # see docs/environments.md


@cache
def sources_of(service: str) -> frozenset[Path]:
    """Modules that the process of a service loads: its own, and what these import of `shared`."""
    found: set[Path] = set()
    new = set((ROOT / "services" / f"tailrace_{service}").rglob("*.py"))
    while new:
        found |= new
        imported = {path for source in new for path in imports_of(source)}
        new = imported - found
    return frozenset(found)


@cache
def imports_of(source: Path) -> frozenset[Path]:
    """Modules of `shared` that a module imports by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    stems = [ROOT / "shared" / name.replace(".", "/") for name in names]
    candidates = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")]
    return frozenset(path for path in candidates if path.is_file())


@cache
def read_in(source: Path) -> frozenset[str]:
    """Attributes that a module reads, outside of the checks of a configuration."""
    return frozenset(_attributes(ast.parse(source.read_text())))


def _attributes(tree: ast.AST) -> Iterator[str]:
    if isinstance(tree, ast.FunctionDef) and tree.name == "__post_init__":
        return
    if isinstance(tree, ast.Attribute) and isinstance(tree.ctx, ast.Load):
        yield tree.attr
    for child in ast.iter_child_nodes(tree):
        yield from _attributes(child)


@cache
def set_by_tests_of(service: str) -> frozenset[str]:
    """Names that the service's own tests give a value: arguments, keys of dicts, `key=` in texts."""
    return frozenset(
        name
        for path in (ROOT / "tests").rglob("*.py")
        if _owner(path) == service
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _names_set(node)
    )


def _owner(path: Path) -> str:
    parts = path.relative_to(ROOT / "tests").parts
    if parts[0] not in ("unit", "integration") or len(parts) < 3:
        return ""
    name = parts[1].removeprefix("tailrace_")
    return FOLDERS.get(name, name)


def _names_set(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.keyword) and node.arg:
        yield node.arg
    elif isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        yield from (step for key in keys for step in str(key).split("."))
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield from _names_set(ast.Dict([node.slice], []))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        for found in re.finditer(r"([\w.]+)\s*[=:]", node.value):
            yield from found[1].split(".")


def last_step(entry: Entry) -> str:
    return entry.name.rpartition(".")[2]


@pytest.mark.parametrize("service", sorted({service for each in KEYS for service in each.readers}))
def test_a_service_reads_every_key_of_its_section(service: str) -> None:
    read = frozenset().union(*map(read_in, sources_of(service)))
    keys = [entry for entry in KEYS if service in entry.readers]
    assert len(keys) > 5
    assert [entry.name for entry in keys if last_step(entry) not in read] == []


def test_every_key_is_changed_by_a_test_of_a_service_that_reads_it() -> None:
    of_channel = {case.key for case in CASES}  # both services' `test_channel_keys.py` change these
    unchanged = [
        entry.name
        for entry in KEYS
        if not (CHANNEL.fullmatch(entry.name) and last_step(entry) in of_channel)
        and not any(last_step(entry) in set_by_tests_of(service) for service in entry.readers)
    ]
    assert len(KEYS) > 350
    assert unchanged == []


def test_sections_of_the_channel_have_the_keys_of_a_client() -> None:
    found = [match.groups() for entry in KEYS if (match := CHANNEL.fullmatch(entry.name))]
    fields = ClientChannelConfig.__struct_fields__
    assert sorted(found) == sorted((owner, key) for owner in ("agents", "gateway") for key in fields)
