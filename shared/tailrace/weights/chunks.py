"""Ranges of weight buffers over ZMQ.

The receiver pulls: it has at most `credit` open requests and repeats requests without a reply. So no
queue grows beyond the credit, a lost message costs one timeout, and a slow receiver slows only itself.
A holder may serve a buffer that still arrives: requests for missing ranges wait until they are there,
and the receiver hears meanwhile that the holder lives. CURVE encrypts; only peers that got the server's
key over the (authenticated) bus can connect.

A chunk is two frames, `ChunkReply` and its bytes. The sender sends the bytes from the buffer itself;
the receiver copies them once, from the message into its buffer.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from tailrace.config import advertised_host
from tailrace.log import get_logger
from tailrace.weights.errors import WeightsGoneError, WeightsUnreachableError
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.weights import ChunkReply, ChunkRequest, WeightSource

log = get_logger(__name__)

CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 8 << 20
_MAX_QUEUED = 64  # messages per peer; above any receiver's credit
_MAX_WAITING = 1024  # requests for ranges that have not arrived yet
_NOT_HELD = "this version is no longer held"
_STARVED_S = 60.0  # a holder that only says that it waits for so long is given up


def reachable_host(bind_host: str, advertise_host: str) -> str:
    """Address of this host for others, from two settings."""
    if advertise_host:
        return advertise_host
    return advertised_host() if bind_host in ("0.0.0.0", "*") else bind_host


class Holding:
    """Buffer that is complete, or arrives chunk by chunk."""

    def __init__(self, data: memoryview, *, complete: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        assert 0 < chunk_bytes <= MAX_CHUNK_BYTES
        self.data = data
        self.chunk_bytes = chunk_bytes
        self._missing = set() if complete else set(range(-(-data.nbytes // chunk_bytes)))
        self._arrival = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Says whether all bytes are there."""
        return not self._missing

    def missing(self, stripe: int = 0, num_stripes: int = 1) -> list[int]:
        """Offsets of the missing chunks of one part, ascending."""
        chunks = sorted(chunk for chunk in self._missing if chunk % num_stripes == stripe)
        return [chunk * self.chunk_bytes for chunk in chunks]

    def size_at(self, offset: int) -> int:
        """Bytes of the chunk that begins at `offset`."""
        return min(self.chunk_bytes, self.data.nbytes - offset)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes a whole chunk to its place."""
        self.data[offset : offset + data.nbytes] = data
        self._missing.discard(offset // self.chunk_bytes)
        self._arrival.set()
        self._arrival = asyncio.Event()

    def forget(self, start: int, end: int) -> None:
        """Marks the chunks of a range as missing, since they are damaged."""
        self._missing.update(range(start // self.chunk_bytes, -(-end // self.chunk_bytes)))

    def has(self, start: int, end: int) -> bool:
        """Says whether all bytes of a range are there."""
        return not self._missing or self._missing.isdisjoint(
            range(start // self.chunk_bytes, -(-end // self.chunk_bytes))
        )

    async def arrival(self, timeout_s: float) -> None:
        """Waits until another chunk arrives, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrival.wait()
        except TimeoutError:
            return


Held = Callable[[int, bool], Holding | None]


class ChunkServer:
    """ROUTER that answers `ChunkRequest`s from `held(policy_version, is_delta)`."""

    def __init__(
        self,
        held: Held,
        *,
        bind_host: str = "127.0.0.1",
        advertise_host: str = "",
        alive_s: float = 0.25,
    ) -> None:
        """`alive_s`: a waiting receiver hears after each such time that this holder lives."""
        self._held = held
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._alive_s = alive_s
        self._router: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        self.endpoint = ""
        self.public_key = ""
        self.is_used = False  # whether a peer ever got bytes
        self.num_sent_bytes = 0

    async def start(self) -> None:
        """Binds a free port and starts to serve."""
        router = self._router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set_hwm(2 * _MAX_QUEUED)  # in frames; a chunk is two
        router.set(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, secret)
        self.public_key = public.decode()
        port = router.bind_to_random_port(f"tcp://{self._bind_host}")
        self.endpoint = f"tcp://{reachable_host(self._bind_host, self._advertise_host)}:{port}"
        self._task = asyncio.create_task(self._serve(router), name="weight-chunks")

    async def stop(self) -> None:
        """Stops serving; receivers use another source or fail."""
        tasks = [*self._waiting.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._router is not None:
            self._router.close(linger=0)

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) == 2:
                await self._answer(router, *frames)
            await asyncio.sleep(0)  # recv does not yield while messages wait

    async def _answer(self, router: zmq.asyncio.Socket, peer: bytes, payload: bytes) -> None:
        try:
            request = decode(payload, ChunkRequest)
        except MalformedMessageError as error:
            await self._send(router, peer, ChunkReply(-1, 0, error=str(error)))
            return
        version, offset = request.policy_version, request.offset
        end = offset + request.num_bytes
        holding = self._held(version, request.is_delta)
        if holding is None:
            await self._send(router, peer, ChunkReply(version, offset, error=_NOT_HELD))
        elif offset < 0 or not 0 < end - offset <= MAX_CHUNK_BYTES or end > holding.data.nbytes:
            reason = (
                f"range {offset}..{end} is empty, too long or outside the {holding.data.nbytes} bytes"
            )
            await self._send(router, peer, ChunkReply(version, offset, error=reason))
        elif holding.has(offset, end):
            await self._send(router, peer, ChunkReply(version, offset), holding.data[offset:end])
        else:
            self._answer_later(router, peer, payload, request, holding)

    def _answer_later(
        self,
        router: zmq.asyncio.Socket,
        peer: bytes,
        payload: bytes,
        request: ChunkRequest,
        holding: Holding,
    ) -> None:
        key = (peer, payload)
        if key in self._waiting or len(self._waiting) >= _MAX_WAITING:
            return  # a repetition; or the receiver repeats it later
        task = asyncio.create_task(self._wait_and_send(router, peer, request, holding))
        self._waiting[key] = task
        task.add_done_callback(lambda _: self._waiting.pop(key, None))

    async def _wait_and_send(
        self, router: zmq.asyncio.Socket, peer: bytes, request: ChunkRequest, holding: Holding
    ) -> None:
        version, offset = request.policy_version, request.offset
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self._alive_s
        while not holding.has(offset, offset + request.num_bytes):
            await holding.arrival(max(0.0, next_s - loop.time()))
            if self._held(version, request.is_delta) is not holding:
                await self._send(router, peer, ChunkReply(version, offset, error=_NOT_HELD))
                return
            if loop.time() >= next_s:
                next_s = loop.time() + self._alive_s
                if not await self._send(router, peer, ChunkReply(version, offset, waiting=True)):
                    return
        data = holding.data[offset : offset + request.num_bytes]
        await self._send(router, peer, ChunkReply(version, offset), data)

    async def _send(
        self, router: zmq.asyncio.Socket, peer: bytes, reply: ChunkReply, data: memoryview | None = None
    ) -> bool:
        """Sends without waiting; False if the peer is gone or does not read."""
        frames: list[bytes | memoryview] = [peer, encode(reply)]
        if data is not None:
            frames.append(data)
            self.is_used = True
            self.num_sent_bytes += data.nbytes
        try:
            await router.send_multipart(frames, zmq.NOBLOCK, copy=data is None)
        except zmq.ZMQError as error:
            log.debug("chunk not sent", error=str(error))
            return False
        return True


