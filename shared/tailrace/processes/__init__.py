"""Processes that run what users bring: they can be killed with all that they started, and replaced."""

from __future__ import annotations

from tailrace.processes.child import ParentLink
from tailrace.processes.pool import ProcessPool
from tailrace.processes.worker import ProcessStartError, WorkerProcess

__all__ = ["ParentLink", "ProcessPool", "ProcessStartError", "WorkerProcess"]
