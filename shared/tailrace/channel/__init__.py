"""Token generation between agents and inference servers: `GenerateClient` and `GenerateServer`.

A call sends token ids and gets chunks of token ids, log-probabilities and policy versions. What is
sent to one peer in one loop tick travels as one frame (an engine's 16 chunks of one tick as one), so
that costs are shared by dozens of calls while a lone call does not wait. A client and a server meet on
a *link* of numbered frames (`client_link`, `server_link`); a missing frame, a silent or dead peer end
it, and its calls raise `ChannelError` with the tokens that came: never a hole, never a hang. Windows,
queues and frames are bounded (`config`); a full one makes callers wait or raises a typed error.

Two transports carry the frames, tested by one contract suite. Medians of 5 rounds of
`benchmarks.bench_transport` on two shared, busy cores of an AMD EPYC (2,000 ids in, 500 ids and
log-probabilities out, an engine that computes nothing, both ends inside the runtime):

| | calls/s at 1 | at 64 | at 512 callers | p99 at 64 | CPU per call at 64 |
|---|---|---|---|---|---|
| `zmq` (ipc) | 4,900 | 32,500 | 19,800 | 3.7 ms | 30 µs |
| `nats` | 3,700 | 13,700 | 12,300 | 13 ms | 68 µs, with nats-server |
| a Ray actor | 540 | 800 | 900 | 137 ms | 1,200 µs |

Hence `DEFAULT_TRANSPORT` is `zmq`: no broker to cross. `nats` needs no open port on the server, and
brings the broker's authentication and reconnection; both beat the goals against Ray (6 times its
calls, a third of its p99) by far.
"""

from __future__ import annotations

from typing import Literal

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
    GenerateServer,
)
from tailrace.channel.zmq_client import ZmqGenerateClient
from tailrace.channel.zmq_server import ZmqGenerateServer
from tailrace.channel.zmq_socket import CurveKeys

Transport = Literal["nats", "zmq"]

TRANSPORTS: tuple[Transport, ...] = ("nats", "zmq")
DEFAULT_TRANSPORT: Transport = "zmq"

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
]
