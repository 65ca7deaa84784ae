"""Checks that need several sections of an experiment."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config import ConfigError, InvalidConfigError
from tailrace_cli.checkpoints import reached_checkpoint
from tailrace_cli.commands.train import run_training
from tailrace_cli.experiment import count_gateways, decode, load, with_epochs
from tailrace_cli.validation import check_experiment
from tailrace_envs import make_env

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"


def test_the_example_is_valid() -> None:
    check_experiment(load(EXAMPLE))


def test_the_resolved_experiment_loads_to_the_same() -> None:
    experiment = load(EXAMPLE, ["group_size=5", "agents.env_threads=3"])
    again = decode(yaml.safe_load(experiment.to_yaml()), experiment.source)
    assert again == experiment
    assert again.run.group_size == 5
    assert again.agents.env_threads == 3


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("learner.temperature=0.5", "learner.temperature"),
        ("num_epochs=2", "num_epochs: scheduler.tags names no data set"),
        ("agents.max_episode_tokens=1000", "inference.max_model_len"),
        ("scheduler.eval_tags=[nowhere]", "scheduler.eval_tags"),
        ("agents.custom_envs.frozen_lake.env_type=frozenlake", "did you mean 'frozen_lake'"),
        ("pretrain=./nothing", "pretrain"),
        ("learner.from_scratch=null", "learner.from_scratch"),
        ("resume_from_checkpoint=./nothing", "resume_from_checkpoint"),
        ("scheduler.max_buffered_groups=1", "max_buffered_groups"),
        ("pretrain=owner/model", "learner.from_scratch=null"),
        ("cluster.num_gateways=-1", "cluster.num_gateways"),
        ("cluster.num_sandboxes=99999999999", "cluster.num_sandboxes must be at most 4096"),
        ("cluster.num_threads=99999999999", "cluster.num_threads must be at most 4096"),
        ("scheduler.eval_groups=99999999999", "eval_group_size must be at most 1000000"),
        ("evaluations={a: {num_tasks: 99999, num_samples: 99}}", "num_samples must be at most 1000000"),
        ("chat.tool_parser=hermse", "did you mean 'hermes'"),
        ("chat.reasoning_parser=thinks", "did you mean 'think'"),
        ("cluster.num_sandboxes=-1", "cluster.num_sandboxes"),
        ("reward.rewards=[{name: r, kind: scorer, scorer: code}]", "cluster.num_sandboxes to 1"),
        ("reward.rewards=[{name: r, kind: scorer, timeout_s: 1000}]", "agents.reward_timeout_s"),
        ("inference.transports=[nats]", "agents.transport: zmq is not one of inference.transports"),
    ],
)
def test_combinations_that_cannot_run_name_the_key_or_the_remedy(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_experiment(load(EXAMPLE, [override]))


NODES = ["inference.engine=vllm", "inference.tensor_parallel_size=2", "inference.num_nodes=2"]


def test_a_server_on_several_nodes_is_valid_and_not_colocated() -> None:
    check_experiment(load(EXAMPLE, NODES))
    with pytest.raises(ConfigError, match="colocated: the learner takes turns with servers of its own"):
        check_experiment(load(EXAMPLE, [*NODES, "colocated=true"]))


def test_nodes_of_an_engine_that_has_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_nodes is 2: a server of the engine torch has one node"):
        load(EXAMPLE, ["inference.num_nodes=2"])


@pytest.mark.parametrize(
    ("env_type", "env_config"),
    [
        ("sokoban", {"num_box": 3}),
        ("sokoban", {"nonsense": 1}),
        ("sokoban", {"num_boxes": 100}),
        ("sokoban", {"dim_room": "6x6"}),
        ("webshop", {"catalogue": {"num_product": 3}}),
        ("maths", {"max_number": 1}),
        ("frozen_lake", {"split": "test"}),
        ("gymnasium", {}),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_the_words_of_who_would_make_it(
    env_type: str, env_config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as of_service:
        make_env(env_type, env_config)
    content = yaml.safe_load(EXAMPLE.read_text())
    content["agents"]["custom_envs"]["frozen_lake"] = {"env_type": env_type, "env_config": env_config}
    with pytest.raises(ConfigError) as refused:
        check_experiment(decode(content, "run.yaml"))
    assert str(refused.value) == f"run.yaml: agents.custom_envs.frozen_lake: {of_service.value}"


@pytest.mark.parametrize(("env_type", "needed"), [("verifiers", "env_id"), ("openenv", "base_url")])
def test_keys_of_environments_are_checked_without_their_packages(env_type: str, needed: str) -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    content["agents"]["custom_envs"]["frozen_lake"] = {"env_type": env_type}
    with pytest.raises(ConfigError, match=f"env_config: .*{needed}"):
        check_experiment(decode(content, "run.yaml"))


def test_what_a_class_of_ones_own_takes_is_its_own_matter() -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    own = {"env_type": "not_here:Guess", "env_config": {"anything": 1}}
    content["agents"]["custom_envs"]["frozen_lake"] = own
    check_experiment(decode(content, "run.yaml"))


@pytest.mark.parametrize(
    ("gpus", "ranks", "named"),
    [
        ("[0,1]", 1, "names 2 GPUs and learner.strategy_args.num_ranks is 1: give one to each rank"),
        ("[0]", 2, "names 1 GPUs and learner.strategy_args.num_ranks is 2: give one to each rank"),
        ("[0,0]", 2, "cluster.learner_gpus names GPU 0 twice"),
    ],
)
def test_every_rank_has_a_gpu_of_its_own_and_every_gpu_a_rank(
    gpus: str, ranks: int, named: str
) -> None:
    settings = [f"cluster.learner_gpus={gpus}", f"learner.strategy_args.num_ranks={ranks}"]
    with pytest.raises(ConfigError, match=named):
        check_experiment(load(EXAMPLE, settings))
    settings = [f"cluster.learner_gpus={list(range(ranks))}", *settings[1:]]
    check_experiment(load(EXAMPLE, settings))


def test_a_home_folder_is_found_wherever_a_path_of_the_run_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = tmp_path / "ck"
    kept.mkdir()
    (kept / "run_state.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folders = ["output_dir='~/runs'", "logging_dir='~/logs'", "render_save_dir='~/pictures'"]
    model = ["pretrain='~/model'", "learner.from_scratch=null", "learner.warm_start=null"]
    experiment = load(EXAMPLE, ["resume_from_checkpoint='~/ck'", *folders, *model])
    check_experiment(experiment)
    run = experiment.run
    assert run.run_dir == tmp_path / "runs" / run.exp_name
    assert run.logs_dir == tmp_path / "logs" / run.exp_name
    assert run.render_save_dir == str(tmp_path / "pictures")
    assert run.resume_from_checkpoint == str(kept)
    assert run.pretrain == str(tmp_path / "model")
    assert "~" not in experiment.to_yaml()  # which every service reads


def test_a_data_set_may_be_a_tag() -> None:
    settings = ["scheduler.tags=[sums]", "agents.datasets.sums.path=sums.jsonl", SCORED]
    check_experiment(load(EXAMPLE, settings))


SCORED = "reward.rewards=[{name: right, kind: function, function: 'sums:right'}]"
SUMS = ["agents.datasets.sums.path=sums.jsonl", "learner.adv_estimator=gigpo", SCORED]


@pytest.mark.parametrize("key", ["tags", "eval_tags"])
@pytest.mark.parametrize("rewards", ["[]", "[{name: r, kind: env_return}]"])
def test_rows_that_nothing_scores_are_refused_unless_their_agent_may(key: str, rewards: str) -> None:
    rows = ["agents.datasets.sums.path=sums.jsonl", f"reward.rewards={rewards}"]
    settings = [*rows, f"scheduler.{key}=[sums]"]
    with pytest.raises(ConfigError, match=r"reward\.rewards: nothing scores .*agents\.datasets\.sums"):
        check_experiment(load(EXAMPLE, settings))
    check_experiment(load(EXAMPLE, rows))  # they are not played
    check_experiment(load(EXAMPLE, [*settings, "agents.workflow.agent=my_agents.Adder"]))
    check_experiment(load(EXAMPLE, [*settings, "agents.agent_loops.adder=my_loops:Adder"]))
    check_experiment(load(EXAMPLE, [*settings[:-2], settings[-1], SCORED]))


def test_rows_of_a_named_evaluation_that_nothing_scores_are_refused() -> None:
    settings = ["agents.datasets.sums.path=sums.jsonl", "scheduler.eval_tags=[]", "reward.rewards=[]"]
    check_experiment(load(EXAMPLE, settings))
    for named in ("{sums: {num_tasks: 4}}", "{held_out: {tag: sums}}"):
        with pytest.raises(ConfigError, match=r"nothing scores the rows of agents\.datasets\.sums"):
            check_experiment(load(EXAMPLE, [*settings, f"evaluations={named}"]))


@pytest.mark.parametrize("tags", ["sums", "frozen_lake,sums"])
def test_gigpo_on_a_data_set_needs_turns_as_rows(tags: str) -> None:
    settings = [f"scheduler.tags=[{tags}]", *SUMS]
    with pytest.raises(ConfigError, match=r"gigpo .* the rows of 'sums' .*granularity: step: set it"):
        check_experiment(load(EXAMPLE, settings))
    check_experiment(load(EXAMPLE, [*settings, "granularity=step"]))
    check_experiment(load(EXAMPLE, [*settings, "learner.step_advantage_weight=0"]))


def test_gigpo_on_environments_needs_no_other_rows() -> None:
    check_experiment(load(EXAMPLE, SUMS))


def test_the_settings_of_rewards_on_the_pages_are_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward_model").mkdir()
    (tmp_path / "my_reward_model" / "config.json").write_text("{}")
    root = EXAMPLE.parents[2]
    text = (root / "services" / "tailrace_reward" / "README.md").read_text()
    text += (root / "docs" / "scorers.md").read_text().split("## Judges")[1].split("## Epochs")[0]
    blocks = [textwrap.dedent(part.split("```")[0]) for part in text.split("```yaml")[1:]]
    of_example = yaml.safe_load(EXAMPLE.read_text())
    for block in map(yaml.safe_load, blocks):
        content = {**of_example, **block, "agents": of_example["agents"] | block.get("agents", {})}
        content.pop("reward" if "reward_pretrain" in block else "", None)
        check_experiment(decode(content, "README.md"))
    assert len(blocks) == 3


def test_agents_wait_for_the_slowest_reward() -> None:
    slow = "reward.rewards=[{name: f, kind: function, function: 'm:f', timeout_s: 60}]"
    with pytest.raises(
        ConfigError, match=r"reward 'f': timeout_s \(60\) exceeds agents\.reward_timeout_s"
    ):
        check_experiment(load(EXAMPLE, [slow]))
    check_experiment(load(EXAMPLE, [slow, "agents.reward_timeout_s=60"]))


def test_the_key_of_a_judge_must_reach_the_reward_workers() -> None:
    judge = "{base_url: 'http://x', model: m, prompt: p, api_key_env: JUDGE_KEY}"
    settings = [f"reward.rewards=[{{name: q, kind: judge, judge: {judge}}}]"]
    with pytest.raises(ConfigError, match=r"JUDGE_KEY: name it under cluster\.keep_environment"):
        check_experiment(load(EXAMPLE, settings))
    check_experiment(load(EXAMPLE, [*settings, "cluster.keep_environment=[JUDGE_KEY]"]))


OWN_JUDGE = "reward.rewards=[{name: q, kind: judge, judge: {base_url: gateway, prompt: p}}]"


@pytest.mark.parametrize(
    ("setting", "named"),
    [("agents.workflow.agent=my_module.MyAgent", "agents.workflow"), (OWN_JUDGE, "base_url: gateway")],
)
def test_a_workflow_and_a_judge_of_the_run_need_a_gateway(setting: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.num_gateways is 0 but .*{named}"):
        check_experiment(load(EXAMPLE, [setting, "cluster.num_gateways=0"]))
    assert count_gateways(load(EXAMPLE, [setting])) == 1


@pytest.mark.parametrize(
    ("judge", "named"),
    [
        ("{base_url: gateway, prompt: p, model: other}", "leave judge.model"),
        ("{base_url: gateway, prompt: p, api_key_env: KEY}", "leave judge.model"),
        ("{base_url: ftp, prompt: p}", "or be 'gateway'"),
        ("{base_url: 'http://x', prompt: p}", "name the model"),
        ("{base_url: gateway, prompt: ''}", "judge.prompt"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(judge: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(EXAMPLE, [f"reward.rewards=[{{name: q, kind: judge, judge: {judge}}}]"])


@pytest.mark.parametrize(
    "override",
    [
        "scheduler.num_groups_partition=[1,2]",
        "scheduler.eval_num_groups_partition=[1,2]",
        "scheduler.num_groups_partition=[0]",
        "scheduler.eval_num_groups_partition=[0]",
    ],
)
def test_shares_must_fit_the_tags(override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0].rpartition(".")[2]):
        check_experiment(load(EXAMPLE, [override]))


@pytest.mark.parametrize(
    "override",
    [
        "learner.training_args.learning_rate=-1",
        "learner.training_args.learning_rate=nan",
        "learner.training_args.learning_rate=inf",
        "learner.training_args.adam_beta1=1.5",
        "learner.training_args.adam_beta2=-0.1",
        "learner.training_args.adam_epsilon=-1",
        "learner.training_args.adam_epsilon=0",
        "learner.training_args.warmup_steps=-3",
        "learner.training_args.max_grad_norm=-1",
        "learner.training_args.weight_decay=-1",
        "learner.training_args.min_lr_ratio=7",
        "learner.warm_start.num_steps=-2",
        "learner.warm_start.batch_size=0",
        "learner.warm_start.learning_rate=-1",
        "learner.from_scratch.init_std=-1",
        "agents.reward_timeout_s=nan",
        "cluster.drain_s=nan",
        "cluster.drain_s=-5",
        "cluster.max_restarts=-1",
        "cluster.restart_window_s=0",
        "cluster.min_free_disk_bytes=-1",
    ],
)
def test_numbers_that_no_run_can_use_are_refused_with_their_key(override: str) -> None:
    section, _, key = override.split("=")[0].rpartition(".")
    with pytest.raises(ConfigError, match=rf"{section}.*{key}"):
        check_experiment(load(EXAMPLE, [override]))


def test_the_ends_of_their_ranges_are_possible() -> None:
    ends = [
        f"learner.training_args.{setting}"
        for setting in ("learning_rate=0", "adam_beta1=0", "max_grad_norm=0", "min_lr_ratio=1")
    ]
    check_experiment(load(EXAMPLE, [*ends, "cluster.drain_s=0", "cluster.max_restarts=0"]))


def test_all_problems_of_an_experiment_are_named_together() -> None:
    overrides = ["learner.gama=1", "inference.max_waitin=2", "max_step=3", "agents.transport=http"]
    with pytest.raises(InvalidConfigError) as raised:
        load(EXAMPLE, overrides)
    problems = raised.value.problems
    assert len(problems) == 4
    assert all("did you mean" in problem or "is none of" in problem for problem in problems)
    experiment = load(EXAMPLE, ["scheduler.tags=[nowhere]", "learner.num_mini_batches=999"])
    with pytest.raises(InvalidConfigError, match=r"2 problems:\n  scheduler\.tags.*\n  learner\.num"):
        check_experiment(experiment)


SUMS_ROWS = 7


@pytest.mark.parametrize(
    ("settings", "max_steps"),
    [
        (["num_epochs=1", "groups_per_step=7"], 1),
        (["num_epochs=4", "groups_per_step=7"], 4),
        (["num_epochs=3", "groups_per_step=4"], 5),  # 21 rows are five steps and a rest
        (["max_steps=9"], 9),
    ],
)
def test_epochs_become_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], max_steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1"}\n' * SUMS_ROWS)
    assert (
        with_epochs(load(EXAMPLE, [*SUMS, "scheduler.tags=[sums]", *settings])).run.max_steps
        == max_steps
    )


def test_a_run_of_epochs_that_has_done_them_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1"}\n' * SUMS_ROWS)
    settings = ["groups_per_step=7", "resume_from_checkpoint=true"]
    for num_epochs, is_done in ((4, True), (5, False)):
        run = load(EXAMPLE, [*SUMS, "scheduler.tags=[sums]", *settings, f"num_epochs={num_epochs}"])
        checkpoint = run.run.run_dir / "checkpoints" / "step_4"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "run_state.json").write_text('{"step": 4}')
        assert (reached_checkpoint(with_epochs(run).run) is not None) is is_done


def test_epochs_need_rows_and_a_whole_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1"}\n' * SUMS_ROWS)
    with pytest.raises(ConfigError, match=r"num_epochs: scheduler\.tags names no data set"):
        with_epochs(load(EXAMPLE, ["num_epochs=1"]))
    few = [*SUMS, "scheduler.tags=[sums]", "num_epochs=1", "groups_per_step=8"]
    with pytest.raises(ConfigError, match="7 groups are fewer than groups_per_step"):
        with_epochs(load(EXAMPLE, few))


def test_rows_that_cannot_be_counted_are_named_with_all_other_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*SUMS, "scheduler.tags=[sums,nowhere]", "num_epochs=1", "learner.num_mini_batches=999"]
    with pytest.raises(InvalidConfigError) as refused:
        run_training(load(EXAMPLE, settings), overwrite=False, attachment=None)
    for named in ("sums.jsonl", "'nowhere'", "learner.num_mini_batches"):
        assert named in str(refused.value)


def test_named_evaluations_name_what_exists_and_stand_alone() -> None:
    named = "evaluations={greedy: {tag: frozen_lake, temperature: 0}}"
    check_experiment(load(EXAMPLE, [named, "scheduler.eval_tags=[]"]))
    for override, problem in (
        ([named, "scheduler.eval_tags=[frozen_lake]"], "both name what is evaluated"),
        (["evaluations={lakes: {}}", "scheduler.eval_tags=[]"], "evaluations: 'lakes' is neither in"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_experiment(load(EXAMPLE, override))
    with pytest.raises(ConfigError, match="num_samples must be at least 1"):
        load(EXAMPLE, ["evaluations={frozen_lake: {num_samples: 0}}"])
