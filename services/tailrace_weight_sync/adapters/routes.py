"""Holders from which servers fetch buffers of one vault: a tree for each buffer."""

import asyncio

from tailrace.bus import CallFailedError
from tailrace.log import get_logger
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.weights import RouteReply, RouteRequest, WeightsApplied
from tailrace_weight_sync import metrics
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.core.relays import NUM_STRIPES, ROOT, Joiner, RelayTree

log = get_logger(__name__)

_GATHER_S = 0.01  # servers that hear of a version at once ask within this time


class Routes:
    """Names to each server the holder from which it fetches a buffer."""

    def __init__(self, vault: SegmentVault) -> None:
        self._vault = vault
        self._trees: dict[tuple[int, bool], RelayTree] = {}
        self._gathered: dict[tuple[int, bool], tuple[list[Joiner], asyncio.Task[None]]] = {}

    async def route(self, request: RouteRequest) -> RouteReply:
        """Answers with a holder; servers that ask at the same time are planned together."""
        key = (request.policy_version, request.is_delta)
        if not self._vault.serves(*key):
            reason = f"policy version {request.policy_version} is no longer held"
            raise CallFailedError(CallErrorCode.INVALID, reason)
        if not 0 <= request.stripe < NUM_STRIPES:
            raise CallFailedError(CallErrorCode.INVALID, f"there is no part {request.stripe}")
        tree = self._trees.setdefault(key, RelayTree())
        joiner = Joiner(request.server_id, request.relay)
        if not tree.knows(joiner):
            await self._planned(key, tree, joiner)
        if request.failed:
            metrics.FAILED_HOLDERS.inc()
            log.warning("holder failed", holder=request.failed, server_id=request.server_id)
        holder = tree.parent(request.server_id, request.stripe, request.failed)
        metrics.ROUTES.labels("weight_sync" if holder == ROOT else "server").inc()
        if holder == ROOT:
            return RouteReply(ROOT, self._vault.zmq_source)
        return RouteReply(holder, tree.source_of(holder))

    def applied(self, report: WeightsApplied) -> None:
        """A server that applied a version serves it, and the delta to it, if it has fetched that."""
        if report.relay is None:
            return
        joiner = Joiner(report.server_id, report.relay)
        for (policy_version, is_delta), tree in self._trees.items():
            if policy_version == report.policy_version and (not is_delta or tree.knows(joiner)):
                tree.finished(joiner)

    def drop(self, policy_version: int) -> None:
        """Forgets the trees of a version, and those of all buffers that are no longer held."""
        for is_delta in (False, True):
            self._trees.pop((policy_version, is_delta), None)
        self._trees = {key: tree for key, tree in self._trees.items() if self._vault.serves(*key)}

    async def _planned(self, key: tuple[int, bool], tree: RelayTree, joiner: Joiner) -> None:
        if key not in self._gathered:
            self._gathered[key] = ([], asyncio.create_task(self._plan(key, tree)))
        joiners, task = self._gathered[key]
        joiners.append(joiner)
        await task

    async def _plan(self, key: tuple[int, bool], tree: RelayTree) -> None:
        await asyncio.sleep(_GATHER_S)
        joiners, _ = self._gathered.pop(key)
        tree.plan({joiner.server_id: joiner for joiner in joiners}.values())
