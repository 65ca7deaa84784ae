"""Finding of the cgroup in which the service may make others, from texts and folders of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailrace_sandbox.adapters.groups import delegated_folder
from tailrace_sandbox.core.cgroups import NotDelegatedError, folder_of, values
from tailrace_sandbox.engine.group import CallGroup

HYBRID = "9:name=systemd:/\n4:memory:/run/1\n0::/user.slice/me.scope\n"
MOUNTS = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    "32 31 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
)


@pytest.mark.parametrize(
    ("path", "root", "point", "folder"),
    [
        ("/user.slice/me.scope", "/", "/sys/fs/cgroup", "/sys/fs/cgroup/user.slice/me.scope"),
        ("/", "/", "/sys/fs/cgroup", "/sys/fs/cgroup"),
        ("/docker/1/a", "/docker/1", "/sys/fs/cgroup", "/sys/fs/cgroup/a"),
        ("/docker/1", "/docker/1", "/sys/fs/cgroup", "/sys/fs/cgroup"),
        ("/a", "/", "/my\\040groups", "/my groups/a"),
    ],
)
def test_the_folder_of_a_group_is_below_the_place_where_its_root_is_mounted(
    path: str, root: str, point: str, folder: str
) -> None:
    assert folder_of(f"4:memory:/x\n0::{path}\n", MOUNTS.format(root=root, point=point)) == folder


@pytest.mark.parametrize(
    ("cgroup", "root", "why"),
    [
        ("4:memory:/run/1\n", "/", "no cgroup v2"),
        ("0::/docker/12\n", "/docker/1", "shows this process"),
        ("0::/\n", "/../..", "shows this process"),
    ],
)
def test_a_group_that_no_mount_shows_is_told(cgroup: str, root: str, why: str) -> None:
    with pytest.raises(NotDelegatedError, match=why):
        folder_of(cgroup, MOUNTS.format(root=root, point="/sys/fs/cgroup"))


def test_files_of_the_kernel_are_numbers_by_name() -> None:
    assert values("low 0\noom 2\noom_kill 31\n") == {"low": 0, "oom": 2, "oom_kill": 31}


def group(
    tmp_path: Path, *, controllers: str = "cpu memory pids", processes: str = "", enabled: str = ""
) -> Path:
    """A process's entry below `/proc`, in a group that looks like this."""
    folder = tmp_path / "groups" / "me.scope"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.procs").write_text(processes or str(os.getpid()))
    (folder / "cgroup.subtree_control").write_text(enabled)
    proc = tmp_path / "self"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/me.scope\n")
    (proc / "mountinfo").write_text(MOUNTS.format(root="/", point=tmp_path / "groups"))
    return proc


def test_a_group_for_the_service_alone_is_taken(tmp_path: Path) -> None:
    assert delegated_folder(group(tmp_path)) == tmp_path / "groups" / "me.scope"


def test_a_service_that_an_earlier_one_moved_aside_takes_the_group_around_it(tmp_path: Path) -> None:
    proc = group(tmp_path, processes="\n", enabled="memory pids")
    (tmp_path / "groups" / "me.scope" / "tailrace-services").mkdir()
    (proc / "cgroup").write_text("0::/me.scope/tailrace-services\n")
    assert delegated_folder(proc) == tmp_path / "groups" / "me.scope"


def test_a_group_without_the_memory_controller_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotDelegatedError, match=r"me\.scope has no memory controller"):
        delegated_folder(group(tmp_path, controllers="cpu pids"))


def test_a_group_of_others_is_left_alone_unless_it_is_marked_as_delegated(tmp_path: Path) -> None:
    proc = group(tmp_path, processes=f"1\n{os.getpid()}")
    folder = tmp_path / "groups" / "me.scope"
    with pytest.raises(NotDelegatedError, match="other processes"):
        delegated_folder(proc)
    try:
        os.setxattr(folder, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"no extended attributes on {tmp_path}: {error.strerror}")
    assert delegated_folder(proc) == folder


def test_a_group_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    proc = group(tmp_path)
    (tmp_path / "groups" / "me.scope" / "cgroup.procs").chmod(0o444)
    if os.geteuid() == 0:
        pytest.skip("root may write everything here")
    with pytest.raises(NotDelegatedError, match="may not be written"):
        delegated_folder(proc)


def counts(folder: Path, *, current: int = 100, file: int = 0, oom: int = 0, oom_kill: int = 0) -> None:
    """What the kernel would tell of the group in this folder."""
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {file}\nslab_reclaimable 3\n")
    (folder / "memory.events").write_text(f"max 7\noom {oom}\noom_kill {oom_kill}\n")


def test_a_call_ran_out_of_memory_when_its_own_group_did_and_something_was_ended(
    tmp_path: Path,
) -> None:
    counts(tmp_path)
    group = CallGroup(str(tmp_path))
    counts(tmp_path, oom=1)  # an allocation failed, and nothing ended
    assert not group.ran_out()
    counts(tmp_path, oom_kill=1)  # the machine, or a group around this one, ran out
    assert not group.ran_out()
    counts(tmp_path, oom=1, oom_kill=1)
    assert group.ran_out()
    group.begin()
    assert not group.ran_out(), "that was an earlier call"


def test_memory_of_a_call_is_without_files_and_what_its_zygote_holds(tmp_path: Path) -> None:
    counts(tmp_path, current=103)
    group = CallGroup(str(tmp_path))
    counts(tmp_path, current=1103, file=400)
    assert group.call_bytes(800) == 600
    assert group.call_bytes(2000) == 1003, "within the limit anyway"
