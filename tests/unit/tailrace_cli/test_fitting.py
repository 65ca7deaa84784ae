"""Comparison of an experiment with a model, prompts and a machine, in numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tailrace_cli.experiment import Experiment, load
from tailrace_cli.loading import fitting
from tailrace_cli.loading.facts import MachineFacts, ModelFacts, PromptFacts
from tailrace_cli.loading.host_needs import NUM_STAGED
from tailrace_cli.loading.memory import GIB, memory_of
from tailrace_inference.adapters.staging import NUM_FILES

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


GAE = ("learner.adv_estimator=gae",)


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
        "older weights": 2 * 4 * 10**9,  # of the last two steps, in which servers' tokens are read
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
        (["learner.num_mini_batches=2"], 20),  # and the weights at a step's start
        (["learner.num_mini_batches=2", "learner.proximal_logprobs=interpolate"], 16),
        (["learner.num_mini_batches=2", "++learner.critic.value_clip=0.2", *GAE], 40),
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
    assert host.parts.keys() == {"published weights", "older weights"}


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


VLLM = ("learner.device=auto", "inference.device=auto", "inference.engine=vllm")


def test_a_server_that_stages_files_holds_two_in_shared_memory_and_a_copy() -> None:
    assert NUM_STAGED == NUM_FILES
    chosen = experiment(*VLLM, "cluster.num_inference_servers=2", "learner.model_args.dtype=bfloat16")
    host = next(iter(memory_of(chosen, MODEL, machine(100, 80, 80, 80))))
    assert host.parts["staged versions"] == 2 * 3 * 2 * 10**9
    published = host.parts["published weights"]
    least = (published + 2 * 2 * 2 * 10**9) / GIB
    (full,) = fitting.check_memory(
        chosen, MODEL, machine(100, 80, 80, 80, shm_gib=least - 0.1)
    ).problems
    assert "of which servers stage 7.5" in full
    assert "lower keep_versions or the number of servers" in full
    roomy = machine(100, 80, 80, 80, shm_gib=least + 0.1)
    assert fitting.check_memory(chosen, MODEL, roomy).problems == []


def test_on_a_shared_gpu_each_turn_has_to_fit_and_the_host_holds_those_that_sleep() -> None:
    turns = (*VLLM, "colocated=true", "inference.gpu_memory_utilization=0.85")
    big = msgspec.structs.replace(MODEL, num_parameters=4 * 10**9)
    host, learner, engine = memory_of(experiment(*turns), big, machine(500, 80))
    assert learner.parts == {"learner": 64 * 10**9, "asleep": GIB}
    assert engine.parts.keys() == {"engine", "asleep"}
    assert host.parts["learner asleep"] == 64 * 10**9
    assert host.parts["engine asleep"] == engine.needs["engine"].weights
    assert fitting.check_memory(experiment(*turns), big, machine(500, 80)).problems == []
    (small,) = fitting.check_memory(experiment(*turns), big, machine(500, 48)).problems
    assert "of GPU 0, which has 48.0 (learner 59.6, asleep 1.0)" in small


def test_a_share_that_an_engine_would_refuse_is_refused_by_name() -> None:
    big = msgspec.structs.replace(MODEL, num_parameters=4 * 10**9)
    for share, is_refused in ((0.09, True), (0.5, False)):
        chosen = experiment(*VLLM, "colocated=true", f"inference.gpu_memory_utilization={share}")
        problems = fitting.check_memory(chosen, big, machine(500, 80)).problems
        assert [each.startswith("inference.gpu_memory_utilization: 0.09") for each in problems] == (
            [True] if is_refused else []
        )


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


def test_rows_that_only_built_in_loops_play_need_a_score_whatever_loops_are_defined() -> None:
    settings = ("agents.datasets.sums.path=sums.jsonl", "scheduler.tags=[sums]", "reward.rewards=[]")
    chosen = experiment(*settings, "agents.agent_loops.adder=my_loops:Adder")
    for loops, is_refused in (
        (("single_turn_agent",), True),
        (("adder", "tool_agent"), False),
        ((), False),  # the rows could not be read
    ):
        facts = PromptFacts(tag="sums", place="sums.jsonl:1", loops=loops)
        problems = fitting.check_scored(chosen, [facts]).problems
        assert bool(problems) == is_refused
        assert all("nothing scores the rows of agents.datasets.sums" in each for each in problems)


def test_a_temperature_that_the_engine_refuses_is_found_before_the_run() -> None:
    cold = (
        "agents.generating_args.temperature=0.005",
        "evaluations={quiet: {tag: frozen_lake, temperature: 0}}",
    )
    assert not fitting.check_temperatures(experiment(*cold)).problems
    (problem,) = fitting.check_temperatures(experiment("inference.engine=vllm", *cold)).problems
    assert problem.startswith(
        "agents.generating_args.temperature: 0.005 is too low for the engine vllm"
    )
    assert "at least 0.01" in problem


def test_prompts_and_rows_of_a_named_evaluation_are_compared() -> None:
    named = "evaluations={held_out: {tag: sums, num_tasks: 9, max_new_tokens: 4000}, sums: {}}"
    chosen = experiment("agents.datasets.sums.path=s.jsonl", "scheduler.eval_tags=[]", named)
    longest = chosen.agents.max_episode_tokens
    (problem,) = fitting.check_lengths(
        chosen, MODEL, [PromptFacts(tag="sums", place="s.jsonl:2", num_tokens=longest)]
    ).problems
    assert "leaves no room for a reply to agents.datasets.sums, s.jsonl:2" in problem
    (note,) = fitting.check_lengths(
        chosen, MODEL, [PromptFacts(tag="sums", place="s.jsonl:2", num_tokens=100)]
    ).notes
    assert note.startswith("evaluations.held_out.max_new_tokens: 4000 cannot be used up")
    few = PromptFacts(tag="sums", place="s.jsonl:1", num_rows=3)
    notes = fitting.check_groups(chosen, [few]).notes
    assert [note.partition(" rows, and ")[2].partition(" (")[0] for note in notes] == [
        "evaluations.held_out.num_tasks",
        "scheduler.eval_groups",
    ]


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
