"""Checks across sections: names that must exist elsewhere, capacities, paths."""

from collections.abc import Callable
from pathlib import Path

from tailrace.chat import check_parser_names
from tailrace.chat.model_files import model_folder
from tailrace.config import ConfigError, InvalidConfigError
from tailrace.object_store import is_url
from tailrace_agents.config import check_with_run as check_agents
from tailrace_cli.cluster.placement import GpuDemand, PlacementError, place
from tailrace_cli.experiment import Experiment, count_gateways, steps_of_epochs
from tailrace_envs import check_env_config
from tailrace_learner.config import check_with_run
from tailrace_scheduler.config import check_capacity


def check_experiment(experiment: Experiment, *, elsewhere: bool = False) -> None:
    """Raises `InvalidConfigError` if sections contradict each other; loads nothing.

    `elsewhere`: the run will be on other machines, whose paths and devices are not checked.
    """
    if problems := problems_of(experiment, elsewhere=elsewhere):
        raise InvalidConfigError(experiment.source, problems)


def problems_of(experiment: Experiment, *, elsewhere: bool = False) -> list[str]:
    """All contradictions between sections, a line for each."""
    problems: list[str] = []
    for check in _CHECKS:
        if elsewhere and check in _OF_THIS_MACHINE:
            continue
        try:
            check(experiment)
        except ValueError as error:
            problems.append(str(error).removeprefix(f"{experiment.source}: "))
    return problems


def _check_tags(experiment: Experiment) -> None:
    known = {*experiment.agents.custom_envs, *experiment.agents.datasets}
    evaluations = experiment.run.evaluations
    if evaluations and experiment.scheduler.eval_tags:
        raise ConfigError(
            f"{experiment.source}: scheduler.eval_tags and evaluations both name what is evaluated: "
            "leave one of them out"
        )
    named = {
        "scheduler.tags": experiment.scheduler.tags,
        "scheduler.eval_tags": experiment.scheduler.eval_tags,
        "evaluations": [args.tag or name for name, args in evaluations.items()],
    }
    for key, tags in named.items():
        for tag in tags:
            if tag not in known:
                names = ", ".join(sorted(known)) or "none are defined"
                raise ConfigError(
                    f"{experiment.source}: {key}: {tag!r} is neither in "
                    f"agents.custom_envs nor in agents.datasets ({names}): define it there or correct "
                    "the name"
                )


def _check_epochs(experiment: Experiment) -> None:
    """Epochs are those of data sets; how many rows these have is known when they are loaded."""
    if experiment.run.num_epochs and not any(
        tag in experiment.agents.datasets for tag in experiment.scheduler.tags
    ):
        steps_of_epochs(experiment, {})


def _check_observations(experiment: Experiment) -> None:
    """Rows of loops and workflows name what was observed before a turn only if turns are rows."""
    if experiment.run.granularity == "step" or not experiment.learner.compares_observations:
        return
    for tag in experiment.scheduler.tags:
        if tag in experiment.agents.datasets:
            raise ConfigError(
                f"{experiment.source}: learner.adv_estimator gigpo compares turns that began with the "
                f"same observation, and the rows of {tag!r} (scheduler.tags, agents.datasets) only say "
                "what that was with granularity: step: set it, or use another estimator"
            )


def _check_environments(experiment: Experiment) -> None:
    """Types and keys: whether an environment can be made of them is seen where it is played."""
    for name, entry in experiment.agents.custom_envs.items():
        try:
            check_env_config(entry.env_type, entry.env_config)
        except ValueError as error:
            raise ConfigError(f"{experiment.source}: agents.custom_envs.{name}: {error}") from error


def _check_gateways(experiment: Experiment) -> None:
    callers = {
        "agents.workflow": experiment.agents.workflow is not None,
        "a judge with base_url: gateway": experiment.reward.asks_gateway,
    }
    for name, calls in callers.items():
        if calls and experiment.cluster.num_gateways == 0:
            raise ConfigError(
                f"{experiment.source}: cluster.num_gateways is 0 but {name} is set, which calls a "
                "gateway: leave cluster.num_gateways at null"
            )


def _check_transports(experiment: Experiment) -> None:
    offered = experiment.inference.transports
    callers = {"agents": experiment.agents.transport}
    if count_gateways(experiment):
        callers["gateway"] = experiment.gateway.transport
    for service, transport in callers.items():
        if transport not in offered:
            raise ConfigError(
                f"{experiment.source}: {service}.transport: {transport} is not one of "
                f"inference.transports ({', '.join(offered)}): add it there"
            )


def _check_gpus(experiment: Experiment) -> None:
    gpus, ranks = experiment.cluster.learner_gpus, experiment.learner.strategy_args.num_ranks
    if gpus and len(gpus) != ranks:
        raise ConfigError(
            f"{experiment.source}: cluster.learner_gpus names {len(gpus)} GPUs and "
            f"learner.strategy_args.num_ranks is {ranks}: give one to each rank"
        )
    if experiment.run.colocated and experiment.inference.num_nodes > 1:
        raise ConfigError(
            f"{experiment.source}: colocated: the learner takes turns with servers of its own machine, "
            f"and inference.num_nodes is {experiment.inference.num_nodes}: remove one of them"
        )
    try:
        place(GpuDemand.of(experiment), 0)
    except PlacementError as error:
        raise ConfigError(f"{experiment.source}: {error}") from error


