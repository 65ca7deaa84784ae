"""Rules for verl's GPUs, which all roles share or learner and engines have apart, and for its steps.

Trainers with engines apart (`one_step_off_policy`, `fully_async_policy`) count their steps in
mini-batches: `async_training` says how many they train between two publications of weights.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tailrace.config.settings import Lookup, NoEffectError
from tailrace.config.settings.values import check_gpus, whole_number, whole_number_at
from tailrace_cli.importing.verl.loss import ACTOR
from tailrace_cli.importing.verl.rules import ROLLOUT

ASYNC = "async_training"
GPUS = (
    "cluster.num_gpus_per_node",
    "learner.strategy_args.num_ranks",
    "cluster.num_inference_servers",
    "colocated",
    "cluster.learner_gpus",
    "cluster.inference_gpus",
    "cluster.num_nodes",
)
_USUAL_GPUS = 8  # of a node, without a number
_SYNC_STEPS = 4  # `trigger_parameter_sync_step` without a number


class _Nodes(NamedTuple):
    """Nodes of a role, and the GPUs that it has on each."""

    nodes: int
    gpus: int


def gpus(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """A rank on every GPU of the trainer, and engines on the same ones, or on their own."""
    learner = _Nodes(whole_number_at("trainer.nnodes", lookup, 1), whole_number(count, 0, 1024))
    check_gpus(learner.nodes * learner.gpus)
    engines = _engines(lookup)
    if engines is not None:
        return _apart(learner, engines, lookup)
    ours: dict[str, Any] = {"cluster.num_gpus_per_node": learner.gpus}
    total = learner.nodes * learner.gpus
    if total < 2:
        return ours
    size = _engine_size(lookup)
    if learner.gpus % size:
        raise ValueError(f"is no multiple of the {size} GPUs of one engine")
    return ours | {
        "colocated": True,
        "learner.strategy_args.num_ranks": total,
        "cluster.num_inference_servers": total // size,
        "cluster.learner_gpus": list(range(total)),
        "cluster.inference_gpus": list(range(total)),
    }


def nodes(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Machines of the run, unless the GPUs of the engines give their number too."""
    given = lookup("cluster.num_nodes") is not None
    return {} if given else {"cluster.num_nodes": whole_number(count)}


def _engines(lookup: Lookup) -> _Nodes | None:
    """Nodes and GPUs that only engines have; None if they share those of the trainer."""
    if lookup("rollout.n_gpus_per_node") is not None or lookup("rollout.nnodes") is not None:
        return _Nodes(
            whole_number_at("rollout.nnodes", lookup, 1),
            whole_number_at("rollout.n_gpus_per_node", lookup, _USUAL_GPUS),
        )
    if lookup(f"{ROLLOUT}.nnodes"):
        usual = lookup("trainer.n_gpus_per_node", _USUAL_GPUS)
        return _Nodes(
            whole_number_at(f"{ROLLOUT}.nnodes", lookup),
            whole_number_at(f"{ROLLOUT}.n_gpus_per_node", lookup, usual),
        )
    return None


def _apart(learner: _Nodes, engines: _Nodes, lookup: Lookup) -> Mapping[str, Any]:
    """Each role on a part of every node, or on nodes of its own."""
    together = learner.gpus + engines.gpus
    splits = learner.nodes == engines.nodes and (
        learner.gpus != engines.gpus or together <= _USUAL_GPUS
    )
    if not splits and learner.gpus != engines.gpus:
        raise ValueError(
            f"{learner.gpus} GPUs of a node learn and {engines.gpus} of another generate: the nodes of "
            "a run have equally many: give cluster.learner_gpus and cluster.inference_gpus"
        )
    per_node = together if splits else learner.gpus
    first = learner.gpus if splits else learner.gpus * learner.nodes
    size = _engine_size(lookup)
    if engines.gpus % size:
        raise ValueError(f"{engines.gpus} GPUs of engines are no multiple of the {size} of one engine")
    check_gpus(engines.nodes * engines.gpus)
    return {
        "cluster.num_gpus_per_node": per_node,
        "cluster.num_nodes": learner.nodes if splits else learner.nodes + engines.nodes,
        "learner.strategy_args.num_ranks": learner.nodes * learner.gpus,
        "cluster.num_inference_servers": engines.nodes * engines.gpus // size,
        "cluster.learner_gpus": _numbers(learner, per_node, 0),
        "cluster.inference_gpus": _numbers(engines, per_node, first),
    }


def _numbers(role: _Nodes, per_node: int, first: int) -> list[int]:
    return [first + node * per_node + gpu for node in range(role.nodes) for gpu in range(role.gpus)]


def _engine_size(lookup: Lookup) -> int:
    if lookup("inference.engine", "torch") == "torch":
        return 1
    sizes = (f"{ROLLOUT}.{name}_model_parallel_size" for name in ("tensor", "pipeline"))
    return math.prod(whole_number(lookup(name, 1)) for name in sizes)


def hybrid(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Engines on the trainer's GPUs, or apart: then they generate the next step meanwhile."""
    if used:
        return {}
    if _engines(lookup) is None:
        raise ValueError("engines have GPUs of their own: give cluster.inference_gpus")
    return {} if is_async(lookup) else {"max_staleness": 1}


def is_async(lookup: Lookup) -> bool:
    """Holds if steps are counted in mini-batches."""
    return lookup(ASYNC) is not None


def staleness(share: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Publications by which a sample may be late: a share of a step's samples may be of the last."""
    if not (isinstance(share, int | float) and 0 <= share < math.inf):
        raise ValueError("expected a share of the samples of a step, from 0 on")
    return {"max_staleness": math.ceil(share)}


def groups(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Groups of a step, unless mini-batches count."""
    if is_async(lookup):
        raise NoEffectError("async_training counts steps in mini-batches")
    return {"groups_per_step": count}


def updates(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Number of updates of a step; verl counts the rows of both in prompts."""
    rows = whole_number(rows)
    if is_async(lookup):
        count = _updates_of_a_step(lookup)
        return {"learner.num_mini_batches": count, "groups_per_step": rows * count}
    groups_of_step = lookup("data.train_batch_size")
    if not groups_of_step or groups_of_step % rows:
        raise ValueError(f"does not divide data.train_batch_size ({groups_of_step})")
    return {"learner.num_mini_batches": int(groups_of_step) // rows}


def _updates_of_a_step(lookup: Lookup) -> int:
    """Mini-batches between two publications of weights."""
    batches = whole_number_at(f"{ASYNC}.require_batches", lookup, 1)
    return batches * whole_number_at(f"{ASYNC}.trigger_parameter_sync_step", lookup, _SYNC_STEPS)


def steps(prompts: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Steps of a run that ends after a number of prompts."""
    rows = whole_number_at(f"{ACTOR}.ppo_mini_batch_size", lookup)
    return {"max_steps": math.ceil(whole_number(prompts) / (rows * _updates_of_a_step(lookup)))}


def sets_steps(lookup: Lookup) -> bool:
    """Holds if the number of steps is given, so that epochs do not count."""
    names = ("trainer.total_training_steps", "rollout.total_rollout_steps")
    return any(lookup(name) is not None for name in names)
