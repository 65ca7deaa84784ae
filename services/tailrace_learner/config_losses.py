"""The keys of the `learner` section that choose and shape the policy loss."""

from __future__ import annotations

from typing import Literal

from tailrace_learner.config_advantages import AdvantageConfig

PolicyLoss = Literal[
    "vanilla_pg",
    "ppo_clip",
    "dapo",
    "grpo",
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

# Losses that weigh tokens by the policy that sampled them, so that a correction would do it twice.
OFF_POLICY_LOSSES = frozenset({"decoupled_ppo", "tis_pg", "topr", "m2po", "dppo_tv"})


_COV_FRACTIONS = {"kl_cov": 2e-3, "clip_cov": 2e-4}


class LossConfig(AdvantageConfig, frozen=True, kw_only=True):
    """What a token costs, and how token losses become one number."""

    loss: PolicyLoss = "ppo_clip"
    """The policy loss (`core/algorithms/losses/`)."""

    pg_clip: float = 0.2
    """How far below 1 the ratio of current and proximal policy is followed (`ppo_clip`, `dapo`, `grpo`,
    `decoupled_ppo`, `segment`, `clip_cov`); above too, but for `dapo`, `segment`, `clip_cov`."""

    pg_clip_high: float = 0.28
    """How far above 1 the ratio is followed with `dapo`, `segment` and `clip_cov`."""

    dual_clip: float = 0.0
    """Bound, above 1, of the ratio of tokens with negative advantages (`ppo_clip`, `dapo`,
    `grpo`, `decoupled_ppo`); 0 switches it off."""

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

    cov_fraction: float | None = None
    """Share of a mini-batch's tokens that `kl_cov` and `clip_cov` treat differently. Null: the paper's,
    2e-3 with `kl_cov` (for 7B models; it takes 2e-4 for 32B) and 2e-4 with `clip_cov`."""

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

    @property
    def resolved_cov_fraction(self) -> float:
        """The share of tokens that the loss picks, null resolved; 0 with losses that pick none."""
        if self.cov_fraction is not None:
            return self.cov_fraction
        return _COV_FRACTIONS.get(self.loss, 0.0)
