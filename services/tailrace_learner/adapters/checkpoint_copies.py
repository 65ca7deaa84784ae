"""Copies of checkpoints on an object store: `<checkpoint_url>/<exp_name>/step_<N>/`.

`run_state.json` is sent last and deleted first, so that a folder with it is complete. Weights of a
run's start that no other model has are beside them, in `start_<digest>/`: a reference needs them in
every later run. Their `config.json` is sent last.
"""

from collections.abc import Container
from pathlib import Path

import msgspec

from tailrace.log import get_logger
from tailrace.object_store import StoredFolder
from tailrace_learner.core.step.run_state import SCHEMA, RunState
from tailrace_protos.base import UNREADABLE

log = get_logger(__name__)

STATE_FILE = "run_state.json"
_START_FILE = "config.json"  # last of a start
_KEY = "learner.checkpoint_url"


class CheckpointCopies:
    """Copies of one run's checkpoints; failures of the store are `OSError`."""

    def __init__(self, url: str, run: str) -> None:
        self._url = f"{url.rstrip('/')}/{run}"

    def _folder(self, name: str) -> StoredFolder:
        return StoredFolder(f"{self._url}/{name}", _KEY)

    def add(self, path: Path) -> None:
        """Send a checkpoint's folder."""
        self._folder(path.name).upload(path, last=STATE_FILE)

    def add_start(self, path: Path, digest: str) -> None:
        """Send the folder with the weights of the run's start, unless the store has it."""
        folder = _start_at(self._url, digest)
        if _START_FILE not in folder.names():
            folder.upload(path, last=_START_FILE)

    def fetch_start(self, digest: str, target: Path) -> None:
        """Fetch the weights of a start into `target`; without a copy nothing happens."""
        fetch_start(self._url, digest, target)

    def remove(self, name: str) -> None:
        """Delete a copy; it stays, with a warning, if the store refuses."""
        try:
            folder = self._folder(name)
            names = folder.names()
            folder.delete(sorted(names, key=lambda each: each != STATE_FILE))
        except OSError as error:
            log.warning("old copy of a checkpoint stays", error=str(error))

    def fetch(self, root: Path, lineages: Container[str] | None, after_unix_s: float) -> None:
        """Fetch the newest copy of these lineages (None: any) into `root`, if saved after a time."""
        states = {name: state for name, state in self._states().items() if state.schema == SCHEMA}
        wanted = {
            name: state.saved_unix_s
            for name, state in states.items()
            if (lineages is None or state.lineage in lineages) and state.saved_unix_s > after_unix_s
        }
        if not wanted:
            return
        newest = max(wanted, key=wanted.__getitem__)
        root.mkdir(parents=True, exist_ok=True)
        self._folder(newest).download(root / newest)
        log.info("checkpoint fetched", url=f"{self._url}/{newest}", path=str(root / newest))

    def _states(self) -> dict[str, RunState]:
        """States of all complete copies, by the folder's name."""
        everything = StoredFolder(self._url, _KEY)
        found = {}
        for name in everything.names():
            folder, _, file = name.rpartition("/")
            if file != STATE_FILE or not folder.startswith("step_"):
                continue
            try:
                found[folder] = msgspec.json.decode(everything.read(name), type=RunState)
            except UNREADABLE as error:
                log.warning("copy of a checkpoint ignored", url=f"{self._url}/{name}", error=str(error))
        return found


def fetch_start(url: str, digest: str, target: Path) -> None:
    """Fetch a start's weights from a run's copies at `url` into `target`, if they are there."""
    folder = _start_at(url, digest)
    if _START_FILE in folder.names():
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.download(target)
        log.info("weights of the start fetched", url=folder.url, path=str(target))


def _start_at(url: str, digest: str) -> StoredFolder:
    return StoredFolder(f"{url}/start_{digest}", _KEY)
