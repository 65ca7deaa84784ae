"""`tailrace episode`: one episode in the terminal, turn by turn, without any cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from tailrace.chat import Renderer
from tailrace.config import ConfigError
from tailrace.envs import make_env
from tailrace_agents.config import AgentsConfig
from tailrace_agents.core.episode import EpisodeLimits, EpisodeResult, SamplingPlan, mix_seed
from tailrace_agents.core.play import play_episode
from tailrace_cli.checkpoints import newest_checkpoint
from tailrace_cli.experiment import Experiment
from tailrace_inference.adapters.local_policy import LocalPolicy
from tailrace_inference.engine.checkpoint import CheckpointError, engine_from_checkpoint
from tailrace_inference.engine.engine import TorchEngine
from tailrace_protos.base import as_float32, as_uint8
from tailrace_protos.generation import SamplingParams
from tailrace_protos.weights import ModelCard

WALL_CLOCK_S = 600.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class TerminalObserver:
    """Prints an episode as it is played."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._turn = 0

    def on_reset(self, observation: str) -> None:
        """Show what the model reads first."""
        self._turn = 0
        self._show("environment", observation, "cyan")

    def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
        """Show the reply and what came of it."""
        self._turn += 1
        self._show(f"model, turn {self._turn}", reply, "green")
        self._show(f"environment, reward {reward:g}{', the end' if done else ''}", observation, "cyan")

    def _show(self, title: str, text: str, style: str) -> None:
        self._console.print(
            Panel(Text(text.rstrip("\n")), title=title, title_align="left", style=style)
        )


def play_in_terminal(
    experiment: Experiment, console: Console, *, checkpoint: str, task_seed: int
) -> None:
    """Play the task of `task_seed` with the model of `checkpoint` and print every turn."""
    folder = _model_folder(experiment, checkpoint)
    renderer = Renderer.from_model_card(_model_card(folder))
    console.print(f"model {folder}", highlight=False)
    try:
        engine = engine_from_checkpoint(folder, experiment.inference)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    result = asyncio.run(_play(experiment, renderer, engine, console, task_seed))
    num_tokens, num_sampled = len(result.tokens), result.tokens.num_sampled
    console.print(
        f"outcome {result.outcome.value}{f' ({result.reason})' if result.reason else ''}, return "
        f"{sum(result.tokens.turn_rewards):g}, {result.tokens.num_turns} turns, {num_tokens} tokens, "
        f"{num_sampled} of them sampled at mean log-probability {_mean_logprob(result):.3f}",
        highlight=False,
    )


async def _play(
    experiment: Experiment, renderer: Renderer, engine: TorchEngine, console: Console, task_seed: int
) -> EpisodeResult:
    scheduler, agents = experiment.scheduler, experiment.agents
    name = (scheduler.eval_tags or scheduler.tags)[0]
    entry = agents.custom_envs[name]
    args = agents.eval_generating_args
    limits = EpisodeLimits(
        max_episode_tokens=agents.max_episode_tokens,
        max_new_tokens=args.max_new_tokens,
        max_tokens_per_step=entry.max_tokens_per_step,
        wall_clock_s=WALL_CLOCK_S,
    )
    async with LocalPolicy(engine) as policy:
        return await play_episode(
            make_env(entry.env_type, entry.env_config),
            renderer,
            policy,
            limits,
            SamplingPlan(_sampling(agents, renderer), mix_seed(experiment.run.seed, task_seed)),
            seed=task_seed,
            observer=TerminalObserver(console),
        )


def _model_card(folder: Path) -> ModelCard:
    """The model card of a Hugging Face model directory."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no model directory: it holds no {name}")
    present = (name for name in TOKENIZER_FILES if (folder / name).is_file())
    files = {name: (folder / name).read_bytes() for name in present}
    return ModelCard((folder / "config.json").read_bytes(), files)


def _sampling(agents: AgentsConfig, renderer: Renderer) -> SamplingParams:
    args = agents.eval_generating_args
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop_token_ids=renderer.stop_token_ids,
        stop=args.stop,
    )


def _mean_logprob(result: EpisodeResult) -> float:
    row = result.tokens.row().row
    mask = as_uint8(row.loss_mask).astype(bool)
    return float(as_float32(row.inference_logprobs)[mask].mean()) if mask.any() else 0.0


def _model_folder(experiment: Experiment, checkpoint: str) -> Path:
    """`--checkpoint`, else the run's newest checkpoint, else `pretrain`."""
    run = experiment.run
    if checkpoint:
        return Path(checkpoint)
    try:
        return newest_checkpoint(run.run_dir)
    except ConfigError:
        if run.pretrain:
            return Path(run.pretrain)
        raise
