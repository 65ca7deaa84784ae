"""The process that forks a confined child per call and keeps it within its limits.

Invariants: one call at a time; it never reads what goes into or comes out of a call (those bytes travel
by descriptors that it only passes on), so that the memory which every call inherits tells nothing of
another; before a call ends for the service, all its processes are dead and waited for; before the next
begins, its folder is gone. It ends with the service that started it, and everything with it.
"""

import array
import contextlib
import marshal
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import child, workspace
from tailrace_sandbox.engine.call import ForkedCall
from tailrace_sandbox.engine.confine import Plan
from tailrace_sandbox.engine.forks import ForkGate
from tailrace_sandbox.engine.group import CallGroup
from tailrace_sandbox.engine.inspection import Inspection
from tailrace_sandbox.engine.machine import Gauges

_MAX_MESSAGE_BYTES = 65536
_FOLDER_NAMES = ("HOME", "TMPDIR", "PWD")
_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * array.array("i").itemsize)  # 8 descriptors


class Zygote:
    """Obeys one service over `control`."""

    def __init__(self, control: socket.socket, plan: Plan, base: str, fork: Callable[[], int]) -> None:
        self._control = control
        self._fork_process = fork
        self._plan = plan
        self._base = base
        self._tells_room = workspace.tells_room(base)
        self._gauges = Gauges()
        self._call: ForkedCall | None = None
        self._folder = ""
        self._max_processes = 0  # of the call
        self._closes_after = False
        self._gate: ForkGate | None = None
        self._group: CallGroup | None = None
        self._gates, self._child_gates = socket.socketpair()
        self._gates.setblocking(False)
        self._wake_fd = _wake_on_children()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._poll.register(self._gates, select.POLLIN)

    def serve(self, group: CallGroup | None) -> None:
        """Until the service closes its end. `group`: the one that this process is in."""
        if group is not None:
            self._group = group
            self._poll.register(group.events, select.POLLPRI)
        while True:
            self._wait()
            self._let_fork()
            call, reason = self._call, self._shortage()
            if call is not None and (call.has_ended() or (reason := reason or call.breach())):
                self._end(reason)
            if self._control.fileno() in self._ready and not self._obey():
                break
        self._close()

    def _wait(self) -> None:
        times_s = [one.next_event_s() for one in (self._call, self._gate) if one is not None]
        timeout_s = min((time_s for time_s in times_s if time_s >= 0), default=None)
        self._ready = dict(self._poll.poll(None if timeout_s is None else timeout_s * 1000))
        if self._wake_fd in self._ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_fd, 4096)

    def _shortage(self) -> str:
        """Name of the limit for which the kernel ended something of this call; empty: of none."""
        return "memory" if self._group is not None and self._group.ran_out() else ""

    def _let_fork(self) -> None:
        """Answer the call's requests to fork; its gate comes from its first process, once."""
        if self._gates.fileno() in self._ready:
            self._gate = self._new_gate()
            self._poll.register(self._gate.listener, select.POLLIN)
        if self._gate is None:
            return
        event = self._ready.get(self._gate.listener, 0)
        if event & select.POLLIN:
            self._gate.receive()
        elif event:  # no process is left that could ask
            self._poll.unregister(self._gate.listener)
        self._gate.decide()

    def _new_gate(self) -> ForkGate:
        _, (listener,), _, _ = socket.recv_fds(self._gates, 1, 1)
        return ForkGate(listener, self._max_processes)

    def _obey(self) -> bool:
        """Do what one message says; False when the service is gone."""
        data, ancillary, _, _ = self._control.recvmsg(_MAX_MESSAGE_BYTES, _ANCILLARY_BYTES)
        if not data:
            return False
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        message = marshal.loads(data)
        try:
            getattr(self, f"_on_{message['op']}")(message, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _on_start(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        if not self._folder:
            self._make_folder()
        limits = Limits(*message["limits"])
        mode = message["mode"]
        self._max_processes = limits.max_processes
        if self._group is not None:
            self._group.begin()
        pid = self._fork(child.Order(mode, self._folder, limits, fds))
        is_session = mode == "session"
        deadline_s = None if is_session else time.monotonic() + limits.wall_s
        inspection = Inspection(
            self._folder,
            limits,
            self._gauges,
            self._group,
            tells_room=self._tells_room,
            limits_processes=self._plan.limits_processes,
        )
        self._call = ForkedCall(pid, inspection, is_session, deadline_s)
        self._closes_after = message["closes_after"]
        self._tell(f"started {pid} {self._folder}")

    def _make_folder(self) -> None:
        self._folder = workspace.create(self._base)
        # Set here, since a child would copy every page that it touches for this.
        for name in _FOLDER_NAMES:
            os.environ[name] = self._folder

    def _fork(self, order: child.Order) -> int:
        pid = self._fork_process()
        if pid:
            return pid
        try:
            child.main(self._plan, order, self._child_gates)
        finally:
            os._exit(child.NOT_CONFINED)

    def _on_resume(self, message: dict[str, Any], _: Sequence[int]) -> None:
        if self._call is not None:
            self._call.resume(message["wall_s"])

    def _on_pause(self, _: dict[str, Any], __: Sequence[int]) -> None:
        if self._call is not None and not self._call.has_ended():
            self._call.pause()

    def _on_kill(self, message: dict[str, Any], _: Sequence[int]) -> None:
        if self._call is not None:
            self._end(message["reason"])

    def _end(self, reason: str) -> None:
        assert self._call is not None
        exit_code = self._end_processes(self._call)
        self._tell(f"ended {exit_code} {self._shortage() or reason}")
        if self._closes_after:
            self._close()

    def _end_processes(self, call: ForkedCall) -> int:
        exit_code = call.end()
        self._call = None
        if self._gate is not None:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._gate.listener)
            self._gate.close()
            self._gate = None
        else:
            self._drop_gate()
        return exit_code

    def _drop_gate(self) -> None:
        """Close a gate that nobody has taken, of a call that is over."""
        with contextlib.suppress(BlockingIOError):
            self._new_gate().close()

    def _close(self) -> None:
        """Leave nothing of the call."""
        if self._call is not None:
            self._end_processes(self._call)
        if self._folder:
            workspace.remove(self._folder)
            self._folder = ""

    def _tell(self, report: str) -> None:
        with contextlib.suppress(ConnectionError):  # the service is gone: the next message says so
            self._control.send(report.encode())

    def try_out(self) -> None:
        """Confine a child once, for nothing; raises `OSError` if that fails."""
        folder = workspace.create(self._base)
        fds = [os.memfd_create("trial"), *(os.open(os.devnull, os.O_RDWR) for _ in range(3))]
        os.write(fds[0], marshal.dumps({"patterns": [], "max_bytes": 0}))
        self._fork(child.Order("collect", folder, Limits(), fds))
        _, status = os.wait()
        self._drop_gate()
        for fd in fds:
            os.close(fd)
        workspace.remove(folder)
        if status:
            raise OSError(f"a confined process ended with status {os.waitstatus_to_exitcode(status)}")


def _wake_on_children() -> int:
    """A descriptor that becomes readable when a child ends."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_fd
