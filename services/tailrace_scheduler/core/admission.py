"""Number of training groups to admit now, and the bound that withholds admission.

Credit: `accepted + running <= (max_staleness + optimizer_step + 1) * groups_per_step`, where accepted
groups are those trained by the surviving lineage (`optimizer_step * groups_per_step`) and those that
wait for the learner. It never exceeds what the run's last step needs. The buffer's bounds count running
groups too, since each of them will wait for the learner.
"""

import sys
from typing import NamedTuple, Protocol

CREDIT = "credit"
BUFFER = "buffer"
SERVERS = "servers"
WEIGHTS = "weights"
EVALUATION = "evaluation"


class BufferState(NamedTuple):
    """Training groups between admission and the optimizer step that uses them."""

    optimizer_step: int
    num_running: int
    num_ready: int  # sent to the learner, not trained by a finished step of this lineage
    ready_bytes: int
    mean_group_bytes: float  # of the groups sent so far; 0 before the first
    last_step: int = sys.maxsize  # that may be trained for now: a pinned evaluation follows it


class ServerView(NamedTuple):
    """State of the inference servers that admission reads."""

    num_healthy: int
    min_policy_version: int  # over healthy servers; -1 without any
    newest_policy_version: int  # of the surviving lineage; -1 before the first


class Admission(NamedTuple):
    """`num_groups` may start now; if that is 0, `blocked_by` names the first bound that was reached."""

    num_groups: int
    blocked_by: str


class CreditBounds(Protocol):
    """Numbers of a run that bound admission by staleness."""

    @property
    def max_staleness(self) -> int:
        """Optimizer steps that a trained token may be old."""

    @property
    def groups_per_step(self) -> int:
        """Groups of an optimizer step."""

    @property
    def max_steps(self) -> int:
        """Last optimizer step."""


class BufferBounds(Protocol):
    """Numbers of a run that bound admission by the trajectory buffer."""

    @property
    def max_buffered_groups(self) -> int:
        """Groups that may run or wait; 0: no bound."""

    @property
    def max_buffered_bytes(self) -> int:
        """Bytes that may wait."""


class AdmissionRule:
    """The bounds of one run."""

    def __init__(self, run: CreditBounds, config: BufferBounds) -> None:
        self._run = run
        self._config = config

    def admit(self, buffer: BufferState, servers: ServerView) -> Admission:
        """Return the groups that may start in this situation."""
        if servers.num_healthy == 0:
            return Admission(0, SERVERS)
        if self._run.max_staleness == 0 and not is_current(servers):
            return Admission(0, WEIGHTS)
        credit = self._credit(buffer)
        if credit <= 0:
            return Admission(0, EVALUATION if buffer.last_step <= buffer.optimizer_step else CREDIT)
        room = self._room(buffer)
        if room <= 0:
            return Admission(0, BUFFER)
        return Admission(min(credit, room), "")

    def _credit(self, buffer: BufferState) -> int:
        step, per_step = buffer.optimizer_step, self._run.groups_per_step
        last_step = min(self._run.max_staleness + step + 1, buffer.last_step, self._run.max_steps)
        accepted = step * per_step + buffer.num_ready
        return last_step * per_step - accepted - buffer.num_running

    def _room(self, buffer: BufferState) -> int:
        held = buffer.num_ready + buffer.num_running
        by_groups = (self._config.max_buffered_groups or sys.maxsize) - held
        expected = buffer.ready_bytes + buffer.num_running * buffer.mean_group_bytes
        free_bytes = self._config.max_buffered_bytes - expected
        by_bytes = int(free_bytes // max(buffer.mean_group_bytes, 1.0))
        needed = self._run.groups_per_step - held  # fewer would leave the learner waiting for ever
        return min(by_groups, max(by_bytes, needed))


def is_current(servers: ServerView) -> bool:
    """Tell whether at least one server is healthy and all healthy ones serve the newest version."""
    newest = servers.newest_policy_version
    return servers.num_healthy > 0 and newest >= 0 and servers.min_policy_version >= newest
