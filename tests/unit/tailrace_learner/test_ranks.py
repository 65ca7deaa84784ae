"""Rows over ranks: shares, idle passes, and the same weights and metrics on two ranks as on one."""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from tailrace.config import ConfigError, RunConfig
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.checkpoints import CheckpointFolder
from tailrace_learner.adapters.launcher import check_gpus, rank_environment
from tailrace_learner.adapters.rank_controller import RankController
from tailrace_learner.adapters.ranks import DataParallelRanks, RankLostError, TorchRanks
from tailrace_learner.adapters.snapshots import OPTIMIZER_FILE, load_optimizer, take_snapshot
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.strategies.megatron import MegatronStrategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import LearnerConfig, StrategyArgs, TrainingArgs
from tailrace_learner.core.batch.ranks import ONE_RANK, Shares
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import CPU, config, make_policy, make_rows
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.step.test_step import prepared
from tests.unit.tailrace_learner.test_checkpoints import CONFIG, SCRATCH, state

# A large epsilon: Adam would make equal steps of gradients that are nothing but rounding. Rates of 0.1
# make 2e-5 of rounding within two steps, also on one rank with other micro-batches.
ARGS = TrainingArgs(learning_rate=0.02, weight_decay=0.01, adam_epsilon=1e-2, max_grad_norm=0.5)
GIVEN = replace(CONFIG, training_args=ARGS)
LAYERS = "tailrace_learner.adapters.strategies.megatron_layers"
WARM_START = {"demonstrations": "module:function", "num_steps": 1}
CUT = {"strategy_name": "megatron", "num_ranks": 2, "tensor_parallel_size": 2}
Trained = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float | None]]


def halves(rows: Any) -> list[Any]:
    return [rows[:2], rows[2:]] if len(rows) > 2 else [rows] if rows else []


def test_rows_are_spread_by_their_tokens_and_every_rank_does_as_many_passes() -> None:
    rows = make_rows(9, max_len=40)
    shares = Shares(2)
    first, second = shares.split(rows)
    assert sorted(row.row_id for row in first + second) == sorted(row.row_id for row in rows)
    sizes = [sum(len(row.token_ids) for row in share) for share in (first, second)]
    assert abs(sizes[0] - sizes[1]) <= max(len(row.token_ids) for row in rows)
    assert len(shares.passes(rows, 0, halves)) == len(shares.passes(rows, 1, halves))
    assert Shares(2).passes(rows[:1], 1, halves) == [[]]


def test_a_row_stays_with_its_rank_however_it_comes_again() -> None:
    rows = make_rows(6)
    shares = Shares(3)
    before = [shares.split(rows[:2]), shares.split(rows[2:])]
    owner = {row.row_id: rank for part in before for rank, of in enumerate(part) for row in of}
    again = {row.row_id: rank for rank, of in enumerate(shares.split(rows[::-1])) for row in of}
    assert again == owner


def rows_in_turns(num_rows: int, seed: int) -> list[TrainingRow]:
    """Turns have at most two trained tokens."""
    rows = make_rows(num_rows, seed=seed)
    for row in rows:
        row.turns = np.arange(len(row.targets)) // 2
    return rows


def train(
    strategy: Strategy, family: str, settings: dict[str, Any], *, recomputes: bool = False
) -> Trained:
    """Weights, moments and last metrics after two steps of three groups, one of a single row.

    `recomputes`: with gradient checkpointing.
    """
    policy = make_policy(family)
    if recomputes:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = strategy.spread(policy)
    given = config(training_args=ARGS, max_tokens_per_micro_batch=40, **settings)
    optimizer = strategy.make_optimizer(policy, ARGS)
    trainer = StepTrainer(
        policy, optimizer, given, groups_per_step=3, max_steps=8, ranks=strategy.ranks
    )
    for step in range(2):
        trainer.begin(step)
        for index, num_rows in enumerate((5, 1, 4)):
            trainer.add(prepared(rows_in_turns(num_rows, seed=step * 10 + index)))
            trainer.work()
        metrics = trainer.finish()
    named = list(policy.model.named_parameters())
    weights = {name: strategy.whole(parameter).clone() for name, parameter in named}
    return weights, moments_of(strategy, policy), metrics


