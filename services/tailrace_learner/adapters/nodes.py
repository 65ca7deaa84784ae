"""Nodes of a learner, each with one agent, and the watch that the agents keep over each other.

Gloo tells a rank that another one is gone at the next collective, which may be hours away. So the
agents tell each other every `_BEAT_S` that they live, through the store of the first one, at which they
have met. An agent ends, and its ranks with it, when another one is silent for `_SILENT_S`, when a new
agent takes the place of a dead one, or when the store is gone. Ranks that are ending by themselves have
`_GRACE_S` for it: their exit codes count.

A signal to one agent, as its node is drained, is a stop of all: the agent marks it in the store, where
rank 0 waits for the mark. Rank 0 saves a checkpoint with all ranks and ends them. The other agents end
as if a node was lost, so that their supervisors start them again.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, says its documentation

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace_learner.config_execution import StrategyArgs

log = get_logger(__name__)

MEETING_S = 900  # for all nodes to get their pods
_BEAT_S = 1.0
_SILENT_S = 15.0
_GRACE_S = 5.0
_NO_LIMIT = timedelta(days=365)
_STOP = "stop"  # key of the store: a node that was told to end
_EXIT_FAILED = 1


@dataclass(frozen=True)
class Nodes:
    """Hosts of the learner's ranks; this one has number `rank` and reaches the first at `master`."""

    num: int = 1
    rank: int = 0
    master: str = "127.0.0.1:0"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Nodes":
        """Reads `TAILRACE_NUM_NODES`, `TAILRACE_NODE_RANK` and `TAILRACE_MASTER` (host:port).

        A node's rank may be the name of its pod, which ends with it.
        """
        num = env.get("TAILRACE_NUM_NODES", "1")
        rank = env.get("TAILRACE_NODE_RANK", "0").rpartition("-")[2]
        if not num.isdigit() or not rank.isdigit() or int(rank) >= int(num):
            raise ConfigError(
                f"TAILRACE_NODE_RANK ({rank!r}) must be a number below TAILRACE_NUM_NODES ({num!r})"
            )
        if int(num) == 1:
            return cls()
        if not env.get("TAILRACE_MASTER", "").rpartition(":")[2].isdigit():
            raise ConfigError("TAILRACE_MASTER must be host:port of the first of TAILRACE_NUM_NODES")
        return cls(int(num), int(rank), env["TAILRACE_MASTER"])

    def ranks_of(self, args: StrategyArgs) -> int:
        """Ranks of each node; `ConfigError` if they cannot be equal."""
        if args.num_ranks % self.num:
            raise ConfigError(
                f"learner.strategy_args.num_ranks is {args.num_ranks}: {self.num} nodes cannot have "
                "equal parts of it; make it a multiple"
            )
        return args.num_ranks // self.num


def end_when_told() -> threading.Event:
    """End this process at a signal as long as it waits for the other nodes; a later one sets the event.

    Torch waits outside of Python, where no handler runs. Its own handlers replace ours when the ranks
    start.
    """

    def end(*_: object) -> NoReturn:
        os._exit(0)

    def wait() -> None:
        while os.read(reader, 1):
            if signal.getsignal(signal.SIGTERM) is end:
                end()
            told.set()

    told = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=wait, name="signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return told


def when_a_node_stops(nodes: Nodes, tell: Callable[[str], None]) -> None:
    """Call `tell` with the reason, in a thread, when the agent of any node is told to end."""

    def wait() -> None:
        with suppress(RuntimeError):  # the store is gone: the agent ends this process
            store = _store_of(nodes)
            store.wait([_STOP], _NO_LIMIT)
            tell(f"node {store.get(_STOP).decode()} of the learner is told to end")

    threading.Thread(target=wait, name="stop of a node", daemon=True).start()


class NodeWatch:
    """Watch over the other nodes, until `end`; `told`: this one is told to end."""

    def __init__(self, nodes: Nodes, told: threading.Event) -> None:
        self._nodes, self._told = nodes, told
        self._ended = threading.Event()
        self._beats: _Beats | None = None
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch: a thread inside torch would abort a process that ends, and its exit code."""
        self._ended.set()
        self._thread.join(_SILENT_S)

    def leave(self) -> None:
        """Tell the other nodes that the ranks of this one have ended."""
        if self._beats is not None:
            with suppress(RuntimeError):  # the store went first
                self._beats.leave()

    def _watch(self) -> None:
        try:
            self._beats = beats = _Beats(self._nodes)
            while not self._told.wait(_BEAT_S) and not self._ended.is_set():
                beats.exchange()
                beats.check_nobody_left()
            if self._told.is_set():
                beats.tell_stop()
            while not self._ended.wait(_BEAT_S):
                beats.exchange()
        except (_NodeLostError, RuntimeError) as error:  # torch's errors of a store are RuntimeErrors
            if self._ended.wait(_GRACE_S):
                return
            log.error("node lost", node=self._nodes.rank, reason=str(error).partition("\n")[0])
            os._exit(_EXIT_FAILED)


class _NodeLostError(Exception):
    """Another node is gone."""


def _store_of(nodes: Nodes) -> TCPStore:
    host, _, port = nodes.master.rpartition(":")
    limit = timedelta(seconds=MEETING_S)
    return TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)


class _Beats:
    """Beats of all nodes in the store: `<agent> <count>`."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._agent, self._count = nodes, uuid.uuid4().hex, 0
        self._others = sorted(set(range(nodes.num)) - {nodes.rank})
        self._seen: dict[int, tuple[str, float]] = {}  # node -> beat, when it was new
        self._store = _store_of(nodes)
        self._store.set_timeout(timedelta(seconds=_SILENT_S))

    def exchange(self) -> None:
        """Tell that this node lives, and look at the others; `_NodeLostError` if one is gone."""
        self._count += 1
        self._store.set(f"beat/{self._nodes.rank}", f"{self._agent} {self._count}")
        for other in self._others:
            if self._store.check([f"beat/{other}"]):  # otherwise it has not come yet
                self._look_at(other, self._store.get(f"beat/{other}").decode())

    def tell_stop(self) -> None:
        """Tell that this node must end."""
        self._store.set(_STOP, str(self._nodes.rank))

    def leave(self) -> None:
        """Tell that this node has ended as it was told."""
        self._store.set(f"left/{self._nodes.rank}", "")

    def check_nobody_left(self) -> None:
        """Raise `_NodeLostError` if another node has ended as it was told."""
        for other in self._others:
            if self._store.check([f"left/{other}"]):
                raise _NodeLostError(f"node {other} was told to end")

    def _look_at(self, other: int, beat: str) -> None:
        now_s = time.monotonic()
        before, at_s = self._seen.get(other, (beat, now_s))
        if beat.split()[0] != before.split()[0]:
            raise _NodeLostError(f"node {other} has started again")
        if beat == before and now_s > at_s + _SILENT_S:
            raise _NodeLostError(f"node {other} is silent for {_SILENT_S:g} s")
        if beat != before or other not in self._seen:
            self._seen[other] = beat, now_s
