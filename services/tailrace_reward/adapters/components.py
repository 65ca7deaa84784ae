"""The components of the configuration, put together: functions' processes, models, judges."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tailrace.config import ConfigError
from tailrace.import_path import load_extra, load_object
from tailrace.scorers.registry import SCORE_ADDRESS
from tailrace_reward.adapters.judge import Judge, RunGateway
from tailrace_reward.adapters.process_pool import FunctionLoadError, ScoringPool
from tailrace_reward.adapters.scorers import RowScorer, SandboxTools, check_packages
from tailrace_reward.config import RewardConfig, RewardEntry, RewardModelArgs
from tailrace_reward.ports import Component

FunctionMaker = Callable[[str, float, Mapping[str, Any]], Component]  # `module:name`, timeout_s, args


@dataclass
class Components:
    """Components by name, with their close functions."""

    by_name: dict[str, Component] = field(default_factory=dict)
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def close(self) -> None:
        """Close all."""
        for close in self.closers:
            await close()


async def open_components(
    config: RewardConfig,
    source: str,
    make_function: FunctionMaker | None = None,
    tools: SandboxTools | None = None,
    gateway: RunGateway | None = None,
) -> Components:
    """Open all components but the environment's return.

    `make_function` replaces processes of our own. `tools` has the sandbox for programs, `gateway` is
    the run's. Raises `ConfigError` for what cannot be loaded.
    """
    made = Components()
    try:
        judges = {
            entry.name: _judge(entry, source, made, gateway)
            for entry in config.components
            if entry.judge is not None
        }
        await _open_functions(config, source, made, make_function, tools, judges)
        made.by_name |= {
            entry.name: judges[entry.name] for entry in config.components if entry.kind == "judge"
        }
        await _open_models(config, made)
    except ConfigError:
        await made.close()
        raise
    return made


def check_component(entry: RewardEntry, key: str) -> None:
    """Raises `ConfigError` for a component that cannot be opened; asks no judge and loads no weights.

    `key`: place of the entry.
    """
    if entry.kind == "function":
        function = load_object(entry.function, f"{key}.function")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"{key}.function: {entry.function} yields: let it return one number, with `return`"
            )
        try:
            inspect.signature(function).bind("task", "messages", "metrics", **entry.args)
        except TypeError as error:
            named = ", ".join(("task", "messages", "metrics", *entry.args))
            raise ConfigError(
                f"{key}.function: {entry.function} cannot be called with ({named}): {error}: let it "
                "take these"
            ) from error
    if entry.kind == "scorer":
        check_packages(entry)
    if entry.judge is not None:
        _check_key(entry, entry.judge.api_key_env)
        Judge(entry.name, entry.judge, entry.timeout_s)


async def _open_functions(
    config: RewardConfig,
    source: str,
    made: Components,
    make: FunctionMaker | None,
    tools: SandboxTools | None,
    judges: Mapping[str, Component],
) -> None:
    functions = [entry for entry in config.components if entry.kind in ("function", "scorer")]
    if functions and make is None:
        make = await _pool(config, source, made)
    for entry in functions:
        assert make is not None
        if entry.kind == "function":
            made.by_name[entry.name] = make(entry.function, entry.timeout_s, entry.args)
        else:
            judge, scorer = judges.get(entry.name), partial(make, SCORE_ADDRESS)
            made.by_name[entry.name] = RowScorer(entry, scorer, judge, tools)


async def _pool(config: RewardConfig, source: str, made: Components) -> FunctionMaker:
    places = {
        entry.function or SCORE_ADDRESS: f"reward.rewards[{index}].function"
        for index, entry in enumerate(config.rewards)
        if entry.kind in ("function", "scorer")
    }
    pool = ScoringPool(tuple(places), config.num_processes)
    made.closers.append(pool.close)
    try:
        await pool.start()
    except FunctionLoadError as error:
        raise ConfigError(_not_loaded(error, places, source)) from error
    return pool.component


def _not_loaded(error: FunctionLoadError, places: Mapping[str, str], source: str) -> str:
    reasons = "; ".join(
        f"{places[function]} {function!r}: {reason}" for function, reason in error.errors.items()
    )
    return (
        f"{source}: {reasons}. Write it module:name, with the module in the folder where Tailrace "
        "was started or installed in its environment"
    )


def _judge(entry: RewardEntry, source: str, made: Components, gateway: RunGateway | None) -> Component:
    assert entry.judge is not None
    variable = entry.judge.api_key_env
    try:
        _check_key(entry, variable)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    key = os.environ[variable] if variable else ""
    judge = Judge(entry.name, entry.judge, entry.timeout_s, key, gateway)
    made.closers.append(judge.close)
    return judge


def _check_key(entry: RewardEntry, variable: str) -> None:
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"reward {entry.name!r}: judge.api_key_env: the variable {variable} is not set: set it "
            "where tailrace starts, and name it under cluster.keep_environment"
        )


async def _open_models(config: RewardConfig, made: Components) -> None:
    """Each model once, however many components it has."""
    opened: dict[str, Component] = {}
    for entry in config.components:
        if entry.kind == "model":
            if entry.pretrain not in opened:
                opened[entry.pretrain] = await _model(entry.pretrain, config.model_args, made)
            made.by_name[entry.name] = opened[entry.pretrain]


async def _model(pretrain: str, args: RewardModelArgs, made: Components) -> Component:
    module = "tailrace_reward.adapters.reward_model"
    reward_model = load_extra(module, "reward-model", f"reward model {pretrain}")
    model = await asyncio.to_thread(reward_model.RewardModel, pretrain, args)
    made.closers.append(model.close)
    component: Component = model
    return component
