"""`tailrace episode`: one episode in the terminal, turn by turn, without any cluster."""

import asyncio
import importlib
import os
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tailrace import log
from tailrace.config import ConfigError
from tailrace.tools.serving import load_tool
from tailrace_agents.core.episode import EpisodeResult
from tailrace_cli.checkpoints import model_card, model_folder
from tailrace_cli.cluster.plan import without_proxy
from tailrace_cli.commands.options import (
    Checkpoint,
    ConfigName,
    ConfigPath,
    ExperimentArgument,
    Overrides,
)
from tailrace_cli.console import stdout
from tailrace_cli.experiment import Experiment, load_given, locate
from tailrace_cli.terminal.play import Stage, score_here
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import Endpoint
from tailrace_cli.validation import check_experiment

if TYPE_CHECKING:
    from tailrace_cli.terminal.model import LocalModel


def episode(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    checkpoint: Checkpoint = "",
    task_seed: Annotated[
        int, typer.Option(help="Seed of the task to play, or number of the row.", min=0)
    ] = 0,
    tag: Annotated[str, typer.Option(help="What to play; default: the first of eval_tags.")] = "",
    endpoint: Annotated[
        str, typer.Option(help="Base URL of an OpenAI endpoint to use instead of a checkpoint.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name at --endpoint.")] = "",
    tool: Annotated[
        list[str] | None, typer.Option(help="module:tool to run in this process; may be repeated.")
    ] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Play one episode in this terminal, turn by turn, without any cluster.

    The key of --endpoint is taken from OPENAI_API_KEY. Exit code 1: no run would train the episode.
    """
    loaded = load_given(experiment, overrides, config_path, config_name)
    check_experiment(loaded)
    exit_code = play_in_terminal(
        loaded,
        stdout,
        checkpoint=checkpoint,
        task_seed=task_seed,
        tag=tag,
        endpoint=endpoint,
        model=model,
        tools=tool or (),
        user_modules=locate(experiment, config_path, config_name).parent,
    )
    raise typer.Exit(exit_code)


def play_in_terminal(
    experiment: Experiment,
    console: Console,
    *,
    checkpoint: str,
    task_seed: int,
    tag: str = "",
    endpoint: str = "",
    model: str = "",
    tools: Sequence[str] = (),
    user_modules: Path | None = None,
) -> int:
    """Play the task `task_seed` of `tag` and print every turn; returns the exit code.

    It is 1 for an episode that no run would train: a failure of code or connections, or a score that
    failed. The model is that of `checkpoint`, or `model` behind the OpenAI `endpoint`. `tools` are
    `module:tool`s to run in this process, besides those that the experiment's cluster would serve.
    """
    log.configure(form="console", level="warning")  # the engine's notes are no part of the play
    os.environ.update(without_proxy(os.environ))  # a workflow calls this process
    sys.path[:0] = [str(folder) for folder in (user_modules, Path.cwd()) if folder is not None]
    tag = _tag(experiment, tag)
    served = [*getattr(experiment.cluster, "tool_workers", ()), *tools]
    screen = Screen(console)
    stage = Stage(experiment, tag, task_seed, screen, [load_tool(name, "--tool") for name in served])
    console.print(f"task {task_seed} of {tag}")
    if endpoint:
        there = Endpoint(endpoint, model, os.environ.get("OPENAI_API_KEY", ""))
        return asyncio.run(_played(experiment, stage, screen, stage.play_at(there)))
    folder = model_folder(experiment, checkpoint)
    card = model_card(folder)
    # torch takes seconds to import; a missing folder and an endpoint need none of it.
    terminal_model = importlib.import_module("tailrace_cli.terminal.model")
    local: LocalModel = terminal_model.load_model(experiment, folder, card)
    console.print(f"model {local.folder}")
    return asyncio.run(_played(experiment, stage, screen, stage.play(local)))


async def _played(
    experiment: Experiment, stage: Stage, screen: Screen, playing: Coroutine[Any, Any, EpisodeResult]
) -> int:
    result = await playing
    score = await score_here(experiment.reward, stage.task, result)
    screen.end(result, score)
    return 0 if score is not None and score.error is None else 1


def _tag(experiment: Experiment, tag: str) -> str:
    scheduler, agents = experiment.scheduler, experiment.agents
    chosen = tag or (scheduler.eval_tags or scheduler.tags)[0]
    known = {*agents.custom_envs, *agents.datasets}
    if chosen not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(
            f"--tag {chosen!r} is neither in agents.custom_envs nor in agents.datasets: {names}"
        )
    return chosen
