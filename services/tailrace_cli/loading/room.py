"""Number of runs like one that this machine can hold at once, and the GPUs of each (pure)."""

from collections.abc import Iterator
from typing import NamedTuple

from tailrace_cli.cluster.placement import GpuDemand
from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.facts import MachineFacts, ModelFacts
from tailrace_cli.loading.memory import HOST, memory_of

_SERVICES_BYTES = 2 << 30  # of the processes of a run, beside the model


class RunRoom(NamedTuple):
    """Runs that fit at once, at least one, and what there is no more of."""

    num_runs: int
    limit: str


def room_for(
    experiment: Experiment, model: ModelFacts | None, machine: MachineFacts, num_cores: int
) -> RunRoom:
    """Room of a machine for runs like this one."""
    rooms = [RunRoom(count, limit) for limit, count in _counts(experiment, model, machine, num_cores)]
    smallest = min(rooms)
    return RunRoom(max(1, smallest.num_runs), smallest.limit)


def _counts(
    experiment: Experiment, model: ModelFacts | None, machine: MachineFacts, num_cores: int
) -> Iterator[tuple[str, int]]:
    servers = experiment.cluster.num_inference_servers
    processes = experiment.learner.strategy_args.num_ranks + servers
    yield "processors", num_cores // (processes * experiment.cluster.num_threads)
    if model is not None:
        for memory in memory_of(experiment, model, machine):
            if memory.place == HOST and memory.capacity:
                needed = memory.least + memory.activations + _SERVICES_BYTES
                yield "memory", memory.capacity // needed
    if num_gpus := _num_gpus(experiment, machine):
        yield "GPUs", len(machine.gpu_bytes) // num_gpus


def gpu_shares(experiment: Experiment, machine: MachineFacts, num_runs: int) -> list[tuple[int, ...]]:
    """GPUs of each of `num_runs` at once; none where all see the same ones."""
    needed, num_gpus = _num_gpus(experiment, machine), len(machine.gpu_bytes)
    each = num_gpus // num_runs
    if not needed or each < needed:
        return []
    return [tuple(range(place * each, (place + 1) * each)) for place in range(num_runs)]


def _num_gpus(experiment: Experiment, machine: MachineFacts) -> int:
    """GPUs that a run takes for itself; 0: it takes none, or names them by number."""
    demand = GpuDemand.of(experiment)
    if not machine.gpu_bytes or demand.learner_gpus or demand.inference_gpus:
        return 0
    of_servers = demand.num_servers * demand.gpus_per_server
    if demand.is_colocated:
        return max(demand.num_ranks, of_servers)
    return demand.num_ranks + of_servers
