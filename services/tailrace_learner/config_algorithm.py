"""The keys of the `learner` section that choose and shape the algorithm.

A key that only some estimators, losses or corrections read names them; set for another one it is
refused, except for the clips and caps that experiments share (`pg_clip`, `pg_clip_high`, `tis_cap`,
`loss_norm_tokens`), which are then not read.
"""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config

AdvEstimator = Literal[
    "grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "starpo",
    "turn_reinforce",
    "gigpo",
    "step_reinforce",
]
PolicyLoss = Literal[
    "vanilla_pg",
    "ppo_clip",
    "dapo",
    "decoupled_ppo",
    "segment",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "tis_pg",
    "topr",
    "kimi15",
    "m2po",
    "kl_cov",
    "clip_cov",
    "dppo_tv",
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
# Losses that weigh tokens by the policy that sampled them, so that a correction would do it twice.
OFF_POLICY_LOSSES = frozenset({"decoupled_ppo", "tis_pg", "topr", "m2po", "dppo_tv"})
_WHITENING = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})

# key -> (the key that decides whether it is read, the values of that key with which it is)
READERS: dict[str, tuple[str, frozenset[str]]] = {
    "norm_std": ("adv_estimator", frozenset({"grpo", "gigpo", "turn_reinforce", "step_reinforce"})),
    "gamma": ("adv_estimator", _WHITENING | {"reinforce", "turn_reinforce"}),
    "step_gamma": ("adv_estimator", frozenset({"gigpo", "step_reinforce"})),
    "episode_advantage_weight": ("adv_estimator", frozenset({"gigpo"})),
    "step_advantage_weight": ("adv_estimator", frozenset({"gigpo"})),
    "reward_grouping": ("adv_estimator", frozenset({"starpo"})),
    "reward_norm": ("adv_estimator", frozenset({"starpo"})),
    "dual_clip": ("loss", frozenset({"ppo_clip", "dapo", "decoupled_ppo"})),
    "gspo_clip": ("loss", frozenset({"gspo"})),
    "gspo_clip_high": ("loss", frozenset({"gspo"})),
    "gmpo_clip": ("loss", frozenset({"gmpo"})),
    "cispo_clip": ("loss", frozenset({"cispo"})),
    "cispo_clip_high": ("loss", frozenset({"cispo"})),
    "sapo_tau": ("loss", frozenset({"sapo"})),
    "sapo_tau_negative": ("loss", frozenset({"sapo"})),
    "kimi_tau": ("loss", frozenset({"kimi15"})),
    "m2_threshold": ("loss", frozenset({"m2po"})),
    "cov_fraction": ("loss", frozenset({"kl_cov", "clip_cov"})),
    "kl_cov_coef": ("loss", frozenset({"kl_cov"})),
    "clip_cov_low": ("loss", frozenset({"clip_cov"})),
    "clip_cov_high": ("loss", frozenset({"clip_cov"})),
    "dppo_delta": ("loss", frozenset({"dppo_tv"})),
    "dppo_kl_coef": ("loss", frozenset({"dppo_tv"})),
    "correction_level": ("behaviour_correction", frozenset({"tis", "mis"})),
    "icepop_low": ("behaviour_correction", frozenset({"icepop"})),
    "icepop_high": ("behaviour_correction", frozenset({"icepop"})),
}


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Advantages, losses and corrections; every name is explained in `docs/algorithms.md`."""

    adv_estimator: AdvEstimator = "grpo"
    """How advantages are computed from returns and turn rewards (`core/advantages/`)."""

    norm_std: bool = True
    """Divide advantages by the standard deviation of what they are compared with; false with `grpo`
    is Dr. GRPO. Read by `grpo`, `gigpo`, `turn_reinforce` and `step_reinforce`."""

    gamma: float = 1.0
    """Discount per policy token (`reinforce`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`)
    or per turn (`turn_reinforce`)."""

    step_gamma: float = 0.95
    """Discount per turn of `gigpo` and `step_reinforce`."""

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
    """Clip returns and turn rewards to plus or minus this before anything is computed from them;
    0 switches it off."""

    overlong_max_tokens: int = 0
    """Sampled tokens of an episode at which a length penalty reaches 1 (DAPO's soft overlong
    punishment); 0 switches it off."""

    overlong_buffer_tokens: int = 0
    """Over so many tokens before `overlong_max_tokens` the penalty rises linearly from 0; given with
    it only."""

    advantage_clip: float = 0.0
    """Clip advantages to plus or minus this, before whitening; 0 switches it off."""

    whiten_advantages: bool = False
    """Give the advantages of a step's trained tokens mean 0 and deviation 1. Waits for the whole step.
    `reinforce_plus_plus` and `reinforce_plus_plus_baseline` always do."""

    zero_variance_groups: Literal["skip", "redraw"] = "skip"
    """Groups whose valid members all have the same return teach nothing. `skip`: they count towards
    the step and are not computed. `redraw`: they do not count, others are admitted for them (DAPO's
    dynamic sampling)."""

    loss: PolicyLoss = "ppo_clip"
    """The policy loss (`core/losses/`)."""

    pg_clip: float = 0.2
    """How far below 1 the ratio of current and proximal policy is followed (`ppo_clip`, `dapo`,
    `decoupled_ppo`, `segment`, `clip_cov`); above too, but for `dapo`, `segment`, `clip_cov`."""

    pg_clip_high: float = 0.28
    """How far above 1 the ratio is followed with `dapo`, `segment` and `clip_cov`."""

    dual_clip: float = 0.0
    """Bound, above 1, of the ratio of tokens with negative advantages (`ppo_clip`, `dapo`,
    `decoupled_ppo`); 0 switches it off."""

    gspo_clip: float = 3e-4
    """How far below 1 the sequence ratio is followed with `gspo`."""

    gspo_clip_high: float = 4e-4
    """How far above 1 the sequence ratio is followed with `gspo`."""

    gmpo_clip: float = 0.4
    """Bound of a token's log-ratio with `gmpo`, on the side that its advantage pushes to."""

    cispo_clip: float = 1.0
    """How far below 1 a weight of `cispo` may lie; 1 sets no lower bound."""

    cispo_clip_high: float = 4.0
    """How far above 1 a weight of `cispo` may lie."""

    sapo_tau: float = 1.0
    """Temperature of the gate of `sapo` where the advantage is positive."""

    sapo_tau_negative: float = 1.05
    """Temperature of the gate of `sapo` where the advantage is not positive."""

    kimi_tau: float = 0.1
    """Weight of the squared log-ratio of a row in `kimi15`."""

    m2_threshold: float = 0.04
    """Mean squared log-ratio of a mini-batch down to which `m2po` leaves tokens out."""

    cov_fraction: float = 2e-3
    """Share of a mini-batch's tokens that `kl_cov` and `clip_cov` treat differently."""

    kl_cov_coef: float = 1.0
    """Weight of the divergence penalty on the tokens that `kl_cov` picks."""

    clip_cov_low: float = 1.0
    """Least covariance of tokens that `clip_cov` may pick."""

    clip_cov_high: float = 5.0
    """Greatest covariance of tokens that `clip_cov` may pick."""

    dppo_delta: float = 0.2
    """Difference of probabilities beyond which `dppo_tv` follows a token no further."""

    dppo_kl_coef: float = 0.0
    """Weight of the squared log-ratio to the behaviour policy in `dppo_tv`."""

    loss_aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """How token losses become one number: mean over all trained tokens; mean over rows of their token
    sum, of their token mean, or of their token sum divided by `loss_norm_tokens`."""

    loss_norm_tokens: int = 0
    """Divisor of `seq_mean_token_sum_norm`, usually the longest possible reply; read with it only."""

    entropy_loss_coef: float = 0.0
    """Weight of the mean token entropy, subtracted from the loss."""

    behaviour_correction: Literal["tis", "mis", "icepop", "none"] = "tis"
    """Weights by proximal over behaviour probability, for tokens sampled by older weights or by an
    engine with other arithmetic: truncated at `tis_cap`; without those above `tis_cap`; without those
    outside `icepop_low` to `icepop_high`; or no weights. Losses that weigh by the behaviour policy
    themselves want `none`."""

    tis_cap: float = 2.0
    """Where importance weights are truncated (`tis`, the losses `decoupled_ppo` and `tis_pg`; `.inf`:
    nowhere) or beyond which tokens are left out (`mis`)."""

    correction_level: Literal["token", "sequence"] = "token"
    """Whether `tis` and `mis` weigh each token by itself, or all of a row by the product of its
    tokens."""

    icepop_low: float = 0.5
    """Tokens of a lower weight are left out by `icepop`."""

    icepop_high: float = 5.0
    """Tokens of a higher weight are left out by `icepop`."""

    geometric_mask: float = 0.0
    """Leave out rows whose geometric mean weight lies beyond 1 plus this, or below one over that;
    0 switches it off. Goes together with any correction."""

    proximal_logprobs: Literal["recompute", "interpolate"] = "recompute"
    """Where the log-probabilities that losses are measured against come from: the weights at the
    start of the step, or a line between behaviour and current policy by each token's age, which
    spares forward passes when a step has several updates."""

    num_mini_batches: int = 1
    """Optimizer updates of one step, each on its share of the step's groups."""

    ppo_epochs: int = 1
    """Passes over a step's groups. Passes after the first begin when all groups have arrived."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the step."""
        return self.whiten_advantages or self.adv_estimator in _WHITENING

    @property
    def normalises_over_step(self) -> bool:
        """Whether returns are compared beyond their group."""
        beyond = self.reward_grouping != "traj_group_id" and self.reward_norm != "none"
        return self.adv_estimator == "starpo" and beyond

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

    def __post_init__(self) -> None:
        for key in ("num_mini_batches", "ppo_epochs"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in _POSITIVE:
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be positive")
        for key in _NOT_NEGATIVE:
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must not be negative")
        for key in ("gamma", "step_gamma", "cov_fraction"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} must lie between 0 and 1")
        self._check_combinations()
        self._check_readers()

    def _check_combinations(self) -> None:
        if self.loss_aggregation == "seq_mean_token_sum_norm" and not self.loss_norm_tokens:
            raise ValueError(
                "loss_norm_tokens must be given with loss_aggregation seq_mean_token_sum_norm"
            )
        if 0 < self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1, or 0 to switch it off")
        if bool(self.overlong_max_tokens) != bool(self.overlong_buffer_tokens):
            raise ValueError("overlong_max_tokens and overlong_buffer_tokens are given together")
        if self.overlong_buffer_tokens > self.overlong_max_tokens:
            raise ValueError("overlong_buffer_tokens must not exceed overlong_max_tokens")
        for low, high in (("icepop_low", "icepop_high"), ("clip_cov_low", "clip_cov_high")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} must be below {high}")
        if self.loss in OFF_POLICY_LOSSES and self.behaviour_correction != "none":
            raise ValueError(
                f"loss {self.loss!r} weighs tokens by the policy that sampled them; "
                f"behaviour_correction {self.behaviour_correction!r} would do it again: set it to none"
            )

    def _check_readers(self) -> None:
        defaults = dict(
            zip(
                self.__struct_fields__[-len(self.__struct_defaults__) :],
                self.__struct_defaults__,
                strict=True,
            )
        )
        for key, (selector, readers) in READERS.items():
            chosen = getattr(self, selector)
            if chosen not in readers and getattr(self, key) != defaults[key]:
                raise ValueError(
                    f"{key} is not read by {selector} {chosen!r} (only by "
                    f"{', '.join(sorted(readers))}): remove it or choose one of these"
                )


_POSITIVE = (
    "pg_clip",
    "pg_clip_high",
    "tis_cap",
    "gspo_clip",
    "gspo_clip_high",
    "gmpo_clip",
    "cispo_clip",
    "cispo_clip_high",
    "sapo_tau",
    "sapo_tau_negative",
    "m2_threshold",
    "dppo_delta",
)
_NOT_NEGATIVE = (
    "loss_norm_tokens",
    "reward_clip",
    "advantage_clip",
    "overlong_max_tokens",
    "overlong_buffer_tokens",
    "dual_clip",
    "kimi_tau",
    "kl_cov_coef",
    "dppo_kl_coef",
    "icepop_low",
    "geometric_mask",
)
