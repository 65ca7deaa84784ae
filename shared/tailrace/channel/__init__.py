"""Token generation between agents and inference servers."""

from __future__ import annotations

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

__all__ = [
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
    "ZmqGenerateClient",
    "ZmqGenerateServer",
]
