"""Rules for GPUs of ROLL: roles whose `device_mapping` names the same GPU take turns on it."""

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import Lookup
from tailrace.config.settings.actor_train import ranks_on
from tailrace.config.settings.tables import servers_on
from tailrace.config.settings.values import devices

ROLES = ("actor_train.device_mapping", "actor_infer.device_mapping")


def engines(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    """GPUs of the engines, and whether the learner shares one of them."""
    return {**servers_on(mapping, lookup), **_machines(lookup)}


def ranks(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    """GPUs of the learner's ranks."""
    return {**ranks_on(mapping, lookup), **_machines(lookup)}


def _machines(lookup: Lookup) -> Mapping[str, Any]:
    """As many nodes as the highest GPU asks for, and turns on what both roles name."""
    learner, engine = (_gpus(lookup(name)) for name in ROLES)
    per_node, highest = lookup("cluster.num_gpus_per_node"), max((*learner, *engine), default=0)
    ours: dict[str, Any] = {"colocated": True} if set(learner) & set(engine) else {}
    if isinstance(per_node, int) and 0 < per_node <= highest:
        ours["cluster.num_nodes"] = highest // per_node + 1
    return ours


def _gpus(mapping: Any) -> list[int]:
    """The GPUs of a role; none if it names none, of which the rule of that role speaks."""
    try:
        return [] if mapping is None else devices(mapping)
    except ValueError:
        return []
