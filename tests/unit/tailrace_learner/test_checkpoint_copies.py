"""Copies of checkpoints on an object store, from which a learner without its disk continues."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from tailrace_learner.adapters.checkpoint_copies import CheckpointCopies
from tailrace_learner.adapters.checkpoints import (
    CheckpointFolder,
    CheckpointNotSavedError,
    read_checkpoint,
)
from tailrace_learner.config import LearnerConfig
from tests.unit.tailrace_learner.test_checkpoints import Session, state, still  # noqa: F401
from tests.unit.tailrace_learner.test_roles import KL, Run, settings


def folder_with_copies(root: Path, name: str = "run") -> CheckpointFolder:
    config = LearnerConfig(checkpoint_url=f"file://{root}/store")
    return CheckpointFolder(root / name, CheckpointCopies(config.checkpoint_url, "run"))


def test_a_path_is_no_url_of_a_store() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"checkpoint_url '/runs' is no URL"):
        msgspec.convert({"checkpoint_url": "/runs"}, LearnerConfig)


def test_a_learner_whose_disk_is_lost_continues_from_the_newest_copy(
    tmp_path: Path,
    still: Session,  # noqa: F811
) -> None:
    folder = folder_with_copies(tmp_path)
    for step in (1, 2):
        folder.write(still.snapshot(), state(step, lineage="a", saved_unix_s=float(step)))
    folder.write(still.snapshot(), state(3, lineage="b", saved_unix_s=3.0))
    shutil.rmtree(folder.root)
    folder.restore({"a"})
    found = folder.newest({"a"})
    assert found is not None
    assert found.state.step == 2
    assert (found.path / "optimizer.safetensors").is_file()
    folder.restore(None)
    newest = folder.newest()
    assert newest is not None
    assert newest.state.lineage == "b"


def test_a_newer_checkpoint_on_the_disk_is_kept(tmp_path: Path, still: Session) -> None:  # noqa: F811
    folder = folder_with_copies(tmp_path)
    folder.write(still.snapshot(), state(1, lineage="a", saved_unix_s=1.0))
    CheckpointFolder(tmp_path / "run").write(still.snapshot(), state(2, lineage="a", saved_unix_s=2.0))
    folder.restore({"a"})
    found = folder.newest({"a"})
    assert found is not None
    assert found.state.step == 2


@pytest.mark.parametrize("content", [None, b"{", b'{"lineage": "\xff"}'])
def test_an_unfinished_copy_is_not_taken(
    tmp_path: Path,
    content: bytes | None,
    still: Session,  # noqa: F811
) -> None:
    folder = folder_with_copies(tmp_path)
    for step in (1, 2):
        folder.write(still.snapshot(), state(step, lineage="a", saved_unix_s=float(step)))
    copied = tmp_path / "store" / "run" / "step_2" / "run_state.json"
    copied.unlink()
    if content is not None:
        copied.write_bytes(content)
    shutil.rmtree(folder.root)
    folder.restore({"a"})
    assert [each.state.step for each in folder.all()] == [1]


def test_pruned_checkpoints_lose_their_copies(tmp_path: Path, still: Session) -> None:  # noqa: F811
    folder = folder_with_copies(tmp_path)
    for step in (1, 2, 3):
        folder.write(still.snapshot(), state(step, lineage="a", saved_unix_s=float(step)))
    folder.prune(1, {"a"})
    copies = [path for path in (tmp_path / "store" / "run").rglob("run_state.json")]
    assert [path.parent.name for path in copies] == ["step_3"]


def test_a_checkpoint_without_its_copy_is_not_saved(
    tmp_path: Path,
    still: Session,  # noqa: F811
) -> None:
    (tmp_path / "store").write_text("a file where the store should be")
    folder = folder_with_copies(tmp_path)
    with pytest.raises(CheckpointNotSavedError, match="its copy failed: object store: file://"):
        folder.write(still.snapshot(), state(1))


@pytest.mark.parametrize("is_named", [False, True])
def test_a_reference_comes_back_with_a_lost_run_directory(tmp_path: Path, is_named: bool) -> None:
    run = Run(tmp_path / "run", settings(**KL))
    run.store = CheckpointFolder(run.run.run_dir, CheckpointCopies(f"file://{tmp_path}/store", "unit"))
    run.train(range(2))
    run.save(2)
    wanted = run.train(range(2, 3))
    shutil.rmtree(tmp_path / "run")
    copies = tmp_path / "store" / "unit"
    if is_named:  # on another machine, under another name
        again = CheckpointFolder(tmp_path / "again" / "unit")
        path = copies / "step_2"
        again.restore_start(read_checkpoint(path).state, f"file://{path}/")
    else:
        run.store.restore(None)
        newest = run.store.newest()
        assert newest is not None
        run.store.restore_start(newest.state)
        path = newest.path
    resumed = Run(tmp_path / ("again" if is_named else "run"), run.config, str(path))
    assert resumed.train(range(2, 3)) == wanted
    assert wanted["kl"] > 1e-6  # type: ignore[operator]
    assert resumed.worker.reference is not None
    assert Path(resumed.worker.reference.source) == resumed.run.run_dir / "start"


def test_the_start_of_a_run_is_copied_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", settings(**KL))
    run.store = CheckpointFolder(run.run.run_dir, CheckpointCopies(f"file://{tmp_path}/store", "unit"))
    run.save(1)
    (start,) = (tmp_path / "store" / "unit").glob("start_*")
    sent_at = (start / "model.safetensors").stat().st_mtime_ns
    run.save(2)
    assert (start / "model.safetensors").stat().st_mtime_ns == sent_at


def test_a_moved_run_directory_brings_its_reference_along(tmp_path: Path) -> None:
    run = Run(tmp_path / "before", settings(**KL))
    path = Path(run.save(1))
    (tmp_path / "before").rename(tmp_path / "after")
    moved = tmp_path / "after" / path.relative_to(tmp_path / "before")
    assert Run(tmp_path / "after", run.config, str(moved)).worker.reference is not None
