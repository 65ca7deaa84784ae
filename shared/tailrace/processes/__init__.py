"""Child processes that run user code; a process can be killed with its children, and replaced."""

from tailrace.processes.child import ParentLink
from tailrace.processes.pool import ProcessPool, ProcessStartError, WorkerProcess

__all__ = ["ParentLink", "ProcessPool", "ProcessStartError", "WorkerProcess"]
