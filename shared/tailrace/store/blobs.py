"""Payloads by claim check, the model card, and the policy versions of one run."""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from tailrace.log import get_logger
from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace.store.errors import MALFORMED, BlobGoneError, StoreUnavailableError
from tailrace.store.quarantine import quarantine
from tailrace_protos.base import decode, encode
from tailrace_protos.subjects import redis_prefix
from tailrace_protos.weights import ModelCard, WeightManifest

log = get_logger(__name__)

_POLL_S = 0.1


class Blobs:
    """Payloads of one run that are too large for a NATS message, and the run's model card.

    The reference of a payload is the hash of its bytes: a second `put` of the same bytes only renews
    their lifetime.
    """

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._prefix = redis_prefix(run)
        self._corrupted_card: bytes | None = None  # as it was found last

    async def put(self, data: bytes, ttl_s: float) -> str:
        """Stores `data` for `ttl_s` and returns its reference."""
        ref = hashlib.blake2b(data, digest_size=16).hexdigest()
        await self._redis.pipeline.command(
            "SET", f"{self._prefix}blob:{ref}", data, "PX", max(1, int(ttl_s * 1000))
        )
        return ref

    async def get(self, ref: str) -> bytes:
        """Returns the bytes of a reference; `BlobGoneError` when they expired."""
        data: bytes | None = await self._redis.pipeline.command("GET", f"{self._prefix}blob:{ref}")
        if data is None:
            raise BlobGoneError(ref)
        return data

    async def put_model_card(self, card: ModelCard) -> None:
        """Stores the description of the run's model."""
        await self._redis.pipeline.command("SET", f"{self._prefix}model_card", encode(card))

    async def get_model_card(self) -> ModelCard | None:
        """Returns the model card, or None before the learner has written it.

        A corrupted card counts as none: a learner that starts writes it anew.
        """
        data: bytes | None = await self._redis.pipeline.command("GET", f"{self._prefix}model_card")
        if data is None:
            return None
        try:
            return decode(data, ModelCard)
        except MALFORMED as error:
            if data != self._corrupted_card:
                self._corrupted_card = data
                await quarantine(self._redis, self._prefix, "model_card", "card", (data,), error)
            return None

    async def wait_for_model_card(self) -> ModelCard:
        """Waits for the learner to write the model card, also while Redis is away."""
        is_logged = False
        while True:
            with contextlib.suppress(StoreUnavailableError):
                if (card := await self.get_model_card()) is not None:
                    return card
            if not is_logged:
                log.info("waiting for the model card of the learner")
                is_logged = True
            await asyncio.sleep(_POLL_S)


class Versions:
    """Policy versions of one run: integers that are never used twice. Only weight_sync writes them."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._prefix = redis_prefix(run)

    async def allocate(self, lineage: str, optimizer_step: int, *, at_least: int = 0) -> int:
        """Returns the version of a lineage's step: a new one, or the one that the step already has."""
        version: int = await self._redis.pipeline.script(
            scripts.ALLOCATE_VERSION, self._prefix, f"{lineage}/{optimizer_step}", at_least
        )
        return version

    async def record(self, manifest: WeightManifest) -> None:
        """Stores the lineage and optimizer step of a version."""
        entry = msgspec.msgpack.encode((manifest.lineage, manifest.optimizer_step))
        await self._redis.pipeline.script(
            scripts.RECORD_VERSION, self._prefix, manifest.policy_version, entry
        )

    async def all(self) -> dict[int, tuple[str, int]]:
        """Returns policy_version -> (lineage, optimizer step) of all recorded versions."""
        return await self._decoded(await self._redis.read_hash(f"{self._prefix}versions"))

    async def of(self, policy_versions: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Returns the same of these versions; those without a record are left out.

        A long run has 100,000 versions, and a step needs a few of them.
        """
        names = [str(policy_version).encode() for policy_version in policy_versions]
        if not names:
            return {}
        found = await self._redis.pipeline.command("HMGET", f"{self._prefix}versions", *names)
        entries = zip(names, found, strict=True)
        return await self._decoded({name: entry for name, entry in entries if entry is not None})

    async def _decoded(self, entries: Mapping[bytes, bytes]) -> dict[int, tuple[str, int]]:
        versions: dict[int, tuple[str, int]] = {}
        for version, entry in entries.items():
            try:
                versions[int(version)] = msgspec.msgpack.decode(entry, type=tuple[str, int])
            except MALFORMED as error:
                name = version.decode(errors="replace")
                await quarantine(self._redis, self._prefix, "version", name, (entry,), error)
        return versions