def moments_of(strategy: Strategy, policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Whole tensors by `parameter.moment`."""
    return {
        f"{name}.{moment}": value.clone()
        for name, parameter in policy.model.named_parameters()
        for moment, value in strategy.moments(parameter).items()
    }


def taken_over(strategy: Strategy, moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moments of a new optimizer of `strategy` after it took those of another."""
    policy = strategy.spread(make_policy())
    strategy.make_optimizer(policy, ARGS)
    assert moments_of(strategy, policy) == {}
    for name, parameter in policy.model.named_parameters():
        kept = {moment: moments[f"{name}.{moment}"] for moment in ("step", "exp_avg", "exp_avg_sq")}
        assert tuple(kept["exp_avg"].shape) == strategy.shape(parameter)
        strategy.set_moments(parameter, kept)
    return moments_of(strategy, policy)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("llama", {"num_mini_batches": 2, "ppo_epochs": 2, "entropy_loss_coef": 0.01}),
    (
        "qwen2",
        {
            "loss": "m2po",
            "behaviour_correction": "none",
            "num_mini_batches": 3,
            "loss_aggregation": "seq_mean_token_mean",
        },
    ),
    (
        "qwen3",
        {
            "loss": "clip_cov",
            "cov_fraction": 0.3,
            "clip_cov_low": -5.0,
            "num_mini_batches": 2,
            "ppo_epochs": 2,
        },
    ),
    ("qwen3", {"loss": "gspo", "num_mini_batches": 2, "ppo_epochs": 2, "gspo_clip": 0.1}),
    ("qwen3", {"loss": "segment", "num_mini_batches": 2, "ppo_epochs": 2}),
    ("qwen3", {"loss": "topr", "behaviour_correction": "none", "num_mini_batches": 2}),
]


def train_cases(ranks: TorchRanks) -> list[Trained]:
    return [train(Fsdp2Strategy(ranks, CPU), family, settings) for family, settings in CASES]


@cache
def trained_on_two() -> list[list[Trained]]:
    """All cases by rank, in one pair of processes."""
    return on_ranks(2, train_cases)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: CASES[case][1].get("loss", "-"))
def test_two_ranks_train_as_one_does(case: int) -> None:
    one = train(Strategy(), *CASES[case])
    for trained in trained_on_two():
        assert_alike(trained[case], one)


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], of_scale: float = 1e-5
) -> None:
    """The same tensors by name; small differences are `of_scale`, a share of the largest element."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        atol = of_scale * float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=atol, msg=name)


def assert_alike(trained: Trained, one: Trained) -> None:
    assert_close(trained[0], one[0])
    assert_close(trained[1], one[1])
    assert trained[2].keys() == one[2].keys()
    for name, value in one[2].items():
        assert trained[2][name] == (value if value is None else pytest.approx(value, 1e-5, 1e-7))


def grouped(ranks: TorchRanks) -> tuple[int, int, list[float], list[str]]:
    groups = DataParallelRanks(ranks, 2)
    return (
        groups.rank,
        groups.num_ranks,
        groups.sums([1.5, 10.0 * groups.rank]),
        groups.collect(f"of {ranks.rank}"),
    )


def test_neighbours_that_compute_the_same_rows_count_as_one_rank() -> None:
    found = on_ranks(4, grouped)
    assert [(rank, num_ranks) for rank, num_ranks, _, _ in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [part[2:] for part in found] == [([3.0, 10.0], ["of 0", "of 2"])] * 4


def gradients(strategy: Strategy) -> tuple[float, bool]:
    """Update in which only the last rank's gradient is not finite."""
    policy = strategy.spread(make_policy())
    optimizer = strategy.make_optimizer(policy, ARGS)
    before = {name: strategy.whole(p).clone() for name, p in policy.model.named_parameters()}
    for parameter in policy.parameters:
        parameter.grad = torch.full_like(parameter, 1.0)
    if strategy.ranks.rank == strategy.ranks.num_ranks - 1:
        policy.parameters[0].grad = torch.full_like(policy.parameters[0], torch.nan)
    result = optimizer.update(count=1.0, learning_rate=1.0, max_grad_norm=1.0)
    after = {name: strategy.whole(p) for name, p in policy.model.named_parameters()}
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return float(result.is_applied), unchanged


