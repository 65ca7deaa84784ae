"""Token generation between agents and inference servers."""

from __future__ import annotations

from typing import Literal

from tailrace.channel.call import GenerateCall
from tailrace.channel.config import ChannelConfig
from tailrace.channel.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelFullError,
    DuplicateCallError,
    GenerateRefusedError,
    NoRouteError,
    OversizeRequestError,
)
from tailrace.channel.generation import Generation
from tailrace.channel.nats_transport import NatsGenerateClient, NatsGenerateServer
from tailrace.channel.ports import (
    Address,
    ChunkSink,
    GenerateClient,
    GenerateHandler,
    GenerateServer,
)
from tailrace.channel.zmq_transport import (
    CurveKeys,
    EndpointError,
    ZmqGenerateClient,
    ZmqGenerateServer,
)

Transport = Literal["nats", "zmq"]

TRANSPORTS: tuple[Transport, ...] = ("nats", "zmq")
DEFAULT_TRANSPORT: Transport = "zmq"

__all__ = [
    "DEFAULT_TRANSPORT",
    "TRANSPORTS",
    "Address",
    "ChannelClosedError",
    "ChannelConfig",
    "ChannelError",
    "ChannelFullError",
    "ChunkSink",
    "CurveKeys",
    "DuplicateCallError",
    "EndpointError",
    "GenerateCall",
    "GenerateClient",
    "GenerateHandler",
    "GenerateRefusedError",
    "GenerateServer",
    "Generation",
    "NatsGenerateClient",
    "NatsGenerateServer",
    "NoRouteError",
    "OversizeRequestError",
    "Transport",
    "ZmqGenerateClient",
    "ZmqGenerateServer",
]
