"""URLs in the package's metadata, by the hook `hatch_build.py`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

GITHUB = ("GITHUB_REPOSITORY", "GITHUB_SERVER_URL")
HOME = "https://git.example.org/team/tailrace"


def built_urls(root: Path) -> dict[str, str]:
    """What the hook sets for a package that is built in `root`."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    metadata: dict[str, dict[str, str]] = {}
    module.CustomMetadataHook(str(root), {}).update(metadata)
    return metadata["urls"]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository, outside of any workflow."""
    for name in GITHUB:
        monkeypatch.delenv(name, raising=False)
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


@pytest.mark.parametrize(
    "remote",
    [
        HOME,
        f"{HOME}.git/",
        "https://user:secret@git.example.org/team/tailrace.git",
        "git@git.example.org:team/tailrace.git",
        "ssh://git@git.example.org:2222/team/tailrace.git",
    ],
)
def test_a_remote_gives_the_urls(clone: Path, remote: str) -> None:
    subprocess.run(["git", "-C", str(clone), "remote", "add", "origin", remote], check=True)
    assert built_urls(clone) == {
        "Repository": HOME,
        "Documentation": f"{HOME}/tree/HEAD/docs",
        "Changelog": f"{HOME}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{HOME}/issues",
    }


@pytest.mark.parametrize(
    "remote", ["", "/srv/git/tailrace", "file:///srv/tailrace", "../main", "box:tailrace"]
)
def test_a_place_that_nobody_else_reaches_gives_none(clone: Path, remote: str) -> None:
    if remote:
        subprocess.run(["git", "-C", str(clone), "remote", "add", "origin", remote], check=True)
    assert built_urls(clone) == {}


def test_a_github_workflow_names_its_repository(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "fork/tailrace")
    assert built_urls(clone)["Repository"] == "https://github.com/fork/tailrace"
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example.org")
    assert built_urls(clone)["Repository"] == "https://git.example.org/fork/tailrace"


def test_an_sdist_keeps_the_urls_that_it_was_packed_with(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(
        f"Name: tailrace\nProject-URL: Repository, {HOME}\n\nProject-URL: No, not of the header\n"
    )
    assert built_urls(tmp_path) == {"Repository": HOME}
