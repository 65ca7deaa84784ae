"""Comparison of an experiment with a model, prompts and a machine, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace_cli.experiment import Experiment, load
from tailrace_cli.loading import fitting
from tailrace_cli.loading.facts import MachineFacts, ModelFacts, PromptFacts
from tailrace_cli.loading.memory import GIB, memory_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
MODEL = ModelFacts(
    name="big",
    context_tokens=4096,
    num_parameters=10**9,
    vocab_size=1000,
    hidden_size=100,
    num_layers=10,
    kv_width=2000,
)


def experiment(*overrides: str) -> Experiment:
    return load(EXAMPLE, overrides)


def machine(host_gib: float, *gpu_gib: float, shm_gib: float = 1000.0) -> MachineFacts:
    gpus = tuple(int(gib * GIB) for gib in gpu_gib)
    return MachineFacts(host_bytes=int(host_gib * GIB), shm_bytes=int(shm_gib * GIB), gpu_bytes=gpus)


def test_the_host_holds_every_process_without_a_gpu() -> None:
    chosen = experiment("cluster.num_inference_servers=2", "inference.kv_cache_tokens=65536")
    (host,) = memory_of(chosen, MODEL, machine(100))
    assert host.place == "this machine"
    assert host.parts == {
        "learner": 16 * 10**9,  # weights, gradients and two moments
        "engine": 2 * 4 * (2 * 10**9 + 65536 * 2000),  # each: two sets of weights, and the cache
        "published weights": 4 * 4 * 10**9,  # in the learner, two kept ones and one that arrives
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["learner.lora={r: 4}"], 4 + 16 * 24_000 / 10**9),  # and all of the adapters
        (["learner.training_args.optimizer=sgd"], 8),
        (["learner.init_kl_coef=0.1"], 20),
        (["learner.init_kl_coef=0.1", "learner.model_args.dtype=bfloat16"], 18),
        (["learner.init_kl_coef=0.1", "++learner.reference.offload=true"], 16),
        (["learner.strategy_args.num_ranks=4"], 16),
    ],
)
def test_the_learner_holds_what_its_settings_ask_for(overrides: list[str], expected: float) -> None:
    (host,) = memory_of(experiment(*overrides), MODEL, machine(100))
    assert host.parts["learner"] == round(expected * 10**9)


def test_processes_are_counted_where_they_compute() -> None:
    overrides = (
        "inference.device=auto",
        "learner.strategy_args.num_ranks=2",
        "cluster.num_inference_servers=3",
    )
    spread = experiment(*overrides, "cluster.inference_gpus=[2,3]")
    host, *gpus = memory_of(spread, MODEL, machine(100, 80, 80, 80, 80))
    assert {gpu.place: [name for name, size in gpu.parts.items() if size] for gpu in gpus} == {
        "GPU 0": ["learner"],
        "GPU 1": ["learner"],
        "GPU 2": ["engine"],
        "GPU 3": ["engine"],
    }
    assert gpus[2].parts["engine"] == 2 * gpus[3].parts["engine"]
    assert gpus[0].parts["learner"] == 8 * 10**9
    assert host.parts["learner"] == host.parts["engine"] == 0


def test_memory_that_must_be_there_is_a_problem_and_memory_that_may_be_needed_a_note() -> None:
    chosen = experiment()
    (host,) = memory_of(chosen, MODEL, machine(1))
    least, more = host.least / GIB, (host.least + host.activations) / GIB
    too_small = fitting.check_memory(chosen, MODEL, machine(0.9 * least))
    tight = fitting.check_memory(chosen, MODEL, machine((least + more) / 2))
    roomy = fitting.check_memory(chosen, MODEL, machine(1.1 * more))
    assert [len(found.problems) for found in (too_small, tight, roomy)] == [1, 0, 0]
    assert [len(found.notes) for found in (too_small, tight, roomy)] == [0, 1, 0]
    assert "big (1,000,000,000 parameters) needs at least" in too_small.problems[0]
    assert "learner 14.9" in too_small.problems[0]
    assert "max_tokens_per_micro_batch" in tight.notes[0]
    (shm,) = fitting.check_memory(chosen, MODEL, machine(1000, shm_gib=1)).problems
    assert "weight_sync.keep_versions" in shm
    assert "--shm-size" in shm


@pytest.mark.parametrize(
    ("overrides", "gpus", "problem"),
    [
        (["learner.device=cuda"], 0, "learner.device: torch sees no CUDA device"),
        (["inference.device=cuda"], 0, "inference.device: torch sees no CUDA device"),
        (
            ["inference.device=auto", "inference.gpu_memory_utilization=0.8"],
            0,
            "gpu_memory_utilization: it needs",
        ),
        (["cluster.inference_gpus=[3]"], 2, "cluster.inference_gpus: it asks for GPU 3"),
        (["cluster.num_gpus_per_node=3"], 2, "cluster.num_gpus_per_node: it asks for GPU 2"),
        (["learner.strategy_args.num_ranks=3"], 2, "num_ranks: 3 ranks need a GPU each"),
        (["learner.strategy_args.num_ranks=3", "learner.device=cpu"], 2, ""),
        (["cluster.inference_gpus=[1]", "inference.device=cuda"], 2, ""),
    ],
)
def test_devices_are_those_of_the_machine(overrides: list[str], gpus: int, problem: str) -> None:
    found = fitting.check_devices(experiment(*overrides), machine(100, *[80.0] * gpus))
    assert bool(found.problems) == bool(problem)
    assert all(problem in each for each in found.problems)


def test_what_cannot_be_used_up_or_divided_is_noted() -> None:
    prompt = PromptFacts(tag="frozen_lake", place="the first observation", num_tokens=100)
    lengths = fitting.check_lengths(experiment("inference.max_model_len=8192"), MODEL, [prompt])
    assert lengths.problems == []
    assert [note.partition(":")[0] for note in lengths.notes] == [
        "inference.max_model_len",
        "agents.generating_args.max_new_tokens",
    ]
    few = PromptFacts(tag="frozen_lake", place="rows.jsonl:1", num_rows=3)
    uneven = experiment("learner.num_mini_batches=3", "scheduler.eval_tags=[frozen_lake]")
    groups = fitting.check_groups(uneven, [few])
    assert groups.problems == []
    assert [note.partition(":")[0] for note in groups.notes] == [
        "learner.num_mini_batches",
        "agents.datasets.frozen_lake",
        "agents.datasets.frozen_lake",
    ]
    wide = experiment("group_size=2", "groups_per_step=1", "learner.strategy_args.num_ranks=4")
    assert "a mini-batch has 2 episodes for 4 ranks" in fitting.check_groups(wide, []).notes[0]
