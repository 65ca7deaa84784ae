"""Holders of buffers: trees last as long as their buffers, and name servers that have them."""

from __future__ import annotations

from tailrace_protos.weights import RouteReply, RouteRequest, WeightsApplied, WeightSource
from tailrace_weight_sync.adapters.routes import Routes
from tailrace_weight_sync.core.relays import NUM_STRIPES, ROOT


class FakeVault:
    """Serves the buffers in `served`: (policy version, is it a delta)."""

    zmq_source = WeightSource("sync", "", "tcp://sync:1")

    def __init__(self, *served: tuple[int, bool]) -> None:
        self.served = set(served)

    def serves(self, policy_version: int, is_delta: bool) -> bool:
        return (policy_version, is_delta) in self.served


def relay(server_id: str) -> WeightSource:
    return WeightSource(f"host-{server_id}", "", f"tcp://{server_id}:1")


async def asked(routes: Routes, server_id: str, policy_version: int, stripe: int = 0) -> RouteReply:
    """The holder of the delta to a version."""
    request = RouteRequest(server_id, policy_version, True, stripe, relay(server_id))
    return await routes.route(request)


async def test_trees_of_differences_end_with_them_though_their_version_went_before() -> None:
    vault = FakeVault((3, True), (4, False))
    routes = Routes(vault)  # type: ignore[arg-type]
    for version in range(4, 40):
        routes.drop(version - 1)  # the version, not the delta to it, which a late server still wants
        await asked(routes, "late", version - 1)
        vault.served = {(version, True), (version + 1, False)}
    assert len(routes._trees) <= 2


async def test_a_server_that_fetched_a_whole_version_is_no_holder_of_the_difference_to_it() -> None:
    routes = Routes(FakeVault((3, True), (3, False)))  # type: ignore[arg-type]
    for stripe in range(NUM_STRIPES):
        await asked(routes, "first", 3, stripe)
    routes.applied(WeightsApplied("new", 3, 0.1, 0.1, 0.1, relay=relay("new")))
    names = {
        (await asked(routes, f"s{at}", 3, stripe)).server_id for at in range(6) for stripe in (0, 1)
    }
    assert "new" not in names


async def test_a_server_that_fetched_the_difference_passes_it_on() -> None:
    routes = Routes(FakeVault((3, True), (3, False)))  # type: ignore[arg-type]
    await asked(routes, "first", 3)
    routes.applied(WeightsApplied("first", 3, 0.1, 0.1, 0.1, relay=relay("first")))
    names = {(await asked(routes, f"s{at}", 3)).server_id for at in range(2)}
    assert names == {ROOT, "first"}