class ChunkFetch:
    """Transfer of the missing chunks of a holding, or of one part of them, from one holder.

    A connection on which nothing comes for `silence_s` is made anew; the next one may be silent twice
    as long, for on a slow link a chunk or a handshake takes its time. `patience_s`: of silence in all,
    after which the holder is unreachable.
    """

    def __init__(
        self,
        source: WeightSource,
        policy_version: int,
        into: Holding,
        *,
        is_delta: bool = False,
        stripe: int = 0,
        num_stripes: int = 1,
        credit: int = 8,
        silence_s: float = 1.0,
        patience_s: float = 10.0,
    ) -> None:
        assert 0 < credit <= _MAX_QUEUED
        self._source = source
        self._version = policy_version
        self._into = into
        self._is_delta = is_delta
        self._part = (stripe, num_stripes)
        self._todo: deque[int] = deque()
        self._asked: set[int] = set()
        self._credit = credit
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._starved_since_s = 0.0

    async def run(self) -> None:
        """Fetches all bytes; raises `WeightsGoneError` or `WeightsUnreachableError`."""
        if not self._source.zmq_endpoint:
            raise WeightsUnreachableError("", 0.0)
        silent_s, silence_s = 0.0, self._silence_s
        while self._into.missing(*self._part):
            dealer = self._connect()
            try:
                progressed = await self._pull(dealer, silence_s)
            finally:
                dealer.close(linger=0)
            if progressed:
                silent_s, silence_s = 0.0, self._silence_s
                continue
            silent_s += silence_s
            silence_s *= 2
            if silent_s > self._patience_s:
                raise WeightsUnreachableError(self._source.zmq_endpoint, silent_s)

    def _connect(self) -> zmq.asyncio.Socket:
        if not self._source.zmq_public_key:  # every sender has a key
            raise WeightsUnreachableError(self._source.zmq_endpoint, 0.0)
        dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        dealer.set_hwm(2 * _MAX_QUEUED)
        dealer.set(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        dealer.set(zmq.CURVE_SERVERKEY, self._source.zmq_public_key.encode())
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, secret)
        dealer.connect(self._source.zmq_endpoint)
        return dealer

    async def _pull(self, dealer: zmq.asyncio.Socket, silence_s: float) -> bool:
        """Pulls over one connection until done or silent; says whether anything came."""
        progressed = False
        self._todo = deque(self._into.missing(*self._part))
        self._asked.clear()
        self._starved_since_s = asyncio.get_running_loop().time()
        while self._todo or self._asked:
            await self._ask(dealer)
            if not await dealer.poll(int(silence_s * 1000)):
                break
            progressed |= self._take(await dealer.recv_multipart(copy=False))
        return progressed

    async def _ask(self, dealer: zmq.asyncio.Socket) -> None:
        while self._todo and len(self._asked) < self._credit:
            offset = self._todo.popleft()
            self._asked.add(offset)
            num_bytes = self._into.size_at(offset)
            await dealer.send(encode(ChunkRequest(self._version, offset, num_bytes, self._is_delta)))

    def _take(self, frames: list[zmq.Frame]) -> bool:
        """Writes a chunk to its place; a repeated chunk changes nothing."""
        reply = decode(frames[0].buffer, ChunkReply)
        if reply.error:
            raise WeightsGoneError(self._version, reply.error)
        now_s = asyncio.get_running_loop().time()
        if reply.waiting:
            if now_s - self._starved_since_s > _STARVED_S:
                raise WeightsUnreachableError(self._source.zmq_endpoint, _STARVED_S)
            return True
        expected = self._into.size_at(reply.offset)
        if reply.offset not in self._asked or len(frames) != 2 or frames[1].buffer.nbytes != expected:
            return False
        self._starved_since_s = now_s
        self._asked.remove(reply.offset)
        self._into.write(reply.offset, frames[1].buffer)
        return True
