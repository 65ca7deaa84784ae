"""Checkpoint folders: written under another name, made durable, then renamed; never incomplete.

`step_<N>/` loads with `AutoModelForCausalLM` and `AutoTokenizer`. It also holds `optimizer.safetensors`
(moments by parameter name, and the state of the random generator), the critic's files if there is one,
and `run_state.json`, written last. Folders whose names begin with a dot are unfinished or replaced;
they are ignored and removed. A replaced folder gets its name back if its successor was never renamed.
"""

import math
import os
import shutil
import uuid
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config import ConfigError, RunConfig
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.object_store import is_url
from tailrace_learner.adapters.checkpoint_copies import STATE_FILE, CheckpointCopies, fetch_start
from tailrace_learner.adapters.hf_model import TrainableModel, build_tokenizer, scratch_architecture
from tailrace_learner.adapters.model_source import fetched_folder
from tailrace_learner.adapters.snapshots import OPTIMIZER_FILE, Snapshot
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.step.run_state import SCHEMA, RunState
from tailrace_protos.base import UNREADABLE

log = get_logger(__name__)

START_FOLDER = "start"  # of a run directory: weights that the run began with, if no model has them
_REPLACED = ".replaced-"  # prefix of a folder that is being replaced


class CheckpointNotSavedError(OSError):
    """The disk refused a checkpoint; older ones are untouched. Attributes: `path`, `reason`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {path} was not saved: {reason}. Remedy: free space on its disk (or give "
            "output_dir another one), or mend the object store; saving is tried again"
        )
        self.path = path
        self.reason = reason


class IncompatibleCheckpointError(ConfigError):
    """A checkpoint holds another model than the experiment's. Attributes: `path`, `difference`."""

    def __init__(self, path: str, difference: str) -> None:
        super().__init__(
            f"resume_from_checkpoint: {path} holds another model than this experiment's: {difference}. "
            "Give the experiment that wrote it, or begin a new run with pretrain: that folder"
        )
        self.path = path
        self.difference = difference


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk."""

    path: Path
    state: RunState


class CheckpointFolder:
    """`<run_dir>/checkpoints/`, and its copy on an object store if there is one."""

    def __init__(self, run_dir: Path, copies: CheckpointCopies | None = None) -> None:
        self.root = run_dir / "checkpoints"
        self._start = run_dir / START_FOLDER
        self._copies = copies

    def write(self, snapshot: Snapshot, state: RunState) -> Path:
        """Write `step_<N>` durably, and its copy; `CheckpointNotSavedError` if disk or store refuse."""
        target = self.root / f"step_{state.step}"
        part = self.root / f".part-{state.step}-{uuid.uuid4().hex[:8]}"
        try:
            part.mkdir(parents=True)
            snapshot.loaded.model.save_pretrained(part, state_dict=snapshot.weights)
            with foreign_code("the tokenizer"):  # a full disk is no `OSError` for it
                snapshot.loaded.tokenizer.save_pretrained(part)
            save_file(snapshot.optimizer, part / OPTIMIZER_FILE, snapshot.metadata(OPTIMIZER_FILE))
            for name, tensors in snapshot.others.items():
                save_file(dict(tensors), part / name, snapshot.metadata(name))
            (part / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            _sync_tree(part)
            _replace(part, target)
        except (OSError, SafetensorError, ForeignCodeError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointNotSavedError(target, str(error)) from error
        if self._copies is not None:
            try:
                self._copy_start(self._copies, state)
                self._copies.add(target)
            except OSError as error:
                raise CheckpointNotSavedError(target, f"its copy failed: {error}") from error
        return target

    def restore(self, lineages: Container[str] | None) -> None:
        """Fetch the newest copy of these lineages (None: any) if it is newer than the folder's own."""
        own = self.newest(lineages)
        saved_unix_s = own.state.saved_unix_s if own is not None else -math.inf
        if self._copies is not None:
            self._copies.fetch(self.root, lineages, saved_unix_s)

    def restore_start(self, state: RunState, named: str = "") -> None:
        """Fetch the weights that a checkpoint's reference began with, if no disk has them any more.

        `named`: URL of the checkpoint; empty for one of this folder.
        """
        known = state.reference
        if known is None or not Path(known.source).is_absolute():
            return
        if Path(known.source).is_dir() or self._start.is_dir():
            return
        if named:
            fetch_start(named.rstrip("/").rpartition("/")[0], known.digest, self._start)
        elif self._copies is not None:
            self._copies.fetch_start(known.digest, self._start)

    def _copy_start(self, copies: CheckpointCopies, state: RunState) -> None:
        known = state.reference
        if known is not None and known.source == str(self._start.absolute()):
            copies.add_start(self._start, known.digest)

    def all(self, lineages: Container[str] | None = None) -> list[Checkpoint]:
        """Complete checkpoints of these lineages (None: all) in the order of saving.

        Logs and leaves out incomplete ones.
        """
        found: list[Checkpoint] = []
        for path in self.root.glob("step_*"):
            try:
                found.append(read_checkpoint(path))
            except ConfigError as error:
                log.warning("checkpoint ignored", path=str(path), reason=str(error))
        found = [each for each in found if lineages is None or each.state.lineage in lineages]
        return sorted(found, key=lambda checkpoint: checkpoint.state.saved_unix_s)

    def newest(self, lineages: Container[str] | None = None) -> Checkpoint | None:
        """The last saved checkpoint that one of these lineages (None: any) wrote."""
        return next(reversed(self.all(lineages)), None)

    def prune(self, keep: int, lineages: Container[str]) -> None:
        """Remove all but the `keep` newest checkpoints of these lineages; 0 keeps all.

        One stays, with a warning, if the disk refuses.
        """
        for checkpoint in self.all(lineages)[:-keep] if keep else ():
            doomed = checkpoint.path.with_name(f".old-{uuid.uuid4().hex[:8]}")
            try:
                checkpoint.path.rename(doomed)
            except OSError as error:
                log.warning("old checkpoint stays", path=str(checkpoint.path), error=str(error))
                continue
            shutil.rmtree(doomed, ignore_errors=True)
            if self._copies is not None:
                self._copies.remove(checkpoint.path.name)

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


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`; `ConfigError` if there is none."""
    path = Path(os.path.expanduser(path)).absolute()
    try:
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=RunState)
    except (OSError, *UNREADABLE) as error:
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


def check_compatible(path: str, loaded: TrainableModel, run: RunConfig, config: LearnerConfig) -> None:
    """Raise `IncompatibleCheckpointError` if type, vocabulary or the shape of a weight differ.

    The check is left out if the configuration of `pretrain` cannot be loaded any more.
    """
    expected = _architecture(run, config)
    if expected is None:
        return
    found = loaded.model.config
    if found.model_type != expected.model_type:
        raise IncompatibleCheckpointError(path, f"{found.model_type}, here {expected.model_type}")
    with torch.device("meta"):
        wanted = _shapes(AutoModelForCausalLM.from_config(expected))  # type: ignore[no-untyped-call]
    shapes = _shapes(loaded.model)
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise IncompatibleCheckpointError(
                path, f"{name} is {shapes.get(name)}, here {wanted.get(name)}"
            )
    _check_tokens(path, loaded, config)


def _check_tokens(path: str, loaded: TrainableModel, config: LearnerConfig) -> None:
    """Compare the vocabularies, if the experiment makes its tokenizer itself."""
    if config.from_scratch is None:
        return
    tokens = build_tokenizer(config.from_scratch).get_vocab()
    if tokens != loaded.tokenizer.get_vocab():
        raise IncompatibleCheckpointError(path, "its tokenizer has other tokens")


def _architecture(run: RunConfig, config: LearnerConfig) -> Any:
    """Returns the configuration of a new run of this experiment; None if it cannot be loaded."""
    if config.from_scratch is not None:
        scratch = config.from_scratch
        return scratch_architecture(scratch, build_tokenizer(scratch))
    try:
        source = (
            fetched_folder(run.pretrain, "pretrain") if is_url(run.pretrain) else Path(run.pretrain)
        )
        with foreign_code("transformers"):
            return AutoConfig.from_pretrained(os.path.expanduser(source), trust_remote_code=False)
    except (ConfigError, ForeignCodeError) as error:
        log.warning("checkpoint not compared with pretrain", pretrain=run.pretrain, error=str(error))
        return None


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


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
