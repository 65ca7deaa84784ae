"""Modules and experiments that the pages show load, and names that they give to programs exist."""

from __future__ import annotations

import copy
import importlib
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import tailrace
import tailrace.sdk
from tailrace.import_path import importable_from
from tailrace_cli.experiment import Experiment, decode, load
from tailrace_cli.validation import check_experiment
from tests.architecture.test_pages import KEYS_OF_RUN, NAMES, ROOT, SECTIONS, blocks, text_of

OWN_FILE = re.compile(r"# (?:\w+/)?(\w+)\.py\b")
EXAMPLE = ROOT / "examples" / "own_algorithm" / "experiment.yaml"
SCORED = {"rewards": [{"name": "answer", "kind": "scorer"}]}
ROW = '{"prompt": "1 + 1?", "answer": "2"}\n'


def modules(name: str) -> dict[str, str]:
    """Python blocks of a page that begin with the name of their file, by module."""
    texts = map(textwrap.dedent, blocks(name, "python"))
    return {found[1]: text for text in texts if (found := OWN_FILE.match(text))}


def experiments(name: str) -> list[dict[str, Any]]:
    """YAML blocks of a page that are parts of an experiment."""
    contents = [yaml.safe_load(block) for block in blocks(name, "yaml")]
    return [
        content
        for content in contents
        if isinstance(content, dict) and content.keys() & (SECTIONS | KEYS_OF_RUN)
    ]


def merged(content: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The content with a part of a page over it."""
    for key, value in part.items():
        inner = content.get(key)
        content[key] = (
            merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return content


def completed(part: dict[str, Any]) -> dict[str, Any]:
    """A whole experiment with a part in it, which plays what the part defines."""
    content = yaml.safe_load(EXAMPLE.read_text())
    for key in ("adv_estimator", "loss", "pg_clip", "warm_start"):
        del content["learner"][key]
    agents = part.get("agents") or {}
    played = list((agents.get("datasets") or {}) | (agents.get("custom_envs") or {}))
    if played:
        del content["agents"]["custom_envs"]
        content["scheduler"]["tags"] = played[:1]
    if "datasets" in agents and "workflow" not in agents:
        content["reward"] = copy.deepcopy(SCORED)
    if "evaluations" in part:
        sets = {args.get("tag", name) for name, args in part["evaluations"].items()}
        content["agents"]["datasets"] = {name: {"path": "questions.jsonl"} for name in sets}
        content["reward"] = copy.deepcopy(SCORED)
    if "pretrain" in part:
        del content["learner"]["from_scratch"]
    return merged(content, copy.deepcopy(part))


def loaded(part: dict[str, Any], name: str, folder: Path) -> Experiment:
    """The experiment of a part; one with `defaults:` changes the example that its page copies."""
    if "defaults" not in part:
        return decode(completed(part), name)
    (copied,) = re.findall(r"^tailrace init (\S+)", text_of(name), re.MULTILINE)
    compiled = shutil.ignore_patterns("__pycache__")  # it changes while other tests import the example
    shutil.copytree(ROOT / "examples" / copied, folder, dirs_exist_ok=True, ignore=compiled)
    (folder / "mine.yaml").write_text(yaml.safe_dump(part))
    return load(folder / "mine.yaml")


@pytest.mark.parametrize("name", [name for name in NAMES if modules(name) or experiments(name)])
def test_modules_and_experiments_of_a_page_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text(ROW)
    for module, text in modules(name).items():
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)  # another page has one of this name
    with importable_from(tmp_path):
        for module in modules(name):
            importlib.import_module(module)
        for part in experiments(name):
            check_experiment(loaded(part, name, tmp_path))


def test_interfaces_of_the_api_page_are_exported() -> None:
    named = re.findall(r"^::: ([\w.]+)\.(\w+)$", text_of("docs/api.md"), re.MULTILINE)
    assert len(named) > 10
    for module, name in named:
        place = tailrace.sdk if f"`{name}`" in text_of("docs/api.md") else tailrace
        assert name in place.__all__
        assert getattr(place, name) is getattr(importlib.import_module(module), name)


def test_codes_of_the_gateways_errors_are_on_its_page() -> None:
    sources = (ROOT / "services" / "tailrace_gateway").rglob("*.py")
    codes = {code for path in sources for code in re.findall(r'\bcode="(\w+)"', path.read_text())}
    codes -= {"conflict"}  # each conflict has a code of its own
    assert len(codes) > 15
    assert [code for code in sorted(codes) if f"`{code}`" not in text_of("docs/gateway.md")] == []
