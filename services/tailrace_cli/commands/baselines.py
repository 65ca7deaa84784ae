"""Simple players on the tasks of an experiment's evaluation: their success, for comparison."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tailrace.data import load_dataset, source_baselines
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import importable_from
from tailrace_agents.config import AgentsConfig
from tailrace_cli.console import tell
from tailrace_cli.experiment import Experiment
from tailrace_cli.summary import Baselines
from tailrace_envs import env_baselines, make_env
from tailrace_envs.baselines import success_of, success_on_rows
from tailrace_protos.episode import EnvTask
from tailrace_scheduler.core.tasks import TaskSource


def measured_baselines(experiment: Experiment) -> Baselines:
    """Plays the baselines of the evaluation's tasks; keeps them as `baselines.json`."""
    try:
        found = measure_baselines(experiment)
    except ForeignCodeError as error:
        tell(f"no baselines: {error}")
        return {}
    if found:
        path = experiment.run.run_dir / "baselines.json"
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            tell_unwritten(path.name, error)
    return found


def tell_unwritten(name: str, error: OSError) -> None:
    """The run's result does not depend on the file."""
    tell(f"{name} is not written: {error}")


def measure_baselines(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Success of simple players on the tasks of the evaluation, by player.

    It stands under the name of the tasks' tag or, if evaluations are named, of the evaluation. Tasks
    without a player have none; if no tasks have one, nothing is returned.
    """
    with importable_from(experiment.folder or Path.cwd()):
        found = {
            name: _successes(experiment.agents, tasks[0].env_name, tasks)
            for name, tasks in _evaluation_tasks(experiment).items()
        }
    return found if any(found.values()) else {}


def _evaluation_tasks(experiment: Experiment) -> dict[str, list[EnvTask]]:
    """Tasks of each named evaluation, or of each tag of the evaluation."""
    config = experiment.scheduler
    source = TaskSource(
        0,  # the evaluation set is that of every seed
        config.tags,
        config.num_groups_partition,
        config.eval_tags,
        config.eval_num_groups_partition,
    )
    tasks: dict[str, list[EnvTask]] = {}
    for name, args in experiment.run.evaluations.items():
        indices = range(args.num_tasks or config.eval_groups)
        tasks[name] = [source.named_eval_task(name, args.tag or name, index) for index in indices]
    if not tasks:
        for task in map(source.eval_task, range(config.eval_groups)):
            tasks.setdefault(task.env_name, []).append(task)
    return tasks


def _successes(agents: AgentsConfig, tag: str, tasks: Sequence[EnvTask]) -> dict[str, float]:
    with foreign_code(f"a baseline of {tag}"):
        if entry := agents.custom_envs.get(tag):
            make = partial(make_env, entry.env_type, entry.env_config)
            return success_of(env_baselines(entry.env_type), make, [task.seed for task in tasks])
        if (source := agents.datasets.get(tag)) and (players := source_baselines(source)):
            rows = load_dataset(source, 0, f"agents.datasets.{tag}")
            return success_on_rows(players, [rows.eval_row(task.ordinal).data for task in tasks])
    return {}
