"""Segments: naming, sealing, and what happens to those of dead processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tailrace.weights import SegmentSpaceError, WeightsGoneError
from tailrace.weights.mappings import SegmentMappings
from tailrace.weights.segment import SegmentFolder, SharedSegment, open_segment
from tailrace_protos.weights import WeightManifest

MANIFEST = WeightManifest(4, "a", 9, None, (), 1000)

DEAD_WRITER = """
import os, sys
from pathlib import Path
from tailrace.weights.mappings import SegmentMappings
from tailrace.weights.segment import SegmentFolder
from tailrace_protos.weights import WeightManifest
folder = SegmentFolder("run", "weight_sync", Path(sys.argv[1]))
segment = folder.create(1000)
segment.data[:] = bytes([5]) * 1000
if sys.argv[2] == "sealed":
    segment.seal(WeightManifest(4, "a", 9, None, (), 1000))
if sys.argv[2] == "retired":
    folder.retire(segment)
os.kill(os.getpid(), 9)
"""


def leave_behind(folder: Path, state: str) -> None:
    ended = subprocess.run([sys.executable, "-c", DEAD_WRITER, str(folder), state], check=False)
    assert ended.returncode == -9
    assert len(list(folder.iterdir())) == 1


def test_a_segment_is_read_by_its_name(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(1000)
    segment.data[:3] = b"abc"
    read = SegmentMappings(tmp_path).read(segment.name, 1000)
    assert bytes(read[:3]) == b"abc"
    assert len(read) == 1000


def test_a_segment_is_its_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        segment = SegmentFolder("run", "learner", tmp_path).create(10)
    finally:
        os.umask(previous)
    assert (tmp_path / segment.name).stat().st_mode & 0o777 == 0o600


def test_what_is_mapped_stays_readable_after_the_segment_is_deleted(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(10)
    segment.data[:] = b"0123456789"
    read = SegmentMappings(tmp_path).read(segment.name, 10)
    segment.close(delete=True)
    assert bytes(read) == b"0123456789"
    with pytest.raises(WeightsGoneError):
        open_segment(segment.name, 10, tmp_path)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(10)
    read = SegmentMappings(tmp_path).read(segment.name, 10)
    with pytest.raises(TypeError, match="read-only"):
        read[:3] = b"xyz"


def test_a_copy_does_not_change_with_its_source(tmp_path: Path) -> None:
    folder = SegmentFolder("run", "weight_sync", tmp_path)
    source = folder.create(3_000_000)
    source.data[:] = b"\x07" * 3_000_000
    fd = open_segment(source.name, 3_000_000, tmp_path)
    copy = folder.copy_of(fd, 3_000_000)
    os.close(fd)
    source.data[:] = bytes(3_000_000)
    assert bytes(copy.data) == b"\x07" * 3_000_000


@pytest.mark.parametrize("name", ["../etc/passwd", "tailrace/x", "other", "tailrace.run.none"])
def test_names_that_are_no_segment_of_ours_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsGoneError):
        open_segment(name, 1, tmp_path)


def test_a_shorter_file_than_promised_is_refused(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(10)
    with pytest.raises(WeightsGoneError, match="smaller"):
        open_segment(segment.name, 11, tmp_path)


def test_a_successor_adopts_the_sealed_segment_of_a_dead_writer(tmp_path: Path) -> None:
    leave_behind(tmp_path, "sealed")
    ((manifest, segment),) = SegmentFolder("run", "weight_sync", tmp_path).adopt()
    assert manifest == MANIFEST
    assert bytes(segment.data) == b"\x05" * 1000
    assert list(SegmentFolder("run", "weight_sync", tmp_path).adopt()) == []  # it has an owner again


def test_an_unfinished_segment_of_a_dead_writer_is_deleted(tmp_path: Path) -> None:
    leave_behind(tmp_path, "unsealed")
    assert list(SegmentFolder("run", "weight_sync", tmp_path).adopt()) == []
    assert list(tmp_path.iterdir()) == []


def test_sweeping_spares_the_living_and_other_runs(tmp_path: Path) -> None:
    leave_behind(tmp_path, "sealed")
    living = SegmentFolder("run", "weight_sync", tmp_path).create(10)
    assert SegmentFolder("run2", "weight_sync", tmp_path).sweep() == 0
    assert SegmentFolder("run", "learner", tmp_path).sweep() == 0
    assert SegmentFolder("run", "weight_sync", tmp_path).sweep() == 1
    assert [path.name for path in tmp_path.iterdir()] == [living.name]


def written(folder: SegmentFolder, content: bytes) -> SharedSegment:
    segment = folder.create(len(content))
    segment.data[:] = content
    return segment


def inode(segment: SharedSegment) -> int:
    return segment.path.stat().st_ino


def test_a_retired_segment_is_reused_once_nobody_reads_it(tmp_path: Path) -> None:
    folder, mappings = SegmentFolder("run", "weight_sync", tmp_path), SegmentMappings(tmp_path)
    first = written(folder, b"first" * 1000)
    first.seal(WeightManifest(4, "a", 9, None, (), 5000))
    name, number = first.name, inode(first)
    read = mappings.read(name, 5000)
    assert bytes(read) == b"first" * 1000
    folder.retire(first)
    with pytest.raises(WeightsGoneError):
        mappings.read(name, 5000)
    del read
    second = written(folder, b"other" * 1000)
    assert inode(second) == number
    assert second.path.stat().st_size == 5000  # the seal is gone
    assert bytes(mappings.read(second.name, 5000)) == b"other" * 1000


def test_bytes_that_are_read_stay_as_they_are(tmp_path: Path) -> None:
    folder, mappings = SegmentFolder("run", "weight_sync", tmp_path), SegmentMappings(tmp_path)
    first = written(folder, b"first" * 1000)
    part = mappings.read(first.name, 5000)[5:10]
    folder.retire(first)
    second = written(folder, b"other" * 1000)
    assert bytes(part) == b"first"
    assert bytes(mappings.read(second.name, 5000)) == b"other" * 1000
    assert [path.name for path in tmp_path.iterdir()] == [second.name]


def test_bytes_that_the_writer_s_process_uses_stay_as_they_are(tmp_path: Path) -> None:
    folder = SegmentFolder("run", "weight_sync", tmp_path)
    first = written(folder, b"first" * 1000)
    part = first.data[5:10]
    folder.retire(first)
    second = written(folder, b"other" * 1000)
    assert bytes(part) == b"first"
    assert bytes(second.data) == b"other" * 1000


def test_a_copy_replaces_the_retired_segment_whole(tmp_path: Path) -> None:
    folder = SegmentFolder("run", "weight_sync", tmp_path)
    source = written(SegmentFolder("run", "learner", tmp_path), b"first" * 1000)
    fd = open_segment(source.name, 5000, tmp_path)
    copy = folder.copy_of(fd, 5000)
    number = inode(copy)
    folder.retire(copy)
    source.data[:] = b"other" * 1000
    again = folder.copy_of(fd, 5000)
    os.close(fd)
    assert inode(again) == number
    assert again.path.read_bytes() == b"other" * 1000


def test_segments_that_others_delete_are_replaced_by_new_ones(tmp_path: Path) -> None:
    folder = SegmentFolder("run", "weight_sync", tmp_path)
    first, second = written(folder, b"first"), written(folder, b"other")
    first.path.unlink()
    folder.retire(first)
    folder.retire(second)
    second.path.unlink()
    third = written(folder, b"third")
    assert [path.name for path in tmp_path.iterdir()] == [third.name]
    assert bytes(third.data) == b"third"


def test_a_segment_of_another_size_is_new_and_the_retired_one_is_deleted(tmp_path: Path) -> None:
    folder = SegmentFolder("run", "weight_sync", tmp_path)
    folder.retire(written(folder, b"first"))
    second = written(folder, b"longer than the first")
    assert [path.name for path in tmp_path.iterdir()] == [second.name]


def test_a_reader_gives_the_memory_of_deleted_segments_back(tmp_path: Path) -> None:
    folder, mappings = SegmentFolder("run", "weight_sync", tmp_path), SegmentMappings(tmp_path)
    first, second = written(folder, b"first"), written(folder, b"other")
    name = first.name
    mappings.read(name, 5)
    first.close(delete=True)
    del first
    mappings.read(second.name, 5)
    open_files = [str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()]
    assert not any(name in file for file in open_files)
    assert name not in Path("/proc/self/maps").read_text()


def test_the_retired_segment_of_a_dead_writer_is_deleted(tmp_path: Path) -> None:
    leave_behind(tmp_path, "retired")
    assert SegmentFolder("run", "weight_sync", tmp_path).sweep() == 0
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises((SegmentSpaceError, OSError)) as caught:
        SegmentFolder("run", "learner", tmp_path).create(1 << 50)
    assert isinstance(caught.value, SegmentSpaceError) or caught.value.errno == 27  # EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_full_memory_file_system_is_named_with_the_remedy() -> None:
    num_bytes = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize + (1 << 20)
    with pytest.raises(SegmentSpaceError, match="shm-size"):
        SegmentFolder("run", f"test{os.getpid()}").create(num_bytes)
    assert list(Path("/dev/shm").glob(f"*test{os.getpid()}*")) == []


def test_segments_of_another_user_with_a_run_of_this_name_are_left_alone() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)  # as /dev/shm
    theirs = folder / "tailrace.run.weight_sync.1"
    for path in (theirs, folder / ".tailrace.run.weight_sync.2"):
        path.touch(mode=0o000)
        os.utime(path, (0, 0))
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        assert SegmentFolder("run", "weight_sync", folder).sweep() == 0
        assert list(SegmentFolder("run", "weight_sync", folder).adopt()) == []
    finally:
        if is_root:
            os.seteuid(0)
    assert theirs.exists()
    shutil.rmtree(folder)
