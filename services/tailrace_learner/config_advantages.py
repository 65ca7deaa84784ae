"""The keys of the `learner` section that shape returns and advantages."""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config

AdvEstimator = Literal[
    "grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "remax",
    "opo",
    "starpo",
    "turn_reinforce",
    "gigpo",
    "step_reinforce",
]

# Estimators that compare the members of a group and need two valid ones; `starpo` by its grouping.
GROUP_RELATIVE = frozenset(
    {
        "grpo",
        "rloo",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "turn_reinforce",
        "gigpo",
        "step_reinforce",
    }
)
WHITENING = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
# Estimators with rewards of single tokens, of which a divergence can be subtracted.
TOKEN_REWARDED = WHITENING | {"reinforce", "gae"}
# Those of them that are defined with the divergence in the reward.
PAYING = frozenset({"reinforce_plus_plus"})


class AdvantageConfig(Config, frozen=True, kw_only=True):
    """From rewards to advantages; every name is explained in `docs/algorithms.md`."""

    adv_estimator: AdvEstimator = "grpo"
    """How advantages are computed from returns and turn rewards (`core/algorithms/advantages/`)."""

    norm_std: bool = True
    """Divide advantages by the standard deviation of what they are compared with; false with `grpo`
    is Dr. GRPO. Read by `grpo`, `gigpo`, `turn_reinforce` and `step_reinforce`."""

    gamma: float = 1.0
    """Discount per policy token (`reinforce`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`)
    or per turn (`turn_reinforce`); of `gae`, per `gae_unit`. Between the turns of conversations that
    agent loops and workflows had, their `turn_discount` counts instead."""

    lambd: float = 0.95
    """How far `gae` looks beyond the critic's next value: 0 trusts the critic at once, 1 never."""

    gae_unit: Literal["token", "turn"] = "token"
    """What `gae` counts as one step: a policy token or a turn."""

    step_gamma: float = 0.95
    """Discount per turn of `gigpo` and `step_reinforce`; as `gamma`, not between the turns of a row of
    a conversation."""

    episode_advantage_weight: float = 1.0
    """Weight of the episode's part of a `gigpo` advantage."""

    step_advantage_weight: float = 1.0
    """Weight of the turn's part of a `gigpo` advantage."""

    reward_grouping: Literal["traj_group_id", "tags", "batch"] = "traj_group_id"
    """Which episodes `starpo` compares: those of a group, those of a tag in the step, or all of the
    step. The last two wait for the whole step."""

    reward_norm: Literal["mean_std", "mean", "none"] = "mean_std"
    """What `starpo` does with returns: subtract the mean and divide by the deviation, subtract the
    mean, or nothing."""

    reward_clip: float = 0.0
    """Clip returns and single turns' rewards to plus or minus this, once, before anything is computed
    from them; 0 switches it off. What an episode is given at its end is part of its last turn's."""

    overlong_max_tokens: int = 0
    """Sampled tokens of an episode at which a length penalty reaches 1 (DAPO's soft overlong
    punishment); 0 switches it off."""

    overlong_buffer_tokens: int = 0
    """Over so many tokens before `overlong_max_tokens` the penalty rises linearly from 0; given with
    it only."""

    over_budget_episodes: Literal["train", "mask"] = "train"
    """Episodes that one of their limits cut off (`max_new_tokens`, `max_episode_tokens`, `max_turns` of
    loops). `train`: a failure like any other: that the task was not done within its limits is a result
    of what the policy did, and finishing in time is learnt from nothing else. `mask`: they count where
    episodes are compared but are not trained (DAPO's overlong filtering), for limits that are chance
    rather than part of the task, such as long thoughts cut before their answer. Of workflows, those
    that end by the gateway's refusal to go on."""

    advantage_clip: float = 0.0
    """Clip advantages to plus or minus this, before whitening; 0 switches it off."""

    whiten_advantages: bool = False
    """Give the advantages of a step's trained tokens mean 0 and deviation 1. Waits for the whole step.
    `reinforce_plus_plus` and `reinforce_plus_plus_baseline` always do."""

    zero_variance_groups: Literal["skip", "redraw"] = "skip"
    """Groups whose valid members all have the same return teach estimators nothing that compare them.
    `skip`: they count towards the step and are not computed, but for their divergence where the loss
    has one (`init_kl_coef`). `redraw`: they do not count, others are admitted for them (DAPO's dynamic
    sampling). Not read by `reinforce`, `reinforce_plus_plus` and
    `gae`, to which such groups say something, nor by `starpo` beyond groups or without norm."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the step."""
        return self.whiten_advantages or self.adv_estimator in WHITENING

    @property
    def normalises_over_step(self) -> bool:
        """Whether returns are compared beyond their group."""
        beyond = self.reward_grouping != "traj_group_id" and self.reward_norm != "none"
        return self.adv_estimator == "starpo" and beyond

    @property
    def compares_observations(self) -> bool:
        """Whether turns are compared by what was observed before them."""
        return self.adv_estimator == "gigpo" and self.step_advantage_weight != 0

    @property
    def needs_two_members(self) -> bool:
        """Whether a group with one valid member teaches nothing."""
        own = self.adv_estimator == "starpo" and self.reward_norm != "none"
        return self.adv_estimator in GROUP_RELATIVE or (own and self.reward_grouping == "traj_group_id")

    @property
    def waits_for_step(self) -> str:
        """The key for which no backward pass may begin before a step's last group; mostly empty."""
        if self.normalises_over_step:
            return "reward_grouping"
        return "whiten_advantages" if self.whitens else ""
