"""Algorithm keys of the `learner` section: advantages, loss, divergence, correction, updates.

A key that only some estimators, losses or corrections read names them. An experiment that sets such a
key for another algorithm is refused. The clips and caps that experiments share (`SHARED`) are the
exception: other algorithms ignore them. `docs/algorithms.md` has the formulas.
"""

from typing import Literal

from tailrace.config import Config
from tailrace_learner.config_registry import (
    CORRECTIONS,
    ESTIMATORS,
    LOSSES,
    Correction,
    Estimator,
    Fact,
    Loss,
)

SHARED = frozenset({"pg_clip", "pg_clip_high", "tis_cap"})


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Keys that decide what a step computes, and facts that follow from them."""

    # From rewards to advantages.

    adv_estimator: str = "grpo"
    """Estimator that turns returns and turn rewards into advantages: a built-in name (`grpo`, `rloo`,
    `reinforce`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae`, `remax`, `opo`, `starpo`,
    `turn_reinforce`, `gigpo`, `step_reinforce`), or `my_module:NAME`, an `Estimator` of your own."""

    norm_std: bool = True
    """Divide advantages by the standard deviation of the returns they are compared with. false with
    `grpo` is Dr. GRPO. Read by `grpo`, `gigpo`, `turn_reinforce` and `step_reinforce`."""

    gamma: float = 1.0
    """Discount per policy token (`reinforce`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`),
    per turn (`turn_reinforce`), or per `gae_unit` (`gae`). Agent loops and workflows discount between
    the turns of a conversation by their `turn_discount` instead."""

    lambd: float = 0.95
    """Weight of later rewards in `gae`: 0 trusts the critic's next value alone, 1 never trusts it."""

    gae_unit: Literal["token", "turn"] = "token"
    """Step of `gae`: a policy token or a turn."""

    step_gamma: float = 0.95
    """Discount per turn of `gigpo` and `step_reinforce`. Like `gamma`, it does not apply between the
    turns of a row of a conversation."""

    episode_advantage_weight: float = 1.0
    """Weight of the episode's part of a `gigpo` advantage."""

    step_advantage_weight: float = 1.0
    """Weight of the turn's part of a `gigpo` advantage."""

    reward_grouping: Literal["traj_group_id", "tags", "batch"] = "traj_group_id"
    """Episodes that `starpo` compares with each other: those of a group, those of a tag in the step, or
    all of the step. The last two wait for the whole step."""

    reward_norm: Literal["mean_std", "mean", "none"] = "mean_std"
    """Normalization of returns in `starpo`: subtract the mean and divide by the standard deviation,
    subtract the mean, or neither."""

    reward_clip: float = 0.0
    """Clip returns and the rewards of single turns to plus or minus this, once, before anything is
    computed from them. 0 switches it off. The reward at an episode's end counts to its last turn."""

    overlong_max_tokens: int = 0
    """Sampled tokens of an episode at which a length penalty reaches 1 (the soft overlong punishment of
    DAPO). 0 switches it off."""

    overlong_buffer_tokens: int = 0
    """Tokens before `overlong_max_tokens` over which the penalty rises
    linearly from 0. Set both keys or neither."""

    over_budget_episodes: Literal["train", "mask"] = "train"
    """Episodes that a limit cut off (`max_new_tokens`, `max_episode_tokens`, `max_turns` of loops; for
    workflows, those that end because the gateway refused to go on). `train`: they are failures like
    others, and the policy learns to finish in time. `mask`: they count where episodes are compared but
    are not trained (the overlong filtering of DAPO), for limits that are not part of the task."""

    advantage_clip: float = 0.0
    """Clip advantages to plus or minus this, before whitening. 0 switches it off."""

    whiten_advantages: bool = False
    """Give the advantages of a step's trained tokens mean 0 and
    standard deviation 1. This waits for the whole step. `reinforce_plus_plus` and
    `reinforce_plus_plus_baseline` always do it."""

    zero_variance_groups: Literal["count", "skip", "redraw"] = "count"
    """Groups whose valid members all have the same return, with estimators that compare the members of
    a group. They have no gradient and are not computed, except for their divergence where the loss has
    one (`init_kl_coef`; then they are in the divisor too). `count`: they count towards the step, and
    their tokens or rows in the divisor of the loss, as in the published GRPO, Dr. GRPO and most
    trainers. `skip`: they count towards the step and not in the divisor, so a few groups with a signal
    make a full step. `redraw`: they do not count, and the scheduler admits others instead (the dynamic
    sampling of DAPO). Other estimators (`reinforce`, `reinforce_plus_plus`, `gae`,
    `starpo` beyond groups or without normalization) learn from such groups and do not read the key."""

    # From advantages to a loss.

    loss: str = "ppo_clip"
    """Policy loss: a built-in name (`vanilla_pg`, `ppo_clip`, `dapo`, `grpo`, `decoupled_ppo`,
    `segment`, `gspo`, `gmpo`, `cispo`, `sapo`, `tis_pg`, `topr`, `kimi15`, `m2po`, `kl_cov`,
    `clip_cov`, `dppo_tv`), or `my_module:NAME`, a `Loss` of your own."""

    pg_clip: float = 0.2
    """Distance below 1 at which the ratio of current and proximal policy is
    clipped (`ppo_clip`, `dapo`, `grpo`, `decoupled_ppo`, `segment`, `clip_cov`). Without `dapo`,
    `segment` and `clip_cov` it is the distance above 1 too."""

    pg_clip_high: float = 0.28
    """Distance above 1 at which the ratio is clipped with `dapo`, `segment` and `clip_cov`."""

    dual_clip: float = 0.0
    """Bound, above 1, of the ratio of tokens with negative advantages (`ppo_clip`, `dapo`, `grpo`,
    `decoupled_ppo`). 0 switches it off."""

    gspo_clip: float = 3e-4
    """Distance below 1 at which `gspo` clips the ratio of a sequence."""

    gspo_clip_high: float = 4e-4
    """Distance above 1 at which `gspo` clips the ratio of a sequence."""

    gmpo_clip: float = 0.4
    """Bound of a token's log-ratio with `gmpo`, on the side that its advantage pushes to."""

    cispo_clip: float = 1.0
    """Distance below 1 at which `cispo` clips a token's weight. 1 sets no lower bound."""

    cispo_clip_high: float = 4.0
    """Distance above 1 at which `cispo` clips a token's weight."""

    sapo_tau: float = 1.0
    """Temperature of the gate of `sapo` for positive advantages."""

    sapo_tau_negative: float = 1.05
    """Temperature of the gate of `sapo` for all other advantages."""

    kimi_tau: float = 0.1
    """Weight of the squared log-ratio of a row in `kimi15`."""

    m2_threshold: float = 0.04
    """Largest mean squared log-ratio of a mini-batch with `m2po`, which leaves tokens out above it."""

    cov_fraction: float | None = None
    """Share of a mini-batch's tokens that `kl_cov` and `clip_cov` treat differently. Null: the share of
    the paper, 2e-3 with `kl_cov` (for 7B models; 2e-4 for 32B) and 2e-4 with `clip_cov`."""

    kl_cov_coef: float = 1.0
    """Weight of the divergence penalty on the tokens that `kl_cov` picks."""

    clip_cov_low: float = 1.0
    """Lower bound of the covariance of tokens that `clip_cov` may pick."""

    clip_cov_high: float = 5.0
    """Upper bound of the covariance of tokens that `clip_cov` may pick."""

    dppo_delta: float = 0.2
    """Change of a token's probability beyond which `dppo_tv` drops its gradient."""

    dppo_cap: float = 20.0
    """Ratio of current and behaviour policy at which `dppo_tv` truncates a token's weight."""

    dppo_kl_coef: float = 0.0
    """Weight of the squared log-ratio to the behaviour policy in `dppo_tv`."""

    loss_aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """Reduction of token losses to one number: the mean over all trained tokens, or the mean over rows
    of their token sum, of their token mean, or of their token sum divided by `loss_norm_tokens`."""

    loss_norm_tokens: int = 0
    """Divisor of `seq_mean_token_sum_norm`, usually the longest possible reply; read with it only."""

    entropy_loss_coef: float = 0.0
    """Weight of the mean token entropy, which is subtracted from the loss."""

    # Divergence from a reference model.

    init_kl_coef: float = 0.0
    """Weight of the divergence from the reference model (`learner.reference`; without it, the weights
    at the run's start). 0: the learner has no reference model."""

    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the divergence from sampled
    tokens. The gradient of `k1` in the loss is 0 on average: use `k1` in the reward."""

    kl_in: Literal["loss", "reward"] | None = None
    """`loss`: added to the policy loss of every token. `reward`: subtracted from every token's reward
    before advantages are computed, for `reinforce`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline` and `gae`. Null: `reward` with `reinforce_plus_plus`, which is
    defined so, and `loss` with the others."""

    target_kl: float = 0.0
    """Divergence towards which the weight is steered after every step. 0 keeps the weight."""

    kl_horizon: int = 10_000
    """Episodes over which the weight is steered: a larger number steers more slowly. Read with
    `target_kl`."""

    # Correction of tokens that other weights sampled.

    behaviour_correction: str = "tis"
    """Weights by proximal over behaviour probability, for tokens that older weights sampled, or an
    engine with other arithmetic. `tis`: truncated at `tis_cap`. `mis`: 0 above `tis_cap`. `icepop`: 0
    outside `icepop_low` to `icepop_high`. `none`: no weights, for losses that weigh by the behaviour
    policy themselves. Or `my_module:NAME`, a `Correction` of your own."""

    tis_cap: float = 2.0
    """Importance weight at which `tis` and the losses `decoupled_ppo` and `tis_pg` truncate (`.inf`:
    nowhere below e^20), and above which `mis` leaves tokens out."""

    correction_level: Literal["token", "sequence"] = "token"
    """Unit of the weights of `tis` and `mis`: each token, or the product over all tokens of a row."""

    icepop_low: float = 0.5
    """Weight below which `icepop` leaves tokens out."""

    icepop_high: float = 5.0
    """Weight above which `icepop` leaves tokens out."""

    geometric_mask: float = 0.0
    """Leave out rows whose geometric mean weight is above 1 plus this, or below one over that. 0
    switches it off. It goes together with any correction."""

    proximal_logprobs: Literal["recompute", "interpolate"] = "recompute"
    """Source of the proximal log-probabilities that losses compare with: `recompute` takes the weights
    at the start of the step. `interpolate` takes a line between behaviour and current policy by each
    token's age, which saves forward passes when a step has several updates."""

    # Updates of a step.

    num_mini_batches: int = 1
    """Optimizer updates of one step, each on its share of the step's groups."""

    ppo_epochs: int = 1
    """Passes over a step's groups. Passes after the first begin when all groups have arrived."""

    @property
    def estimator(self) -> Estimator:
        """Declaration of `adv_estimator`."""
        return ESTIMATORS.find(self.adv_estimator)

    @property
    def policy_loss(self) -> Loss:
        """Declaration of `loss`."""
        return LOSSES.find(self.loss)

    @property
    def correction(self) -> Correction:
        """Declaration of `behaviour_correction`."""
        return CORRECTIONS.find(self.behaviour_correction)

    @property
    def whitens(self) -> bool:
        """True if advantages are whitened over the step."""
        return self.whiten_advantages or self.estimator.whitens

    @property
    def normalises_over_step(self) -> bool:
        """True if returns are compared beyond their group."""
        return self._holds(self.estimator.compares_step)

    @property
    def compares_observations(self) -> bool:
        """True if the estimator compares turns that began with the same observation."""
        return self._holds(self.estimator.compares_observations)

    @property
    def needs_two_members(self) -> bool:
        """True if a group with one valid member has no advantages."""
        return self._holds(self.estimator.compares_group)

    @property
    def waits_for_step(self) -> str:
        """Key for which the first backward pass waits for a step's last group; empty without one."""
        if self.normalises_over_step:
            return "reward_grouping"
        return "whiten_advantages" if self.whitens else ""

    @property
    def needs_reference(self) -> bool:
        """True if anything uses a reference model."""
        return self.init_kl_coef > 0

    @property
    def resolved_kl_in(self) -> Literal["loss", "reward"]:
        """Place of the divergence, null resolved."""
        if self.kl_in is not None:
            return self.kl_in
        return "reward" if self.estimator.divergence_in_reward else "loss"

    @property
    def holds_all_tokens(self) -> bool:
        """True if the loss holds tokens near the reference whatever their advantage."""
        return self.needs_reference and not self.rewards_divergence

    @property
    def rewards_divergence(self) -> bool:
        """True if advantages need the reference's log-probabilities."""
        return self.needs_reference and self.resolved_kl_in == "reward"

    @property
    def needs_estimates(self) -> bool:
        """True if models must read all policy tokens before advantages are known."""
        return self.estimator.needs_values or self.rewards_divergence

    def _holds(self, fact: Fact) -> bool:
        return fact(self) if callable(fact) else fact
