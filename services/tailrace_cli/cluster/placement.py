"""GPUs of the learner's ranks and of each inference server (pure).

GPUs are numbered from 0 over all nodes of a run, node by node. A server's GPUs lie on one node, or
in equal parts on `nodes_per_server` ones.
Invariants: a rank has one GPU, a server `gpus_per_server`; learner and servers have no GPU in common,
unless they are colocated, then the learner is on one node; numbers that the experiment gives are never
changed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from tailrace_cli.config import ClusterConfig
from tailrace_cli.experiment import Experiment

Gpus = tuple[int, ...]


class PlacementError(ValueError):
    """The GPUs do not suffice, or two users claim one. Attribute: `key`, the setting to change."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key


@dataclass(frozen=True)
class GpuDemand:
    """GPUs that a run asks for. Counts are 0 for what computes on no GPU."""

    num_ranks: int = 0
    num_servers: int = 0
    gpus_per_server: int = 1
    learner_gpus: Gpus = ()  # given by number; empty: the first free ones
    inference_gpus: Gpus = ()  # given by number, server by server
    is_colocated: bool = False
    nodes_per_server: int = 1

    @classmethod
    def of(cls, experiment: Experiment) -> "GpuDemand":
        """Returns the demand of an experiment on a machine with GPUs."""
        cluster, learner, inference = experiment.cluster, experiment.learner, experiment.inference
        has_engines = inference.device != "cpu" or cluster.inference_gpus
        return cls(
            num_ranks=0 if learner.device == "cpu" else learner.strategy_args.num_ranks,
            num_servers=cluster.num_inference_servers if has_engines else 0,
            gpus_per_server=inference.gpus_per_server,
            nodes_per_server=inference.num_nodes,
            learner_gpus=cluster.learner_gpus,
            inference_gpus=cluster.inference_gpus,
            is_colocated=experiment.run.colocated,
        )


@dataclass(frozen=True)
class GpuPlacement:
    """GPUs of each process. An empty tuple: none are chosen, the process sees those of the run."""

    learner: Gpus = ()
    servers: tuple[Gpus, ...] = ()

    def of_server(self, index: int) -> Gpus:
        """GPUs of the server with this number."""
        return self.servers[index] if index < len(self.servers) else ()


def given_gpus(config: ClusterConfig, gpus_per_server: int = 1) -> GpuPlacement:
    """Returns the placement by the numbers in the `cluster` section alone."""
    demand = GpuDemand(
        num_servers=config.num_inference_servers,
        gpus_per_server=gpus_per_server,
        inference_gpus=config.inference_gpus,
    )
    return GpuPlacement(config.learner_gpus, _given_servers(demand))


