"""Ranges of weight buffers over ZMQ.

The receiver pulls: it has at most `credit` open requests and repeats requests without a reply. So no
queue grows beyond the credit, a lost message costs one timeout, and a slow receiver slows only itself.
CURVE encrypts if the server listens on more than loopback; only peers that got the server's key over
the (authenticated) bus can connect.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from tailrace.log import get_logger
from tailrace.weights.errors import WeightsGoneError, WeightsUnreachableError
from tailrace_protos.base import EMPTY, MalformedMessageError, decode, encode
from tailrace_protos.weights import ChunkReply, ChunkRequest, WeightSource

log = get_logger(__name__)

LOOPBACK = ("127.0.0.1", "localhost")
MAX_CHUNK_BYTES = 8 << 20
_MAX_QUEUED = 64  # messages per peer; above any receiver's credit

Held = Callable[[int, bool], memoryview | None]


class ChunkServer:
    """ROUTER that answers `ChunkRequest`s from the buffers of `held(policy_version, is_delta)`."""

    def __init__(self, held: Held, *, bind_host: str = "127.0.0.1", advertise_host: str = "") -> None:
        self._held = held
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self.endpoint = ""
        self.public_key = ""
        self.is_used = False  # whether a peer ever got bytes
        self.num_unsent = 0  # replies to peers that disconnected or exceeded all credit

    async def start(self) -> None:
        """Binds a free port and starts to serve."""
        self._context = zmq.asyncio.Context()
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set_hwm(_MAX_QUEUED)
        router.set(zmq.LINGER, 0)
        if self._bind_host not in LOOPBACK:
            public, secret = zmq.curve_keypair()
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, secret)
            self.public_key = public.decode()
        port = router.bind_to_random_port(f"tcp://{self._bind_host}")
        self.endpoint = f"tcp://{self._reachable_host()}:{port}"
        self._task = asyncio.create_task(self._serve(router), name="weight-chunks")

    async def stop(self) -> None:
        """Stops serving; receivers use another source or fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._context is not None:
            self._context.destroy(linger=0)

    def _reachable_host(self) -> str:
        if self._advertise_host:
            return self._advertise_host
        return socket.gethostname() if self._bind_host in ("0.0.0.0", "*") else self._bind_host

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 2:
                continue
            peer, payload = frames
            try:
                await router.send_multipart(
                    [peer, encode(self._reply(payload))], zmq.NOBLOCK, copy=False
                )
            except zmq.ZMQError as error:
                self.num_unsent += 1
                log.debug("chunk not sent", error=str(error))
            await asyncio.sleep(0)  # recv does not yield while messages wait

    def _reply(self, payload: bytes) -> ChunkReply:
        try:
            request = decode(payload, ChunkRequest)
        except MalformedMessageError as error:
            return ChunkReply(-1, 0, EMPTY, str(error))
        version, offset = request.policy_version, request.offset
        buffer = self._held(version, request.is_delta)
        if buffer is None:
            return ChunkReply(version, offset, EMPTY, "this version is no longer held")
        end = offset + request.num_bytes
        if offset < 0 or not 0 < request.num_bytes <= MAX_CHUNK_BYTES or end > buffer.nbytes:
            reason = f"range {offset}..{end} is empty, too long or outside the {buffer.nbytes} bytes"
            return ChunkReply(version, offset, EMPTY, reason)
        self.is_used = True
        return ChunkReply(version, offset, buffer[offset:end])


class ChunkFetch:
    """Transfer of one buffer into `into`."""

    def __init__(
        self,
        source: WeightSource,
        policy_version: int,
        into: memoryview,
        *,
        is_delta: bool = False,
        chunk_bytes: int = 1 << 20,
        credit: int = 8,
        silence_s: float = 1.0,
        max_silences: int = 10,
    ) -> None:
        assert 0 < chunk_bytes <= MAX_CHUNK_BYTES
        assert 0 < credit <= _MAX_QUEUED
        self._source = source
        self._version = policy_version
        self._into = into
        self._is_delta = is_delta
        self._missing = deque(range(0, into.nbytes, chunk_bytes))
        self._asked: set[int] = set()
        self._chunk_bytes = chunk_bytes
        self._credit = credit
        self._silence_s = silence_s
        self._max_silences = max_silences

    async def run(self) -> None:
        """Fetches all bytes; raises `WeightsGoneError` or `WeightsUnreachableError`."""
        if not self._source.zmq_endpoint:
            raise WeightsUnreachableError("", 0.0)
        context = zmq.asyncio.Context()
        try:
            num_silences = 0
            while self._missing:
                progressed = await self._pull(self._connect(context))
                num_silences = 0 if progressed else num_silences + 1
                if num_silences > self._max_silences:
                    silent_s = num_silences * self._silence_s
                    raise WeightsUnreachableError(self._source.zmq_endpoint, silent_s)
        finally:
            context.destroy(linger=0)

    def _connect(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        dealer = context.socket(zmq.DEALER)
        dealer.set_hwm(_MAX_QUEUED)
        dealer.set(zmq.LINGER, 0)
        if self._source.zmq_public_key:
            public, secret = zmq.curve_keypair()
            dealer.set(zmq.CURVE_SERVERKEY, self._source.zmq_public_key.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, public)
            dealer.set(zmq.CURVE_SECRETKEY, secret)
        dealer.connect(self._source.zmq_endpoint)
        return dealer

    async def _pull(self, dealer: zmq.asyncio.Socket) -> bool:
        """Pulls over one connection until done or silent; unanswered requests are missing again."""
        progressed = False
        while self._missing or self._asked:
            while self._missing and len(self._asked) < self._credit:
                await self._ask(dealer, self._missing.popleft())
            if not await dealer.poll(int(self._silence_s * 1000)):
                break
            progressed |= self._take(await dealer.recv(copy=True))
        dealer.close(linger=0)
        self._missing.extend(sorted(self._asked))
        self._asked.clear()
        return progressed

    async def _ask(self, dealer: zmq.asyncio.Socket, offset: int) -> None:
        self._asked.add(offset)
        num_bytes = min(self._chunk_bytes, self._into.nbytes - offset)
        request = ChunkRequest(self._version, offset, num_bytes, self._is_delta)
        await dealer.send(encode(request))

    def _take(self, payload: bytes) -> bool:
        """Writes a chunk to its place; a repeated chunk changes nothing."""
        reply = decode(payload, ChunkReply)
        if reply.error:
            raise WeightsGoneError(self._version, reply.error)
        expected = min(self._chunk_bytes, self._into.nbytes - reply.offset)
        if reply.offset not in self._asked or reply.data.nbytes != expected:
            return False
        self._asked.remove(reply.offset)
        self._into[reply.offset : reply.offset + reply.data.nbytes] = reply.data
        return True
