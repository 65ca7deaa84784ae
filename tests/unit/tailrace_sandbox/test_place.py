"""Decisions of the sandbox by the kernel's features, and removal of folders of others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_sandbox.adapters import place
from tailrace_sandbox.adapters.place import prepare
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.core.tiers import Features
from tailrace_sandbox.engine import workspace

FULL = Features(
    "x86_64", 7, seccomp=True, is_root=False, own_user=False, counts_forks=True, lists_children=True
)


def reporting(features: Features) -> Callable[[str], Awaitable[Features]]:
    """A kernel that offers these."""

    async def find_features(_python: str) -> Features:
        return features

    return find_features


@pytest.mark.parametrize(
    ("features", "tier", "remedy"),
    [
        (replace(FULL, landlock_abi=0), "full", "Linux 5.13"),
        (replace(FULL, is_root=True), "full", "run as another user"),
        (replace(FULL, seccomp=False, landlock_abi=0), "partial", "seccomp filters"),
    ],
)
async def test_a_machine_that_confines_less_than_wanted_is_refused_with_the_remedy(
    features: Features, tier: str, remedy: str, tmp_path: Path
) -> None:
    config = SandboxConfig(tier=tier, workspace_dir=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sandbox\.tier") as refused:
        await prepare(config, reporting(features))
    assert remedy in str(refused.value)
    assert os.listdir(tmp_path) == []


async def test_a_folder_for_calls_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = SandboxConfig(workspace_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"sandbox\.workspace_dir: cannot use .*none"):
        await prepare(config, reporting(FULL))


async def test_less_is_accepted_where_the_configuration_says_so(tmp_path: Path) -> None:
    config = SandboxConfig(tier="partial", workspace_dir=str(tmp_path))
    made = await prepare(config, reporting(replace(FULL, landlock_abi=0)))
    assert made.tier == "partial"
    assert made.start_argument(-1, None)["landlock"] is False
    made.remove()
    assert os.listdir(tmp_path) == []


async def test_folders_of_a_killed_sandbox_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    config = SandboxConfig(workspace_dir=str(tmp_path))
    living = await prepare(config, reporting(FULL))
    killed = await prepare(config, reporting(FULL))
    (Path(killed.base) / "call-1" / "left").mkdir(parents=True)
    killed.lock.close()  # as the kernel does for a process that ends
    newest = await prepare(config, reporting(FULL))
    assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, (living.base, newest.base)))
    living.remove()
    newest.remove()


async def test_links_in_a_folder_that_was_left_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").touch()
    config = SandboxConfig(workspace_dir=str(tmp_path))
    killed = await prepare(config, reporting(FULL))
    (Path(killed.base) / "link").symlink_to(outside)
    (Path(killed.base) / "call-1").mkdir()
    (Path(killed.base) / "call-1" / "link").symlink_to(outside)
    killed.lock.close()
    (await prepare(config, reporting(FULL))).remove()
    assert not Path(killed.base).exists()
    assert os.listdir(outside) == ["kept"]
    assert outside.stat().st_mode & 0o777 == 0o755


async def test_services_that_start_at_once_leave_each_other_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SandboxConfig(workspace_dir=str(tmp_path))
    lock, others = fcntl.flock, []

    def lock_late(fd: int, operation: int) -> None:
        """Lock after another service has started."""
        if operation == fcntl.LOCK_EX and not others:
            others.append("starts")
            others.append(place._make_base(str(tmp_path), own_user=False)[0])
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    made = await prepare(config, reporting(FULL))
    assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, (made.base, others[1])))
    made.remove()


async def test_a_folder_goes_whose_calls_are_removed_by_their_zygote_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = await prepare(SandboxConfig(workspace_dir=str(tmp_path)), reporting(FULL))
    (Path(killed.base) / "call-1").mkdir()
    remove = workspace.remove

    def removed_meanwhile(path: str) -> None:
        remove(path)
        remove(path)

    monkeypatch.setattr(workspace, "remove", removed_meanwhile)
    killed.remove()
    assert os.listdir(tmp_path) == []