def place(demand: GpuDemand, num_gpus: int, num_nodes: int = 1) -> GpuPlacement:
    """Places learner and servers on `num_gpus` GPUs, divided evenly over nodes.

    0 GPUs: none are known, and only given numbers are placed. Raises `PlacementError`.
    """
    per_node = max(num_gpus // num_nodes, 1)
    learner = demand.learner_gpus
    if not learner and num_gpus and demand.num_ranks:
        learner = _free_for_learner(demand, num_gpus)
    servers = _given_servers(demand)
    if not servers and num_gpus and demand.num_servers:
        servers = _free_for_servers(demand, learner, num_gpus, per_node)
    _check_known(learner, servers, num_gpus)
    if num_gpus:
        _check_nodes(servers, per_node, demand.nodes_per_server)
        _check_turns(demand, learner, per_node)
    _check_overlap(demand, learner, servers)
    return GpuPlacement(learner, servers)


def _given_servers(demand: GpuDemand) -> tuple[Gpus, ...]:
    """Servers on the given numbers, in turn if there are more servers than groups of GPUs."""
    size, gpus = demand.gpus_per_server, demand.inference_gpus
    if not gpus:
        return ()
    if len(gpus) % size:
        raise PlacementError(
            "cluster.inference_gpus",
            f"it names {len(gpus)} GPUs, and each server has {size} (inference.tensor_parallel_size "
            "x pipeline_parallel_size): name a multiple",
        )
    groups = list(_groups(gpus, size))
    if len(groups) > demand.num_servers:
        raise PlacementError(
            "cluster.inference_gpus",
            f"it names {len(gpus)} GPUs for {demand.num_servers} servers of {size}: raise "
            f"cluster.num_inference_servers to {len(groups)}",
        )
    return tuple(islice(cycle(groups), demand.num_servers))


def _free_for_learner(demand: GpuDemand, num_gpus: int) -> Gpus:
    taken = () if demand.is_colocated else demand.inference_gpus
    free = [gpu for gpu in range(num_gpus) if gpu not in taken]
    if len(free) < demand.num_ranks:
        raise PlacementError(
            "learner.strategy_args.num_ranks",
            f"{demand.num_ranks} ranks need a GPU each, and {len(free)} of {num_gpus} are free: lower "
            "it, or use learner.device cpu",
        )
    return tuple(free[: demand.num_ranks])


def _free_for_servers(
    demand: GpuDemand, learner: Gpus, num_gpus: int, per_node: int
) -> tuple[Gpus, ...]:
    size, wanted = demand.gpus_per_server, demand.num_servers
    taken = () if demand.is_colocated else learner
    nodes = (range(first, first + per_node) for first in range(0, num_gpus, per_node))
    free = [[gpu for gpu in node if gpu not in taken] for node in nodes]
    groups = list(_over_nodes(free, size, demand.nodes_per_server))
    if len(groups) < wanted:
        remedy = "lower one of them, or let learner and servers share GPUs (colocated: true)"
        raise PlacementError(
            "cluster.num_inference_servers",
            f"{wanted} server(s) of {size} GPU(s) need {wanted * size}, the learner has {len(taken)} "
            f"of {num_gpus} and {sum(map(len, free))} are free: {remedy}",
        )
    return tuple(groups[:wanted])


def _over_nodes(free: Sequence[Sequence[int]], size: int, num_nodes: int) -> Iterator[Gpus]:
    """Groups of `size` GPUs, with an equal part on each of `num_nodes` nodes that follow each other."""
    for first in range(0, len(free) - num_nodes + 1, num_nodes):
        parts = [_groups(node, size // num_nodes) for node in free[first : first + num_nodes]]
        for each in zip(*parts, strict=False):
            yield tuple(chain.from_iterable(each))


def _groups(gpus: Sequence[int], size: int) -> Iterator[Gpus]:
    for first in range(0, len(gpus) - size + 1, size):
        yield tuple(gpus[first : first + size])


def _check_known(learner: Gpus, servers: Sequence[Gpus], num_gpus: int) -> None:
    named = {"learner_gpus": learner, "inference_gpus": [gpu for each in servers for gpu in each]}
    for key, gpus in named.items():
        if num_gpus and gpus and max(gpus) >= num_gpus:
            raise PlacementError(
                f"cluster.{key}",
                f"it asks for GPU {max(gpus)}, counted from 0, and there are {num_gpus}: name fewer",
            )


def _check_nodes(servers: Sequence[Gpus], per_node: int, num_nodes: int) -> None:
    for gpus in servers:
        parts = Counter(gpu // per_node for gpu in gpus)
        if len(parts) != num_nodes or len(set(parts.values())) > 1:
            on = "two nodes" if len(parts) == 2 else f"{len(parts)} node(s)"
            wanted = "one node" if num_nodes == 1 else f"{num_nodes} nodes, equally many of each"
            raise PlacementError(
                "cluster.inference_gpus",
                f"the server on GPUs {_listed(gpus)} would lie on {on} of {per_node} GPUs: name "
                f"GPUs of {wanted}",
            )


def _check_turns(demand: GpuDemand, learner: Gpus, per_node: int) -> None:
    """Turns are those of one machine: servers of others would never sleep."""
    num_nodes = len({gpu // per_node for gpu in learner})
    if demand.is_colocated and num_nodes > 1:
        raise PlacementError(
            "colocated",
            f"the learner takes turns with servers of one machine, and its {len(learner)} ranks lie on "
            f"{num_nodes} nodes of {per_node} GPUs: give it fewer ranks, or set colocated: false and "
            "give servers GPUs of their own",
        )


def _check_overlap(demand: GpuDemand, learner: Gpus, servers: Sequence[Gpus]) -> None:
    of_servers = {gpu for gpus in servers for gpu in gpus}
    shared = sorted(of_servers & set(learner))
    if shared and not demand.is_colocated:
        raise PlacementError(
            "cluster.inference_gpus",
            f"learner and inference servers both have GPU {_listed(shared)}: give each its own, or set "
            "colocated: true",
        )
    if demand.is_colocated and learner and of_servers and not shared:
        raise PlacementError(
            "colocated",
            "learner and inference servers have no GPU in common: remove it, or let them share",
        )


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))
