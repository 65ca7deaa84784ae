"""Token generation between agents and inference servers: `GenerateClient` and `GenerateServer`.

A call sends token ids and receives chunks of token ids, log-probabilities and policy versions. All
messages to one peer in one loop tick share one frame (an engine's 16 chunks of one tick are one chunk):
dozens of calls share its cost, and a single call does not wait. A client and a server communicate over
a *link* of numbered frames (`client`, `server_link`). A missing frame, or a silent or dead peer, ends
the link, and its calls raise `ChannelError` with the tokens received so far: tokens have no gaps, and
no call hangs. Windows, queues and frames are bounded (`config`); a full one makes callers wait or
raises a typed error.

Two transports carry the frames; one contract suite tests both. Medians of 5 rounds of
`benchmarks.bench_transport` on two shared, busy cores of an AMD EPYC (2,000 ids in, 500 ids and
log-probabilities out, an engine that computes nothing, both ends inside the runtime):

| | calls/s at 1 | at 64 | at 512 callers | p99 at 64 | CPU per call at 64 |
|---|---|---|---|---|---|
| `zmq` (ipc) | 4,900 | 32,500 | 19,800 | 3.7 ms | 30 µs |
| `nats` | 3,700 | 13,700 | 12,300 | 13 ms | 68 µs, with nats-server |
| a Ray actor | 540 | 800 | 900 | 137 ms | 1,200 µs |

`DEFAULT_TRANSPORT` is `zmq` because it has no broker in between. `nats` needs no open port on the
server, and has the broker's authentication and reconnection. Both exceed the goals against Ray (6 times
its calls, a third of its p99).
"""

from typing import Literal

from nats.aio.client import Client as NatsConnection

from tailrace.channel.call import GenerateCall
from tailrace.channel.config import ClientChannelConfig, ServerChannelConfig
from tailrace.channel.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelFullError,
    DuplicateCallError,
    EndpointError,
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
)
from tailrace.channel.server import GenerateServer
from tailrace.channel.zmq_transport import CurveKeys, ZmqGenerateClient, ZmqGenerateServer

Transport = Literal["nats", "zmq"]

TRANSPORTS: tuple[Transport, ...] = ("nats", "zmq")
DEFAULT_TRANSPORT: Transport = "zmq"


def make_client(
    transport: Transport, config: ClientChannelConfig, connection: NatsConnection
) -> GenerateClient:
    """Client of a transport, not started; `connection` carries the frames of `nats` alone."""
    if transport == "zmq":
        return ZmqGenerateClient(config)
    return NatsGenerateClient(connection, config)


__all__ = [
    "DEFAULT_TRANSPORT",
    "TRANSPORTS",
    "Address",
    "ChannelClosedError",
    "ChannelError",
    "ChannelFullError",
    "ChunkSink",
    "ClientChannelConfig",
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
    "ServerChannelConfig",
    "Transport",
    "ZmqGenerateClient",
    "ZmqGenerateServer",
    "make_client",
]
