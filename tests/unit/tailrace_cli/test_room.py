"""Runs of a sweep that fit a machine at once, and the GPUs of each."""

from __future__ import annotations

import pytest

from tailrace_cli.loading.room import RunRoom, gpu_shares, room_for
from tests.unit.tailrace_cli.test_fitting import MODEL, experiment, machine

ON_GPUS = ("learner.device=auto", "inference.device=auto", "learner.strategy_args.num_ranks=2")
ON_CPU = ("learner.device=cpu", "inference.device=cpu")


@pytest.mark.parametrize(
    ("overrides", "host_gib", "gpus", "num_cores", "room"),
    [
        ((*ON_CPU, "cluster.num_threads=1"), 1000, (), 8, RunRoom(4, "processors")),
        ((*ON_CPU, "cluster.num_threads=3"), 1000, (), 8, RunRoom(1, "processors")),
        ((*ON_CPU, "cluster.num_threads=1"), 130, (), 64, RunRoom(2, "memory")),
        ((*ON_CPU, "cluster.num_threads=1"), 1, (), 64, RunRoom(1, "memory")),
        ((*ON_GPUS, "cluster.num_inference_servers=2"), 1000, (80,) * 8, 64, RunRoom(2, "GPUs")),
        ((*ON_GPUS, "colocated=true"), 1000, (80,) * 8, 64, RunRoom(4, "GPUs")),
        ((*ON_GPUS, "cluster.learner_gpus=[0,1]"), 1000, (80,) * 8, 64, RunRoom(21, "processors")),
    ],
)
def test_what_a_machine_lacks_first_limits_the_runs_at_once(
    overrides: tuple[str, ...], host_gib: float, gpus: tuple[int, ...], num_cores: int, room: RunRoom
) -> None:
    made = experiment(*overrides)
    assert room_for(made, MODEL, machine(host_gib, *gpus), num_cores) == room


def test_runs_at_once_have_gpus_of_their_own_where_these_suffice() -> None:
    made = experiment(*ON_GPUS)
    assert gpu_shares(made, machine(100, *(80,) * 8), 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert gpu_shares(made, machine(100, *(80,) * 4), 2) == []
    assert gpu_shares(experiment(*ON_CPU), machine(100, *(80,) * 8), 2) == []
    assert gpu_shares(experiment(*ON_GPUS, "cluster.learner_gpus=[6,7]"), machine(9, 80), 1) == []
