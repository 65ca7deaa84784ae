"""The actor runtime: a service declares what it handles, the runtime does the rest.

Bounded mailboxes, NATS micro registration, JetStream pulls with heartbeats, readiness, trace
context, metrics, a drain on SIGTERM, and one place (`guard`) where an unexpected exception becomes
a logged, counted, typed failure.
"""

from __future__ import annotations

from tailrace.runtime.guard import Failure
from tailrace.runtime.process import Args, run_service, run_with_args, serve
from tailrace.runtime.service import Service
from tailrace.runtime.settlement import Delivery
from tailrace.runtime.signals import HandBack, StopService

__all__ = [
    "Args",
    "Delivery",
    "Failure",
    "HandBack",
    "Service",
    "StopService",
    "run_service",
    "run_with_args",
    "serve",
]
