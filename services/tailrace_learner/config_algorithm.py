"""The keys of the `learner` section that choose and shape the algorithm.

A key that only some estimators, losses or corrections read names them; set for another one it is
refused, except for the clips and caps that experiments share (`pg_clip`, `pg_clip_high`, `tis_cap`,
`loss_norm_tokens`), which are then not read. Numbers are finite, but for upper bounds, of which `.inf`
says that there is none.
"""

from __future__ import annotations

from typing import Literal

from tailrace_learner.config_advantages import GROUP_RELATIVE, WHITENING, AdvEstimator
from tailrace_learner.config_divergence import DivergenceConfig
from tailrace_learner.config_losses import OFF_POLICY_LOSSES, PolicyLoss
from tailrace_learner.config_models import check_finite

__all__ = [
    "GROUP_RELATIVE",
    "OFF_POLICY_LOSSES",
    "READERS",
    "AdvEstimator",
    "AlgorithmConfig",
    "PolicyLoss",
]

# key -> (the key that decides whether it is read, the values of that key with which it is)
READERS: dict[str, tuple[str, frozenset[str]]] = {
    "norm_std": ("adv_estimator", frozenset({"grpo", "gigpo", "turn_reinforce", "step_reinforce"})),
    "gamma": ("adv_estimator", WHITENING | {"reinforce", "turn_reinforce", "gae"}),
    "lambd": ("adv_estimator", frozenset({"gae"})),
    "gae_unit": ("adv_estimator", frozenset({"gae"})),
    "step_gamma": ("adv_estimator", frozenset({"gigpo", "step_reinforce"})),
    "episode_advantage_weight": ("adv_estimator", frozenset({"gigpo"})),
    "step_advantage_weight": ("adv_estimator", frozenset({"gigpo"})),
    "reward_grouping": ("adv_estimator", frozenset({"starpo"})),
    "reward_norm": ("adv_estimator", frozenset({"starpo"})),
    "zero_variance_groups": ("adv_estimator", GROUP_RELATIVE | {"starpo"}),
    "dual_clip": ("loss", frozenset({"ppo_clip", "dapo", "grpo", "decoupled_ppo"})),
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


class AlgorithmConfig(DivergenceConfig, frozen=True, kw_only=True):
    """Advantages, losses, corrections and updates; names are explained in `docs/algorithms.md`."""

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
    def needs_estimates(self) -> bool:
        """Whether models must be asked about all policy tokens before advantages are known."""
        return self.adv_estimator == "gae" or self.rewards_divergence

    def __post_init__(self) -> None:
        check_finite(self, unbounded=_UNBOUNDED)
        for key in ("num_mini_batches", "ppo_epochs"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in _POSITIVE:
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be positive")
        for key in _NOT_NEGATIVE:
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must not be negative")
        for key in ("gamma", "lambd", "step_gamma", "resolved_cov_fraction"):
            if not 0 <= getattr(self, key) <= 1:
                key = key.removeprefix("resolved_")
                raise ValueError(f"{key} must lie between 0 and 1")
        self.check_divergence()
        self._check_combinations()
        self._check_readers()
        self._check_redraw()

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

    def _check_redraw(self) -> None:
        """What `READERS` cannot say of `starpo`."""
        is_asked = self.adv_estimator == "starpo" and self.zero_variance_groups == "redraw"
        if is_asked and not self.needs_two_members:
            raise ValueError(
                "zero_variance_groups 'redraw' is not read by adv_estimator 'starpo' with "
                f"reward_grouping {self.reward_grouping!r} and reward_norm {self.reward_norm!r}, "
                "which do not compare the members of a group: remove it, or use reward_grouping "
                "traj_group_id with reward_norm mean_std or mean"
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


# Bounds, of which `.inf` means that there is none.
_UNBOUNDED = frozenset({"tis_cap", "pg_clip_high", "cispo_clip_high", "icepop_high", "clip_cov_high"})
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
