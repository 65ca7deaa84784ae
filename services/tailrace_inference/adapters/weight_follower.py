"""Keeps an engine on the newest policy version: fetches and stages while it generates, then swaps.

Before a version of adapters it takes their base version, if the engine does not hold it.

Invariants: versions only rise; one version is fetched at a time, and versions replaced in the meantime
are skipped; a failed update leaves the active version, is reported, and is tried again at the next
announcement, unless its tensors do not fit the model.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec

from tailrace.bus import BusError
from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.runtime import StopService
from tailrace.tracing import current_traceparent, span
from tailrace.weights import ChecksumError, StagedWeights, WeightReceiver, WeightsError
from tailrace_inference import metrics
from tailrace_inference.ports import (
    Engine,
    EngineFailedError,
    EngineRefusalError,
    NotStagedError,
    WeightMismatchError,
)
from tailrace_protos.weights import WeightsApplied, WeightsAvailable

log = get_logger(__name__)

_ASK_ATTEMPTS = 3


class WeightFollower:
    """Weights of one server."""

    def __init__(
        self,
        engine: Engine,
        receiver: WeightReceiver,
        server_id: str,
        on_applied: Callable[[int], Awaitable[None]],
        awake: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """`awake`: context in which the engine does not sleep."""
        self._engine = engine
        self._receiver = receiver
        self._server_id = server_id
        self._on_applied = on_applied
        self._awake = awake
        self._policy_version = -1
        self._refused_version = -1
        self._newest: WeightsAvailable | None = None
        self._traceparent = ""  # of the newest announcement
        self._announced = asyncio.Event()

    async def on_published(self, available: WeightsAvailable) -> None:
        """Takes an announcement of weight_sync, new or repeated."""
        self._offer(available)

    async def follow(self) -> None:
        """Requests the current version, then applies newer versions as they are announced."""
        try:
            current = await self._receiver.current(attempts=_ASK_ATTEMPTS)
        except BusError as error:
            log.warning(
                "weight_sync does not answer: waiting for its next announcement", error=str(error)
            )
        else:
            if current is not None:
                self._offer(current)
        while True:
            await self._announced.wait()
            self._announced.clear()
            if self._newest is not None:
                traceparent, self._traceparent = self._traceparent, ""
                version = self._newest.manifest.policy_version
                with span("update weights", traceparent, policy_version=version):
                    await self._take_with_base(self._newest)

    def _offer(self, available: WeightsAvailable) -> None:
        offered = available.manifest.policy_version
        newest = self._newest.manifest.policy_version if self._newest is not None else -1
        if offered >= newest and offered > self._policy_version and offered != self._refused_version:
            self._newest = available
            self._traceparent = current_traceparent() or self._traceparent
            self._announced.set()

    async def _take_with_base(self, announced: WeightsAvailable) -> None:
        try:
            available = await self._receiver.in_own_type(announced)
        except WeightsError as error:
            await self._report_failure(announced.manifest.policy_version, error)
            return
        if available.manifest.policy_version <= self._policy_version:
            return
        base_version, base = available.manifest.base_version, available.base
        if base_version is not None and base_version != self._engine.base_version and base:
            has_base = await self._take(
                msgspec.structs.replace(
                    available, manifest=base.manifest, source=base.source, base=None, deltas=()
                )
            )
            if not has_base:  # nothing can be added to it: both are tried again, unless it does not fit
                if self._refused_version == base_version:
                    self._refused_version = available.manifest.policy_version
                return
        await self._take(available)

    async def _take(self, available: WeightsAvailable) -> bool:
        """Fetches, stages, swaps and reports one version; says whether the engine has it."""
        policy_version = available.manifest.policy_version
        began_s = time.perf_counter()
        try:
            with span("fetch"):
                staged = await self._receiver.fetch(available)
        except (WeightsError, MemoryError, OSError) as error:
            await self._report_failure(policy_version, error)
            return False
        fetched_s = time.perf_counter()
        try:
            async with self._awake():
                with span("stage"):
                    await self._stage(staged)
                staged_s = time.perf_counter()
                with span("swap"):  # shielded: it holds the calls, which a drain waits for
                    swap_s = await asyncio.shield(self._engine.apply())
        except WeightMismatchError as error:  # the old version stays
            await self._refuse(policy_version, error)
            return False
        except NotStagedError as error:
            await self._report_failure(policy_version, error)
            return False
        except EngineRefusalError as error:  # a restart would end in the same way
            raise ConfigError(str(error)) from error
        except EngineFailedError as error:
            raise StopService(1, str(error)) from error
        self._policy_version = policy_version
        fetch_s, stage_s = fetched_s - began_s, staged_s - fetched_s
        metrics.FETCH_SECONDS.observe(fetch_s)
        metrics.STAGE_SECONDS.observe(stage_s)
        metrics.SWAP_SECONDS.observe(swap_s)
        log.info("weights applied", policy_version=policy_version, swap_s=round(swap_s, 6))
        await self._on_applied(policy_version)
        await self._receiver.report(
            WeightsApplied(self._server_id, policy_version, fetch_s, stage_s, swap_s)
        )
        return True

    async def _stage(self, staged: StagedWeights) -> None:
        manifest = staged.manifest
        try:
            await self._engine.stage(staged.tensors(), manifest.policy_version, manifest.base_version)
        finally:
            staged.close()

    async def _refuse(self, policy_version: int, error: WeightMismatchError) -> None:
        self._refused_version = policy_version
        await self._report_failure(policy_version, error)

    async def _report_failure(self, policy_version: int, error: Exception) -> None:
        metrics.FAILED_UPDATES.inc()
        log.error("weights not applied", policy_version=policy_version, error=str(error))
        failure = WeightsApplied(
            self._server_id,
            policy_version,
            0.0,
            0.0,
            0.0,
            error=str(error),
            damaged=isinstance(error, ChecksumError),
        )
        await self._receiver.report(failure)
