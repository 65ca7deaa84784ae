"""Payloads by claim check, and the model card.

A payload too big for a NATS message stays here and travels as a reference, which is made from its
content: putting the same bytes again only renews their lifetime.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib

from tailrace.log import get_logger
from tailrace.store.connection import StoreConnection
from tailrace.store.errors import BlobGoneError, StoreUnavailableError
from tailrace_protos.base import decode, encode
from tailrace_protos.subjects import redis_prefix
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)

_POLL_S = 0.1


class Blobs:
    """Payloads of one run."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._prefix = redis_prefix(run)

    async def put(self, data: bytes, ttl_s: float) -> str:
        """Keep `data` for `ttl_s` and return the reference that finds it."""
        ref = hashlib.blake2b(data, digest_size=16).hexdigest()
        await self._redis.pipeline.command(
            "SET", f"{self._prefix}blob:{ref}", data, "PX", max(1, int(ttl_s * 1000))
        )
        return ref

    async def get(self, ref: str) -> bytes:
        """The bytes behind a reference; `BlobGoneError` when they expired."""
        data: bytes | None = await self._redis.pipeline.command("GET", f"{self._prefix}blob:{ref}")
        if data is None:
            raise BlobGoneError(ref)
        return data

    async def put_model_card(self, card: ModelCard) -> None:
        """Tell the run what its model is."""
        await self._redis.pipeline.command("SET", f"{self._prefix}model_card", encode(card))

    async def get_model_card(self) -> ModelCard | None:
        """The model card, or None before the learner has written it."""
        data: bytes | None = await self._redis.pipeline.command("GET", f"{self._prefix}model_card")
        return None if data is None else decode(data, ModelCard)

    async def wait_for_model_card(self) -> ModelCard:
        """The model card once the learner has written it; outages of Redis only delay it."""
        is_logged = False
        while True:
            with contextlib.suppress(StoreUnavailableError):
                if (card := await self.get_model_card()) is not None:
                    return card
            if not is_logged:
                log.info("waiting for the model card of the learner")
                is_logged = True
            await asyncio.sleep(_POLL_S)
