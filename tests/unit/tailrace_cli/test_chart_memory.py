"""Memory that the chart's values for GPUs give to pods, against the weights that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace_cli.experiment import decode
from tailrace_cli.loading.facts import ModelFacts
from tailrace_cli.loading.host_needs import HostNeeds, learner_host, server_host, weight_sync_host
from tailrace_cli.loading.memory import GIB

VALUES = Path(__file__).parents[3] / "helm" / "tailrace" / "values"
MODELS = {"node-8gpu": 7_615_616_512, "cluster-64gpu": 32_763_876_352}
ROOM = 4 * GIB  # in /dev/shm, for what the processes of an engine or NCCL share
BESIDE = 8 * GIB  # of a service's processes


def size(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) * GIB


def lacks(values: dict[str, Any], needs: HostNeeds) -> list[str]:
    """Values of a pod that are too small."""
    asked, limit = (size(values["resources"][kind]["memory"]) for kind in ("requests", "limits"))
    found = {
        "shm": size(values["shm"]) >= needs.shared + ROOM,
        "requests": asked >= needs.total + BESIDE,
        "limits": limit >= max(asked, size(values["shm"]) + needs.private + BESIDE),
    }
    return [key for key, is_enough in found.items() if not is_enough]


@pytest.mark.parametrize("name", MODELS)
def test_pods_have_room_for_the_copies_of_the_weights_that_they_hold(name: str) -> None:
    values = yaml.safe_load((VALUES / f"{name}.yaml").read_text())
    experiment = decode(values["experiment"], f"{name}.yaml")
    model = ModelFacts(name=name, num_parameters=MODELS[name])
    pool, learner = values["inference"]["pools"]["default"], values["learner"]
    assert lacks(values["weight_sync"], weight_sync_host(experiment, model)) == []
    assert lacks(pool, server_host(experiment, model, is_on_gpu=True, is_remote=True)) == []
    nodes = learner.get("nodes", 1)
    held = learner_host(experiment, model)
    saved = 12 * model.num_parameters  # a checkpoint: master weights and two moments, on the first node
    assert lacks(learner, HostNeeds(held.shared, held.private // nodes + saved)) == []
    ranks = experiment.learner.strategy_args.num_ranks // nodes
    at_start = ranks * 4 * model.num_parameters  # each rank has the model in float32
    assert size(learner["resources"]["requests"]["memory"]) >= at_start
