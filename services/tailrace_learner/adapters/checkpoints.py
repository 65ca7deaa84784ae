"""Checkpoint folders: written under another name, made durable, then renamed; never incomplete.

`step_<N>/` loads with `AutoModelForCausalLM` and `AutoTokenizer`. It also holds `optimizer.safetensors`
(moments by parameter name, and the state of the random generator), the critic's files if there is one,
and `run_state.json`, written last. Folders whose names begin with a dot are unfinished or replaced;
they are ignored and removed. A replaced folder gets its name back if its successor was never renamed.
"""

import os
import shutil
import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace_learner.adapters.snapshots import OPTIMIZER_FILE, Snapshot
from tailrace_learner.core.step.run_state import SCHEMA, RunState

log = get_logger(__name__)

STATE_FILE = "run_state.json"
_REPLACED = ".replaced-"  # prefix of a folder that is being replaced


class CheckpointNotSavedError(OSError):
    """The disk refused a checkpoint; older ones are untouched. Attributes: `path`, `reason`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {path} was not saved: {reason}. Remedy: free space on its disk (or give "
            "output_dir another one); saving is tried again"
        )
        self.path = path
        self.reason = reason


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk."""

    path: Path
    state: RunState


class CheckpointFolder:
    """`<run_dir>/checkpoints/`."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "checkpoints"

    def save(self, snapshot: Snapshot, state: RunState) -> Path:
        """Write `step_<N>` durably; `CheckpointNotSavedError` if the disk refuses it."""
        target = self.root / f"step_{state.step}"
        part = self.root / f".part-{state.step}-{uuid.uuid4().hex[:8]}"
        try:
            part.mkdir(parents=True)
            snapshot.loaded.model.save_pretrained(part, state_dict=snapshot.weights)
            snapshot.loaded.tokenizer.save_pretrained(part)
            save_file(snapshot.optimizer, part / OPTIMIZER_FILE, snapshot.metadata(OPTIMIZER_FILE))
            for name, tensors in snapshot.others.items():
                save_file(dict(tensors), part / name, snapshot.metadata(name))
            (part / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            _sync_tree(part)
            _replace(part, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointNotSavedError(target, str(error)) from error
        return target

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints in the order of saving; logs and leaves out incomplete ones."""
        found: list[Checkpoint] = []
        for path in self.root.glob("step_*"):
            try:
                found.append(read_checkpoint(path))
            except ConfigError as error:
                log.warning("checkpoint ignored", path=str(path), reason=str(error))
        return sorted(found, key=lambda checkpoint: checkpoint.state.saved_unix_s)

    def newest_of(self, lineages: Container[str]) -> Checkpoint | None:
        """The last saved checkpoint that one of these lineages wrote."""
        ours = [checkpoint for checkpoint in self.all() if checkpoint.state.lineage in lineages]
        return ours[-1] if ours else None

    def newest(self) -> Checkpoint | None:
        """The last saved checkpoint."""
        found = self.all()
        return found[-1] if found else None

    def prune(self, keep: int, lineages: Container[str]) -> None:
        """Remove all but the `keep` newest checkpoints of these lineages; 0 keeps all."""
        ours = [checkpoint for checkpoint in self.all() if checkpoint.state.lineage in lineages]
        for checkpoint in ours[:-keep] if keep else ():
            doomed = checkpoint.path.with_name(f".old-{uuid.uuid4().hex[:8]}")
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the unfinished folders of a killed predecessor."""
        for old in self.root.glob(f"{_REPLACED}*"):
            target = self.root / old.name.removeprefix(_REPLACED)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for path in (*self.root.glob(".part-*"), *self.root.glob(".old-*")):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class BoundStore:
    """Checkpoints of one model; `take` copies it and its optimizer."""

    folder: CheckpointFolder
    take: Callable[[], Snapshot]

    def write(self, copy: Snapshot, state: RunState) -> Path:
        """Write a copy durably; `CheckpointNotSavedError` when the disk is full."""
        return self.folder.save(copy, state)

    def prune(self, keep: int, lineages: Container[str]) -> None:
        """Remove all but the newest of these lineages."""
        self.folder.prune(keep, lineages)


def named_checkpoint(path: str) -> Checkpoint:
    """Read the checkpoint that the user names."""
    return read_checkpoint(Path(path).expanduser().absolute())


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`; `ConfigError` if there is none."""
    try:
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"resume_from_checkpoint: {path} is no checkpoint ({error}): "
            "give a folder checkpoints/step_<N>"
        ) from error
    if state.schema != SCHEMA:
        raise ConfigError(
            f"resume_from_checkpoint: {path} has schema {state.schema}, this learner reads {SCHEMA}: "
            "use the version of Tailrace that wrote it"
        )
    return Checkpoint(path, state)


def _replace(part: Path, target: Path) -> None:
    """Rename `part` to `target`; remove the folder of that name afterwards."""
    old = target.with_name(_REPLACED + target.name)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    part.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
