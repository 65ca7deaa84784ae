"""The keys of the `learner` section that hold the policy near a reference model."""

from __future__ import annotations

from typing import Literal

from tailrace_learner.config_advantages import PAYING, TOKEN_REWARDED
from tailrace_learner.config_losses import LossConfig

# Keys that nothing reads without a reference, with the values that ask for nothing.
_UNREAD: dict[str, frozenset[object]] = {
    "kl_estimator": frozenset({"k3"}),
    "kl_in": frozenset({None, "loss"}),
    "target_kl": frozenset({0.0}),
    "kl_horizon": frozenset({10_000}),
}


class DivergenceConfig(LossConfig, frozen=True, kw_only=True):
    """What leaving the reference costs; formulas in `docs/algorithms.md`."""

    init_kl_coef: float = 0.0
    """Weight of the divergence from the reference model (`learner.reference`; without it the weights
    at the run's start). 0: there is no reference model and nothing is computed for one."""

    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """How the divergence is estimated from sampled tokens. The gradient of `k1` in the loss is 0 on
    average: it is meant for the reward."""

    kl_in: Literal["loss", "reward"] | None = None
    """`loss`: added to the policy loss of every token. `reward`: subtracted from every token's reward
    before advantages are computed, for `reinforce`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline` and `gae`. Null: `reward` with `reinforce_plus_plus`, which is
    defined so, `loss` with the others."""

    target_kl: float = 0.0
    """Divergence towards which the weight is steered after every step; 0 leaves it as it is."""

    kl_horizon: int = 10_000
    """Episodes over which the weight is steered: the larger, the slower. Read with `target_kl`."""

    @property
    def needs_reference(self) -> bool:
        """Whether anything uses a reference model."""
        return self.init_kl_coef > 0

    @property
    def resolved_kl_in(self) -> Literal["loss", "reward"]:
        """Where the divergence goes, null resolved."""
        if self.kl_in is not None:
            return self.kl_in
        return "reward" if self.adv_estimator in PAYING else "loss"

    @property
    def holds_all_tokens(self) -> bool:
        """Whether the loss holds tokens near the reference whatever their advantage."""
        return self.needs_reference and not self.rewards_divergence

    @property
    def rewards_divergence(self) -> bool:
        """Whether advantages need the reference's log-probabilities."""
        return self.needs_reference and self.resolved_kl_in == "reward"

    def check_divergence(self) -> None:
        """Raise `ValueError` for impossible values, and for keys that nothing would read."""
        for key in ("init_kl_coef", "target_kl"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must not be negative")
        if self.kl_horizon < 1:
            raise ValueError("kl_horizon must be at least 1")
        self._check_all_read()
        if self.rewards_divergence:
            self._check_rewards()

    def _check_all_read(self) -> None:
        for key, neutral in () if self.needs_reference else _UNREAD.items():
            if getattr(self, key) not in neutral:
                raise ValueError(f"{key} is not read while init_kl_coef is 0: remove it or set that")
        if self.kl_horizon not in _UNREAD["kl_horizon"] and not self.target_kl:
            raise ValueError("kl_horizon is not read without target_kl: remove it or set that")

    def _check_rewards(self) -> None:
        if self.adv_estimator not in TOKEN_REWARDED:
            raise ValueError(
                f"kl_in 'reward' needs rewards of single tokens, adv_estimator {self.adv_estimator!r} "
                f"has none: set kl_in to loss, or use {', '.join(sorted(TOKEN_REWARDED))}"
            )
        if self.loss == "grpo":
            raise ValueError(
                f"kl_in 'reward' (null means it with {', '.join(sorted(PAYING))}) with loss 'grpo', "
                "which has its divergence in the loss: set kl_in to loss, or use loss ppo_clip"
            )
