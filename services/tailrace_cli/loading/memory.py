"""Memory of every place of a run, the host and each GPU, by its users (pure)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace_cli.cluster.placement import GpuDemand, GpuPlacement, PlacementError, place
from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.facts import MachineFacts, ModelFacts
from tailrace_cli.loading.host_needs import (
    HostNeeds,
    learner_host,
    server_host,
    weight_sync_host,
)
from tailrace_cli.loading.needs import Needs, engine_needs, rank_needs

GIB = 1 << 30
HOST = "this machine"
_HOST = -1  # place of a process that computes on no GPU
_ASLEEP_BYTES = GIB  # of a process that sleeps on a GPU: CUDA's own (`docs/results.md`: 1.1 GiB)


@dataclass(frozen=True)
class Memory:
    """Bytes on one place. `capacity` is 0 if unknown; `needs` are those of one process, by user."""

    place: str
    capacity: int
    parts: dict[str, int]
    activations: int = 0
    needs: dict[str, Needs] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """Bytes that the run holds for sure."""
        return sum(self.parts.values())


class _User(NamedTuple):
    """User of memory: bytes of one process, and the places of each of its processes."""

    name: str
    needs: Needs
    places: Sequence[int]


class HostParts(NamedTuple):
    """Weights that services hold on the host of a run; each of its servers holds `server`."""

    learner: HostNeeds
    weight_sync: HostNeeds
    server: HostNeeds
    num_servers: int

    @property
    def published(self) -> int:
        """Bytes of versions that learner and weight_sync hold in `/dev/shm`."""
        return self.learner.shared + self.weight_sync.shared

    @property
    def staged(self) -> int:
        """Bytes of the files of servers in `/dev/shm`."""
        return self.num_servers * self.server.shared


def memory_of(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> Iterator[Memory]:
    """Memory of the host, and of every GPU that the learner or an engine uses.

    A GPU on which they take turns comes once for each turn: one computes, and the others sleep.
    """
    users = _users(experiment, model, machine)
    if any(_HOST in user.places for user in users):
        yield _memory_at(_HOST, HOST, machine.host_bytes, users, users)
    for gpu, capacity in enumerate(machine.gpu_bytes):
        here = [user for user in users if gpu in user.places]
        turns = [[user] for user in here] if experiment.run.colocated else [here]
        for awake in filter(None, turns):
            yield _memory_at(gpu, f"GPU {gpu}", capacity, here, awake)


def _memory_at(
    where: int, name: str, capacity: int, here: Sequence[_User], awake: Sequence[_User]
) -> Memory:
    """Memory of a place in a turn of some of its users."""
    counts = {user.name: user.places.count(where) for user in here}
    computing = {user.name: user.needs for user in awake if counts[user.name]}
    parts = {user: counts[user] * needs.least for user, needs in computing.items()}
    asleep = sum(counts.values()) - sum(counts[user] for user in computing)
    if asleep:
        parts["asleep"] = asleep * _ASLEEP_BYTES
    activations = sum(counts[user] * needs.activations for user, needs in computing.items())
    return Memory(name, capacity, parts, activations, computing)


def memory_table(memories: Sequence[Memory]) -> Iterator[str]:
    """Lines of a table in GiB, at most 80 columns; places with the same needs share a line."""
    columns = ("weights", "grads", "optim", "others", "KV", "activ", "sum", "of")
    yield f"{'memory   GiB each':<24}" + "".join(f"{name:>7}" for name in columns)
    rows: dict[tuple[str, Needs, int], list[str]] = {}
    for memory in memories:
        for user, needs in memory.needs.items():
            rows.setdefault((user, needs, memory.capacity), []).append(memory.place)
    for (user, needs, capacity), places in rows.items():
        total = needs.least + needs.activations
        shown = [_short(size) for size in (*needs, total, capacity)]
        where = places[0] if len(places) == 1 else f"{places[0]} to {places[-1].split()[-1]}"
        where = where.replace(HOST, "host")
        yield f"{f'{user}, {where}':<24}" + "".join(f"{size:>7}" for size in shown)


def _short(size: int) -> str:
    return "-" if not size else gib(size) if size >= GIB // 100 else "<0.01"


def host_parts(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> HostParts:
    """Weights that the services of a run hold on the host, if all of them are there."""
    is_on_gpu = bool(_placed(experiment, len(machine.gpu_bytes)).servers)
    return HostParts(
        learner_host(experiment, model),
        weight_sync_host(experiment, model),
        server_host(experiment, model, is_on_gpu=is_on_gpu),
        experiment.cluster.num_inference_servers,
    )


def _users(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> list[_User]:
    ranks = experiment.learner.strategy_args.num_ranks
    placed, host = (
        _placed(experiment, len(machine.gpu_bytes)),
        host_parts(experiment, model, machine),
    )
    of_learner = placed.learner or (_HOST,) * ranks
    of_engines = tuple(gpu for gpus in placed.servers for gpu in gpus) or (_HOST,) * host.num_servers
    capacity = min(machine.gpu_bytes, default=0) if placed.servers else 0
    rank = rank_needs(experiment, model)
    engine = engine_needs(experiment, model, capacity)
    on_host = {
        "published weights": (host.published, 1),
        "older weights": (host.learner.private, 1),
        "staged versions": (host.server.total, host.num_servers),
    }
    if experiment.run.colocated and placed.learner and placed.servers:
        on_host["learner asleep"] = rank.least, len(placed.learner)
        on_host["engine asleep"] = engine.weights, len(of_engines)
    return [
        _User("learner", rank, of_learner),
        _User("engine", engine, of_engines),
        *(
            _User(name, Needs(others=size), (_HOST,) * count)
            for name, (size, count) in on_host.items()
            if size
        ),
    ]


def _placed(experiment: Experiment, num_gpus: int) -> GpuPlacement:
    if not num_gpus:
        return GpuPlacement()
    try:
        return place(GpuDemand.of(experiment), num_gpus, experiment.cluster.num_nodes)
    except PlacementError:  # a problem of its own; then everything is counted on the first GPU
        demand = GpuDemand.of(experiment)
        return GpuPlacement((0,) * min(demand.num_ranks, 1), ((0,),) * min(demand.num_servers, 1))


def gib(size: int) -> str:
    """Returns a size in GiB as text."""
    return f"{size / GIB:.1f}" if size >= GIB // 10 else f"{size / GIB:.2g}"