def gradients_sharded(ranks: TorchRanks) -> tuple[float, bool]:
    return gradients(Fsdp2Strategy(ranks, CPU))


def test_a_gradient_that_is_not_finite_on_one_rank_is_thrown_away_by_all() -> None:
    assert on_ranks(2, gradients_sharded) == [(0.0, True)] * 2


def waits(ranks: TorchRanks) -> tuple[float, str]:
    """Seconds in which rank 0 waited in vain for rank 1, which only hears one command; what it said."""
    began_s, said = time.monotonic(), ""
    if ranks.rank == 0:
        with pytest.raises(RuntimeError):
            torch.distributed.all_reduce(torch.zeros(1))
        with pytest.raises(RankLostError):
            ranks.sums([1.0])
    waited_s = float(ranks.broadcast(time.monotonic() - began_s))
    if ranks.rank == 0:
        with pytest.raises(RankLostError) as caught:
            ranks.broadcast("which rank 1 does not come to hear")
        said = str(caught.value)
    return waited_s, said


def test_a_rank_waits_for_others_until_its_timeout_and_for_a_command_for_ever() -> None:
    timeout_s = 6.0  # within which they have to meet, too
    first, second = on_ranks(2, waits, timeout_s=timeout_s)
    assert 1.8 * timeout_s < first[0] == second[0] < 100.0
    assert "rank 0 of the learner lost rank 1 at a command" in first[1]
    assert "learner.strategy_args.timeout_s" in first[1]


def broken_begin(worker: Worker, step: int) -> None:
    raise ValueError(f"step {step} cannot begin")


def fails_in_a_command(ranks: TorchRanks) -> str:
    """Error of rank 0 at its failure; the other rank takes no order after it."""
    if ranks.rank:
        return str(ranks.broadcast(None))
    team = RankController(RunConfig(exp_name="unit"), GIVEN, Strategy(), ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "begin", broken_begin)
        with pytest.raises(ValueError, match="step") as caught:
            team.begin(3)
    team.end()
    return str(caught.value)


def test_a_command_that_fails_in_any_way_leaves_no_rank_0_that_waits_for_the_others() -> None:
    said, heard = on_ranks(2, fails_in_a_command, timeout_s=60)
    assert said == "step 3 cannot begin"
    assert "begin" in heard


def go_on(strategy: Strategy, source: str, steps: range, folder: Path) -> str:
    """Train from a checkpoint or (empty) from scratch, and save a checkpoint."""
    made = hf_model.load_model(source, GIVEN) if source else hf_model.make_model(SCRATCH, GIVEN, 3)
    policy = strategy.spread(hf_model.make_policy(made, GIVEN))
    optimizer = strategy.make_optimizer(policy, ARGS)
    if source:
        load_optimizer(Path(source), made, strategy)
    trainer = StepTrainer(
        policy, optimizer, GIVEN, groups_per_step=1, max_steps=8, ranks=strategy.ranks
    )
    for step in steps:
        trainer.begin(step)
        trainer.add(prepared(make_rows(4, seed=step)))
        trainer.work()
        trainer.finish()
    snapshot = take_snapshot(made, strategy)
    if strategy.world.rank:
        return ""
    return str(CheckpointFolder(folder).write(snapshot, state(steps.stop)))


