"""Small disks of a test's own, which it fills to the last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_mib: int) -> Iterator[Path]:
    """Makes `folder` a disk of its own; skips the test where that is not allowed."""
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)]
    _run_or_skip(argv)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def with_own_memory(num_mib: int) -> tuple[str, ...]:
    """Words before a command, which gives it a /dev/shm of its own; skips where that is not allowed.

    Other processes find it at `/proc/<pid>/root/dev/shm`.
    """
    mount = f"mount -t tmpfs -o size={num_mib}m tmpfs /dev/shm"
    prefix = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    _run_or_skip([*prefix, "true"])
    return prefix


def _run_or_skip(argv: list[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {argv[0]} command on this machine")
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")


def fill(ballast: Path, size: int = 1 << 20) -> None:
    """Takes what is free on the disk of this file, to the last byte that can be had."""
    with ballast.open("ab", buffering=0) as file:
        while size >= 512:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 4
