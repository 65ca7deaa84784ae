"""NATS as messages: calls, publishes, durable publishes, pulls, the registry of servers."""

from tailrace.bus.bus import Bus
from tailrace.bus.connection import flush
from tailrace.bus.errors import (
    BusClosedError,
    BusError,
    CallFailedError,
    CallTimeoutError,
    NoResponderError,
    OversizedMessageError,
    PublishRefusedError,
    StreamMissingError,
)
from tailrace.bus.streams import StreamLimits

__all__ = [
    "Bus",
    "BusClosedError",
    "BusError",
    "CallFailedError",
    "CallTimeoutError",
    "NoResponderError",
    "OversizedMessageError",
    "PublishRefusedError",
    "StreamLimits",
    "StreamMissingError",
    "flush",
]