def _check_model(experiment: Experiment) -> None:
    pretrain, learner = experiment.run.pretrain, experiment.learner
    named = {
        "pretrain": pretrain,
        "learner.reference.pretrain": learner.reference.pretrain if learner.reference else "",
        "learner.critic.pretrain": learner.critic.pretrain if learner.critic else "",
        "reward.reward_pretrain": experiment.reward.reward_pretrain,
    }
    for index, entry in enumerate(experiment.reward.rewards):
        named[f"reward.rewards[{index}].pretrain"] = entry.pretrain
    for key, name in named.items():
        if name:
            model_folder(name, key)
    if not pretrain and experiment.learner.from_scratch is None:
        raise ConfigError(
            f"{experiment.source}: neither pretrain nor learner.from_scratch is set: name a model to "
            "start from, or describe one to make"
        )


def _check_sampling(experiment: Experiment) -> None:
    sampled_at, trained_at = (
        experiment.agents.generating_args.temperature,
        experiment.learner.temperature,
    )
    if sampled_at != trained_at:
        raise ConfigError(
            f"{experiment.source}: learner.temperature ({trained_at:g}) must equal "
            f"agents.generating_args.temperature ({sampled_at:g}): their log-probabilities are compared"
        )
    if experiment.learner.estimator.needs_greedy != experiment.agents.greedy_baseline:
        raise ConfigError(
            f"{experiment.source}: agents.greedy_baseline must be true with learner.adv_estimator "
            "remax, and false with any other: set both or neither"
        )
    longest, room = experiment.agents.max_episode_tokens, experiment.inference.max_model_len
    if 0 < room < longest:
        raise ConfigError(
            f"{experiment.source}: agents.max_episode_tokens ({longest}) exceeds "
            f"inference.max_model_len ({room}): lower the first or raise the second"
        )


def _check_rewards(experiment: Experiment) -> None:
    kept, patience = experiment.cluster.keep_environment, experiment.agents.reward_timeout_s
    for entry in experiment.reward.components:
        if entry.kind in ("scorer", "function", "judge") and entry.timeout_s > patience:
            raise ConfigError(
                f"{experiment.source}: reward {entry.name!r}: timeout_s ({entry.timeout_s:g}) exceeds "
                f"agents.reward_timeout_s ({patience:g}), after which a request is sent again: "
                "raise the latter"
            )
        runs_code = "code" in (entry.scorer, *entry.sources.values())
        if runs_code and not (experiment.cluster.num_sandboxes or experiment.cluster.tool_workers):
            raise ConfigError(
                f"{experiment.source}: reward {entry.name!r}: the scorer code runs programs in the "
                "sandbox: set cluster.num_sandboxes to 1 or more"
            )
        variable = entry.judge.api_key_env if entry.judge else ""
        if variable and variable not in kept:
            raise ConfigError(
                f"{experiment.source}: reward {entry.name!r}: judge.api_key_env: reward workers do "
                f"not get the variable {variable}: name it under cluster.keep_environment as well"
            )


def _check_rows_are_scored(experiment: Experiment) -> None:
    """Loops of the user's may give rewards: whether rows name one is seen where they are read."""
    unscored = () if experiment.agents.agent_loops else unscored_datasets(experiment)
    for tag in unscored:
        raise ConfigError(f"{experiment.source}: {unscored_rows(tag)}")


def unscored_datasets(experiment: Experiment) -> list[str]:
    """Data sets of the run whose rows have a reward only if a loop of the user's gives one."""
    if any(entry.kind != "env_return" for entry in experiment.reward.components):
        return []
    agents, tags = experiment.agents, (*experiment.scheduler.tags, *experiment.evaluated_tags)
    played = [tag for tag in dict.fromkeys(tags) if tag in agents.datasets]
    return [tag for tag in played if not agents.is_played_by_workflow(tag)]


def unscored_rows(tag: str) -> str:
    """Problem of a data set that nothing scores."""
    return (
        f"reward.rewards: nothing scores the rows of agents.datasets.{tag}, so every episode would "
        "have the reward 0: name a reward (a scorer, function, model or judge), or play the rows with "
        "a workflow or a loop of your own"
    )


def _check_resume(experiment: Experiment) -> None:
    resume = experiment.run.resume_from_checkpoint
    if (
        isinstance(resume, str)
        and not is_url(resume)
        and not (Path(resume) / "run_state.json").is_file()
    ):
        raise ConfigError(
            f"{experiment.source}: resume_from_checkpoint: {resume} is no checkpoint (it holds no "
            "run_state.json): name a folder checkpoints/step_<N>, or use true for the newest"
        )


_CHECKS: tuple[Callable[[Experiment], None], ...] = (
    _check_tags,
    _check_epochs,
    _check_observations,
    _check_environments,
    _check_gateways,
    _check_transports,
    _check_gpus,
    _check_model,
    _check_resume,
    _check_sampling,
    _check_rewards,
    _check_rows_are_scored,
    lambda experiment: check_parser_names(experiment.run.chat),
    lambda experiment: check_capacity(experiment.run, experiment.scheduler),
    lambda experiment: check_with_run(experiment.learner, experiment.run),
    lambda experiment: check_agents(experiment.agents, experiment.run),
)
_OF_THIS_MACHINE = (_check_model, _check_gpus, _check_resume)
