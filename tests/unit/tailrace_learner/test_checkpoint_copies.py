"""Copies of checkpoints on an object store, from which a learner without its disk continues."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from tailrace_learner.adapters.checkpoint_copies import CheckpointCopies
from tailrace_learner.adapters.checkpoints import CheckpointFolder, CheckpointNotSavedError
from tailrace_learner.config import LearnerConfig
from tests.unit.tailrace_learner.test_checkpoints import Session, state, still  # noqa: F401


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


def test_an_unfinished_copy_is_not_taken(tmp_path: Path, still: Session) -> None:  # noqa: F811
    folder = folder_with_copies(tmp_path)
    for step in (1, 2):
        folder.write(still.snapshot(), state(step, lineage="a", saved_unix_s=float(step)))
    (tmp_path / "store" / "run" / "step_2" / "run_state.json").unlink()
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
