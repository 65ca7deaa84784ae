"""Actor runtime: a service declares its handlers, and the runtime runs them.

It provides bounded mailboxes, NATS micro registration, JetStream pulls with heartbeats, readiness,
trace context, metrics, a drain on SIGTERM, and one place (`guard`) that turns an unexpected exception
into a logged, counted and typed failure.
"""

from tailrace.runtime.guard import Failure, HandBack, LeftToAnother, StopService
from tailrace.runtime.process import Args, run_service, run_with_args, serve
from tailrace.runtime.service import Service
from tailrace.runtime.settlement import Delivery

__all__ = [
    "Args",
    "Delivery",
    "Failure",
    "HandBack",
    "LeftToAnother",
    "Service",
    "StopService",
    "run_service",
    "run_with_args",
    "serve",
]
