"""Interface between the episode machine and the model: by token ids, or by text at an endpoint."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tailrace.config.run import ReasoningPolicy
from tailrace.sdk.agent_loop import EpisodePolicy, LoopLimits
from tailrace_agents.core.environments import StepResult
from tailrace_agents.core.journal import EpisodeRecords
from tailrace_agents.core.machine import Episode
from tailrace_agents.core.tools import BoundTools
from tailrace_agents.ports import LoopObserver
from tailrace_protos.session import ExportStyle, RewardScope


@dataclass(frozen=True)
class LoopPlan:
    """Settings of the loops that play one data set."""

    limits: LoopLimits  # `max_new_tokens` and `wall_clock_s` are each task's own
    export_style: ExportStyle
    turn_discount: float
    reasoning: ReasoningPolicy = "keep"
    reward_scope: RewardScope = RewardScope.EPISODE


class EnvView(NamedTuple):
    """Rows of an environment's episode, and the turns that the model sees."""

    style: ExportStyle = ExportStyle.CONCAT  # `CONCAT`: the episode is a row; `STEP`: every turn is
    history_turns: int | None = None  # earlier turns that the model sees; None: all of them


class ReplayMismatchError(Exception):
    """The environment answered recorded replies differently than it did before."""


class EnvPolicy(EpisodePolicy):
    """Policy of an environment's episode: answers observations and takes the steps that follow."""

    __slots__ = ()

    @abstractmethod
    async def answer(self, observation: str, opening: str) -> str:
        """Returns the model's reply; `opening` is the text that stays if the history is cut."""

    @abstractmethod
    async def take_step(self, step: StepResult) -> None:
        """Records the environment's step that followed the newest answer."""


class EpisodeModel(Protocol):
    """Model of a worker's episodes. Policies set the transcript of their episode."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""

    def require_plain_turns(self) -> None:
        """Raises `TemplateError` if the model's chat template cannot play environments."""

    def loop_policy(
        self,
        episode: Episode,
        plan: LoopPlan,
        records: EpisodeRecords,
        tools: BoundTools,
        observer: LoopObserver | None,
    ) -> EpisodePolicy:
        """Makes the policy of a loop's episode."""

    def env_policy(self, episode: Episode, view: EnvView, records: EpisodeRecords) -> EnvPolicy:
        """Makes the policy of an environment's episode."""
