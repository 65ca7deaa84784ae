"""GPUs of the learner's ranks and of the inference servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_cli.cluster.placement import GpuDemand, GpuPlacement, PlacementError, place
from tailrace_cli.cluster.plan import Site, service_specs
from tailrace_cli.cluster.servers import ServerAddresses
from tailrace_cli.experiment import load
from tailrace_cli.validation import check_experiment

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
ON_GPUS = ("learner.device=auto", "inference.device=auto")


@pytest.mark.parametrize(
    ("demand", "num_gpus", "expected"),
    [
        (GpuDemand(4, 4), 8, GpuPlacement((0, 1, 2, 3), ((4,), (5,), (6,), (7,)))),
        (GpuDemand(4, 2, 2), 8, GpuPlacement((0, 1, 2, 3), ((4, 5), (6, 7)))),
        (GpuDemand(2, 1, 2, inference_gpus=(0, 1)), 4, GpuPlacement((2, 3), ((0, 1),))),
        (GpuDemand(2, 1, 2, learner_gpus=(1, 3)), 4, GpuPlacement((1, 3), ((0, 2),))),
        (GpuDemand(2, 3, inference_gpus=(2, 3)), 4, GpuPlacement((0, 1), ((2,), (3,), (2,)))),
        (
            GpuDemand(8, 4, 2, is_colocated=True),
            8,
            GpuPlacement(tuple(range(8)), ((0, 1), (2, 3), (4, 5), (6, 7))),
        ),
        (GpuDemand(0, 2), 2, GpuPlacement((), ((0,), (1,)))),  # the learner computes on the CPU
        (GpuDemand(2, 0), 2, GpuPlacement((0, 1), ())),
        (GpuDemand(4, 4), 0, GpuPlacement()),  # no GPU is known
    ],
)  # fmt: skip
def test_ranks_and_servers_get_gpus_of_their_own(
    demand: GpuDemand, num_gpus: int, expected: GpuPlacement
) -> None:
    assert place(demand, num_gpus) == expected


def test_the_gpus_of_a_server_lie_on_one_node() -> None:
    placed = place(GpuDemand(3, 3, 4), 16, num_nodes=2)
    assert placed.learner == (0, 1, 2)
    assert placed.servers == ((3, 4, 5, 6), (8, 9, 10, 11), (12, 13, 14, 15))
    with pytest.raises(PlacementError, match="two nodes"):
        place(GpuDemand(1, 1, 4, inference_gpus=(6, 7, 8, 9)), 16, num_nodes=2)


def test_a_server_on_two_nodes_has_as_many_gpus_of_each() -> None:
    placed = place(GpuDemand(4, 2, 8, nodes_per_server=2), 32, num_nodes=4)
    assert placed.learner == (0, 1, 2, 3)
    assert placed.servers == ((4, 5, 6, 7, 8, 9, 10, 11), (16, 17, 18, 19, 24, 25, 26, 27))
    named = GpuDemand(0, 1, 4, inference_gpus=(6, 7, 8, 9), nodes_per_server=2)
    assert place(named, 16, num_nodes=2).servers == ((6, 7, 8, 9),)
    for gpus, reason in (((5, 6, 7, 8), "two nodes"), ((4, 5, 6, 7), r"1 node\(s\)")):
        unequal = GpuDemand(0, 1, 4, inference_gpus=gpus, nodes_per_server=2)
        with pytest.raises(PlacementError, match=f"{reason} .* 2 nodes, equally many"):
            place(unequal, 16, num_nodes=2)
    with pytest.raises(PlacementError, match=r"1 server\(s\) of 8 GPU\(s\) need 8"):
        place(GpuDemand(4, 1, 8, nodes_per_server=2), 16, num_nodes=1)


def test_a_learner_that_takes_turns_has_the_gpus_of_one_node() -> None:
    shared = GpuDemand(8, 2, 8, is_colocated=True)
    assert place(shared, 16, num_nodes=2).learner == tuple(range(8))
    with pytest.raises(PlacementError, match=r"^colocated: .* 16 ranks lie on 2 nodes of 8 GPUs"):
        place(GpuDemand(16, 2, 8, is_colocated=True), 16, num_nodes=2)


def test_64_gpus_on_8_nodes() -> None:
    placed = place(GpuDemand(32, 8, 4), 64, num_nodes=8)
    assert placed.learner == tuple(range(32))
    assert placed.servers == tuple(tuple(range(first, first + 4)) for first in range(32, 64, 4))


@pytest.mark.parametrize(
    ("demand", "num_gpus", "key", "reason"),
    [
        (GpuDemand(1, 1), 1, "cluster.num_inference_servers", r"need 1, the learner has 1 of 1"),
        (GpuDemand(4, 3, 2), 8, "cluster.num_inference_servers", r"3 server\(s\) of 2 GPU\(s\) need 6"),
        (GpuDemand(3, 0), 2, "learner.strategy_args.num_ranks", "3 ranks need a GPU each, and 2 of 2"),
        (GpuDemand(2, 1, inference_gpus=(0,)), 2, "learner.strategy_args.num_ranks", "1 of 2 are free"),
        (GpuDemand(1, 1, 1, (0,), (0,)), 2, "cluster.inference_gpus", "both have GPU 0"),
        (GpuDemand(2, 1, 2, (0, 1), (1, 2)), 0, "cluster.inference_gpus", "both have GPU 1"),
        (GpuDemand(1, 1, 1, (0,), (1,), True), 0, "colocated", "no GPU in common"),
        (GpuDemand(1, 1, 2, (), (1,)), 4, "cluster.inference_gpus", "names 1 GPUs, and each .* 2"),
        (GpuDemand(1, 1, 1, (), (1, 2)), 4, "cluster.inference_gpus", "raise .*servers to 2"),
        (GpuDemand(1, 1, 1, (4,)), 4, "cluster.learner_gpus", "asks for GPU 4, .* there are 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_names_the_setting(
    demand: GpuDemand, num_gpus: int, key: str, reason: str
) -> None:
    with pytest.raises(PlacementError, match=reason) as raised:
        place(demand, num_gpus)
    assert raised.value.key == key
    assert str(raised.value).startswith(f"{key}: ")


def test_no_gpu_is_given_twice_whatever_is_asked() -> None:
    for num_gpus in range(1, 9):
        for ranks in range(1, 9):
            for servers in range(1, 9):
                for size in (1, 2, 4):
                    fits = ranks + servers * size <= num_gpus
                    try:
                        placed = place(GpuDemand(ranks, servers, size), num_gpus)
                    except PlacementError:
                        assert not fits
                        continue
                    used = [*placed.learner, *(gpu for each in placed.servers for gpu in each)]
                    assert len(set(used)) == len(used) == ranks + servers * size
                    assert fits
                    assert max(used) < num_gpus


def test_an_overlap_is_refused_before_a_run_unless_they_are_colocated() -> None:
    shared = (*ON_GPUS, "cluster.learner_gpus=[0]", "cluster.inference_gpus=[0]")
    with pytest.raises(ConfigError, match=r"both have GPU 0.*set colocated: true"):
        check_experiment(load(EXAMPLE, shared))
    check_experiment(load(EXAMPLE, (*shared, "colocated=true")))


def test_each_child_sees_the_gpus_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,5,7")
    overrides = (
        *ON_GPUS,
        "inference.engine=vllm",
        "inference.tensor_parallel_size=2",
        "learner.strategy_args.num_ranks=2",
    )
    experiment = load(EXAMPLE, overrides)
    site = Site(
        Path("run/config.yaml"),
        Path("run/state"),
        ServerAddresses("", "", {}),
        1,
        placement=place(GpuDemand.of(experiment), 4),
    )
    seen = {spec.name: spec.env for spec in service_specs(experiment.cluster, 0, site)}
    assert seen["learner"]["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert seen["inference"]["CUDA_VISIBLE_DEVICES"] == "5,7"


def test_a_mapping_of_gpus_gives_as_many_servers_as_it_holds() -> None:
    roles = [
        "++actor_infer.strategy_args={strategy_name: vllm, tp_size: 2}",
        "++actor_infer.device_mapping=[4,5,6,7]",
        "++actor_train.device_mapping=[0,1]",
        *ON_GPUS,
    ]
    loaded = load(EXAMPLE, roles)
    assert place(GpuDemand.of(loaded), 8) == GpuPlacement((0, 1), ((4, 5), (6, 7)))
    with pytest.raises(ConfigError, match="3 GPUs are no multiple of the 2"):
        load(EXAMPLE, [roles[0], "++actor_infer.device_mapping=[4,5,6]"])
