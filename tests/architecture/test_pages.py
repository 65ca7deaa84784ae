"""Paths, keys, commands and targets that the pages name are there."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tailrace.config import ConfigError
from tailrace_cli.__main__ import app
from tailrace_cli.experiment import SECTION_KINDS
from tailrace_cli.reference import entries, find, rule_named

ROOT = Path(__file__).parents[2]
GENERATED = {"reference.md"}
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in GENERATED),
    *sorted((ROOT / "services").glob("*/README.md")),
    *sorted((ROOT / "examples").glob("**/README.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES if "node_modules" not in page.parts]
FOLDERS = {"benchmarks", "docs", "examples", "protos", "services", "shared", "tests"}
SECTIONS = SECTION_KINDS.keys() - {"run"}
KEYS_OF_RUN = set(SECTION_KINDS["run"].__struct_fields__)

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
KEY = re.compile(r"[a-z_]+(\.[\w*]+)+")
SETTING = re.compile(r"([a-z_]\w*(?:\.\w+)*): \S.*")
NO_KEYS = {"error", "error_kind", "logprobs", "parallel_tool_calls", "return_token_ids", "reward_model"}
"""Names before a colon that belong to requests, messages and rows instead."""
COMPOSED = "defaults"
"""Key of the files that Hydra puts below an experiment; no Struct has it."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def quoted(name: str) -> list[str]:
    """Texts in backticks, outside of blocks of code."""
    return QUOTED.findall(BLOCK.sub("", text_of(name)))


def blocks(name: str, *languages: str) -> list[str]:
    return [block[2] for block in BLOCK.findall(text_of(name)) if block[1] in languages]


def is_there(path: str, page: Path) -> bool:
    """Returns whether a file or folder stands at the root, beside the page, or below its folder."""
    if (ROOT / path).exists() or (page.parent / path).exists():
        return True
    return "/" not in path and any(page.parent.rglob(path))


def names_a_path(text: str, page: Path) -> bool:
    """Returns whether a text in backticks means a file or folder of the repository, not of a run."""
    if not PATH.fullmatch(text):
        return False
    if "/" not in text:
        return text.endswith(".py") and page.parent.parent.name == "services"
    known = FOLDERS | {path.name for path in page.parent.iterdir() if path.parent != ROOT}
    return text.endswith(".py") or text.split("/")[0] in known


@pytest.mark.parametrize("name", NAMES)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    page = ROOT / name
    paths = [link for link in LINK.findall(text_of(name)) if "//" not in link]
    paths += [text for text in quoted(name) if names_a_path(text, page)]
    assert [path for path in paths if not is_there(path, page)] == []


def is_known(key: str) -> bool:
    """Returns whether a key, or another name of one, stands in the reference."""
    try:
        return rule_named(key) is not None or bool(find(key.removesuffix(".*")))
    except ConfigError:
        return False


def is_free(key: str) -> bool:
    """Returns whether a key stands below one with names that users choose, such as `kwargs`."""
    parents = [parent for parent in map(str, Path(key.replace(".", "/")).parents) if parent != "."]
    return any(
        entry.name.count(".") == parent.count("/")
        and "by name" in entry.key.type
        and "section" not in entry.key.type
        for parent in parents
        if is_known(parent.replace("/", "."))
        for entry in find(parent.replace("/", "."))
    )


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_known(name: str) -> None:
    dotted = [text for text in quoted(name) if KEY.fullmatch(text) and text.split(".")[0] in SECTIONS]
    assert [key for key in dotted if not is_known(key)] == []
    last = {entry.name.rpartition(".")[2] for entry in entries()}
    settings = [match[1] for text in quoted(name) if (match := SETTING.fullmatch(text))]
    others = SECTIONS | KEYS_OF_RUN | NO_KEYS
    assert [key for key in settings if key.split(".")[-1] not in last | others] == []


def keys_in(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from keys_in(value, f"{prefix}{key}.")


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_experiments_are_known(name: str) -> None:
    tops = SECTIONS | KEYS_OF_RUN
    contents = [yaml.safe_load(block) for block in blocks(name, "yaml")]
    experiments = [
        content for content in contents if isinstance(content, dict) and content.keys() & tops
    ]
    keys = [key for content in experiments for key in keys_in(content) if key != COMPOSED]
    assert [key for key in keys if not is_known(key) and not is_free(key)] == []


@pytest.mark.parametrize("name", NAMES)
def test_names_that_examples_import_are_there(name: str) -> None:
    for block in blocks(name, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block), feature_version=(3, 11))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tailrace"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_targets_are_there(name: str) -> None:
    targets = set(re.findall(r"^([\w./-]+):", text_of("Makefile"), re.MULTILINE))
    text = text_of(name)
    made = re.findall(r"`make ([\w./-]+)", text) + re.findall(r"^make ([\w./-]+)", text, re.MULTILINE)
    assert set(made) - targets == set()
    lines = [line for block in blocks(name, "", "bash", "sh") for line in block.splitlines()]
    for line in lines:
        if line.startswith("tailrace "):
            parse(shlex.split(line.partition(" | ")[0], comments=True)[1:])
    for words in map(str.split, quoted(name)):
        if words[0] == "tailrace":
            subcommand(words[1:])


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    """Returns a command and its own words; an unknown one raises a `UsageError`."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "resolve_command") and not _is_for_group(command, words[0]):
        _, command, words = command.resolve_command(command.context_class(command), words)
    return command, words


def _is_for_group(command: Any, word: str) -> bool:
    return command.invoke_without_command and word.startswith("-")


def parse(words: list[str]) -> None:
    """Parses a command line; an unknown command or option raises a `UsageError`."""
    command, own = subcommand(words)
    command.make_context(command.name, own)
