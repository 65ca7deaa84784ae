"""Defaults for runs on GPUs, and the examples for many of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from tailrace.config import ConfigError
from tailrace_cli.commands.validate import Target
from tailrace_cli.experiment import Experiment, decode, load, with_values
from tailrace_cli.loading.checks import combined
from tailrace_cli.loading.facts import Loaded, MachineFacts, ModelFacts, Step
from tailrace_cli.loading.gpu_defaults import gpu_defaults
from tailrace_cli.loading.memory import GIB
from tailrace_cli.loading.process import Loader
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.hf_engine import hf_engine
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_cli.test_memory import SEVEN
from tests.unit.tailrace_inference.harness import config_json

EXAMPLES = Path(__file__).parents[3] / "examples"
PLAIN = {"exp_name": "a", "pretrain": "owner/seven", "scheduler": {"tags": ["lake"]}}
LAKE = {"agents": {"custom_envs": {"lake": {"env_type": "frozen_lake"}}}}


def experiment(**sections: object) -> Experiment:
    return decode({**PLAIN, **LAKE, **sections}, "run.yaml")


def gpus(count: int, gib: float) -> tuple[int, ...]:
    return (int(gib * GIB),) * count


def test_a_7b_model_on_8_gpus() -> None:
    chosen = experiment(inference={"engine": "vllm"}, learner={"max_tokens_per_micro_batch": 16384})
    assert gpu_defaults(chosen, SEVEN, gpus(8, 80)) == {
        "learner.model_args.dtype": "bfloat16",
        "learner.strategy_args.num_ranks": 4,
        "cluster.num_inference_servers": 4,
        "learner.model_args.disable_gradient_checkpointing": False,
        "inference.gpu_memory_utilization": 0.85,
    }


@pytest.mark.parametrize("engine", ["hf", "my_module:MyEngine"])
def test_an_engine_gets_no_default_that_it_may_refuse(engine: str) -> None:
    features = hf_engine(
        ModelCard(config_json(), {}), InferenceConfig(engine="hf", device="cpu")
    ).features
    found = gpu_defaults(experiment(inference={"engine": engine}), SEVEN, gpus(8, 80))
    chosen = {key.removeprefix("inference.") for key in found if key.startswith("inference.")}
    assert not chosen & set(features.unread_settings)
    assert found["cluster.num_inference_servers"] == 4


def test_adapters_leave_room_for_activations() -> None:
    chosen = experiment(learner={"lora": {"r": 16}, "max_tokens_per_micro_batch": 2048})
    found = gpu_defaults(chosen, SEVEN, gpus(8, 80))
    assert found["learner.strategy_args.num_ranks"] == 4
    assert "learner.model_args.disable_gradient_checkpointing" not in found


def test_one_gpu_is_shared_and_the_engine_has_it_while_the_learner_sleeps() -> None:
    """A model whose learner takes most of the GPU left an engine less than its weights."""
    four = msgspec.structs.replace(SEVEN, num_parameters=4_000_000_000)
    found = gpu_defaults(experiment(), four, gpus(1, 80))
    assert found["colocated"] is True
    assert found["inference.gpu_memory_utilization"] == 0.85


def test_engines_that_can_are_cut_where_one_gpu_does_not_hold_the_model() -> None:
    large = msgspec.structs.replace(SEVEN, num_parameters=32_000_000_000)
    cut = gpu_defaults(experiment(inference={"engine": "vllm"}), large, gpus(16, 80))
    assert cut["inference.tensor_parallel_size"] == 2
    whole = gpu_defaults(experiment(), large, gpus(16, 80))
    assert "inference.tensor_parallel_size" not in whole


def test_what_the_experiment_gives_is_never_replaced() -> None:
    given = experiment(
        learner={
            "model_args": {"dtype": "float32", "disable_gradient_checkpointing": True},
            "strategy_args": {"num_ranks": 2},
        },
        inference={"kv_cache_tokens": 100_000},
    )
    assert gpu_defaults(given, SEVEN, gpus(8, 80)) == {}
    assert gpu_defaults(experiment(), SEVEN, ()) == {}
    assert gpu_defaults(
        experiment(learner={"device": "cpu"}, inference={"device": "cpu"}), SEVEN, gpus(8, 80)
    ) == {}  # fmt: skip


def test_the_resolved_experiment_shows_them_and_gets_no_others() -> None:
    chosen = experiment(inference={"engine": "vllm"})
    resolved = with_values(chosen, gpu_defaults(chosen, SEVEN, gpus(8, 80)))
    assert resolved.learner.strategy_args.num_ranks == 4
    again = decode(msgspec.yaml.decode(resolved.to_yaml()), "config.yaml")
    assert gpu_defaults(again, SEVEN, gpus(8, 80)) == {}


def test_defaults_always_make_an_experiment_that_can_be_placed() -> None:
    chosen = {engine: experiment(inference={"engine": engine}) for engine in ("torch", "vllm")}
    machines = itertools.product((1, 2, 3, 4, 8, 16), (24, 80), (1_000_000_000, 7_615_616_512))
    for count, gib, parameters in machines:
        for engine in chosen:
            model = msgspec.structs.replace(SEVEN, num_parameters=parameters)
            machine = MachineFacts(host_bytes=0, shm_bytes=0, gpu_bytes=gpus(count, gib))
            results = [Loaded(model=model), Loaded(machine=machine)]
            report = combined(chosen[engine], [], results)
            told = [problem for problem in report.problems if "needs at least" not in problem]
            assert told == [], (count, gib, parameters, engine)


def report_of(name: str, count: int, gib: float, *overrides: str) -> tuple[str, ...]:
    """Problems of an example on such a machine."""
    chosen = load(EXAMPLES / name / "experiment.yaml", overrides)
    step = Step("sizes", "pretrain", str(EXAMPLES / name / "model_config.json"))
    machine = MachineFacts(host_bytes=0, shm_bytes=0, gpu_bytes=gpus(count, gib))
    return combined(chosen, [], [Loader(chosen).load(step), Loaded(machine=machine)]).problems


@pytest.mark.parametrize(("name", "count"), [("gsm8k_7b_8gpu", 8), ("search_agent_32b_64gpu", 64)])
def test_the_examples_fit_the_machines_of_their_names(name: str, count: int) -> None:
    assert report_of(name, count, 80) == ()
    assert report_of(name, count // 2, 80) != ()  # too few GPUs
    (too_small, *_) = report_of(name, count, 12)
    assert "needs at least" in too_small
    assert "of GPU" in too_small


def test_a_machine_elsewhere_is_named_by_number_and_memory() -> None:
    machine = Target(gpus=2, gpu_memory="80 GB").machine
    assert machine is not None
    assert machine.gpu_bytes == (80 * 10**9,) * 2
    for target, reason in (
        (Target(gpus=2), "belong together"),
        (Target(gpus=2, gpu_memory="much"), "is no size of memory"),
        (Target(model_config="config.json"), "--fast, --gpus"),
    ):
        with pytest.raises(ConfigError, match=reason):
            _ = target.machine


def test_sizes_need_a_configuration_that_can_be_read() -> None:
    chosen = load(EXAMPLES / "gsm8k_7b_8gpu" / "experiment.yaml")
    (problem,) = Loader(chosen).load(Step("sizes", "pretrain", "/no/such.json")).problems
    assert "--model-config /no/such.json: No such file" in problem


def test_the_counts_of_a_configuration_are_those_of_the_published_models() -> None:
    counts: dict[str, int] = {}
    for name in ("gsm8k_7b_8gpu", "search_agent_32b_64gpu"):
        chosen = load(EXAMPLES / name / "experiment.yaml")
        step = Step("sizes", "pretrain", str(EXAMPLES / name / "model_config.json"))
        model = Loader(chosen).load(step).model
        assert isinstance(model, ModelFacts)
        counts[chosen.run.pretrain] = model.num_parameters
    assert counts == {
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "Qwen/Qwen3-32B": 32_762_123_264,
    }