def go_on_sharded(ranks: TorchRanks, source: str, steps: range, folder: Path) -> str:
    return go_on(Fsdp2Strategy(ranks, CPU), source, steps, folder)


def kept(checkpoint: str) -> dict[str, torch.Tensor]:
    """Weights and moments; not the random generator."""
    files = [load_file(Path(checkpoint) / name) for name in ("model.safetensors", OPTIMIZER_FILE)]
    return {name: value for file in files for name, value in file.items() if name != "rng.torch"}


def test_a_checkpoint_of_one_rank_goes_on_on_two_and_then_on_three(tmp_path: Path) -> None:
    """32 rows of a matrix do not fall into three equal parts."""
    one = go_on(Strategy(), "", range(2), tmp_path)
    two = on_ranks(2, go_on_sharded, one, range(2, 4), tmp_path)[0]
    three = on_ranks(3, go_on_sharded, two, range(4, 6), tmp_path)[0]
    assert_close(kept(three), kept(go_on(Strategy(), "", range(6), tmp_path / "alone")), 2e-5)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_more_ranks_than_gpus_are_refused_with_both_counts_and_the_keys(num_gpus: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_ranks is 2, .* {num_gpus} GPU.*cluster\.learner_gpus"):
        check_gpus(2, num_gpus)
    check_gpus(num_gpus, num_gpus)


def test_packages_find_in_the_environment_what_they_read_when_they_start() -> None:
    assert rank_environment("megatron", "cuda") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert rank_environment("deepspeed", "cpu") == {"DS_ACCELERATOR": "cpu"}
    assert rank_environment("deepspeed", "cuda") == {}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"strategy_args": {"num_ranks": 0}}, "num_ranks must be at least 1"),
        ({"strategy_args": {"num_ranks": 2, "strategy_name": "single"}}, "single computes on one rank"),
        ({"strategy_args": {"timeout_s": 0}}, "timeout_s must be positive"),
        ({"strategy_args": {"strategy_name": "ddp"}}, "ddp"),
        ({"strategy_args": {"zero_stage": 4}}, "zero_stage"),
        ({"strategy_args": {"zero_stage": 3}}, "zero_stage 3 is for strategy_name deepspeed"),
        (
            {"strategy_args": {"strategy_name": "deepspeed"}, "warm_start": WARM_START},
            "warm_start has an optimizer of its own",
        ),
        (
            {"strategy_args": CUT | {"num_ranks": 3}},
            "num_ranks 3 is no multiple of tensor_parallel_size 2",
        ),
        (
            {"strategy_args": CUT | {"strategy_name": "fsdp2"}},
            "tensor_parallel_size 2 is for .* megatron",
        ),
        ({"strategy_args": {"tensor_parallel_size": 0}}, "tensor_parallel_size must be at least 1"),
        ({"strategy_args": CUT, "lora": {}}, "lora puts adapters beside layers"),
        (
            {"strategy_args": CUT, "adv_estimator": "gae", "critic": {"shared": True}},
            r"critic\.shared",
        ),
        (
            {
                "strategy_args": {"num_ranks": 2},
                "adv_estimator": "gae",
                "critic": {"shared": True},
            },
            r"critic\.shared",
        ),
    ],
)
def test_impossible_strategies_are_refused_by_key(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=match):
        msgspec.convert(settings, LearnerConfig)


def test_more_than_one_rank_means_sharded_unless_another_strategy_is_named() -> None:
    assert StrategyArgs().resolved_name == "single"
    assert StrategyArgs(num_ranks=2).resolved_name == "fsdp2"
    assert StrategyArgs(strategy_name="fsdp2").resolved_name == "fsdp2"
    assert StrategyArgs(num_ranks=2, strategy_name="deepspeed").resolved_name == "deepspeed"


def test_a_strategy_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LAYERS, None)
    with pytest.raises(ConfigError, match=r"pip install 'tailrace\[megatron\]'"):
        MegatronStrategy(ONE_RANK, StrategyArgs(strategy_name="megatron"))
