"""The keys of the `learner` section that hold the policy near a reference model."""

from __future__ import annotations

from typing import Literal

from tailrace_learner.config_advantages import TOKEN_REWARDED
from tailrace_learner.config_losses import LossConfig

_UNREAD = ("kl_estimator", "kl_in", "target_kl", "kl_horizon")


class DivergenceConfig(LossConfig, frozen=True, kw_only=True):
    """What leaving the reference costs; formulas in `docs/algorithms.md`."""

    init_kl_coef: float = 0.0
    """Weight of the divergence from the reference model (`learner.reference`; without it the weights
    at the run's start). 0: there is no reference model and nothing is computed for one."""

    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """How the divergence is estimated from sampled tokens. The gradient of `k1` in the loss is 0 on
    average: it is meant for the reward."""

    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: added to the policy loss of every token. `reward`: subtracted from every token's reward
    before advantages are computed, for `reinforce`, `reinforce_plus_plus` and `gae`."""

    target_kl: float = 0.0
    """Divergence towards which the weight is steered after every step; 0 leaves it as it is."""

    kl_horizon: int = 10_000
    """Episodes over which the weight is steered: the larger, the slower. Read with `target_kl`."""

    @property
    def needs_reference(self) -> bool:
        """Whether anything uses a reference model."""
        return self.init_kl_coef > 0

    @property
    def holds_all_tokens(self) -> bool:
        """Whether the loss says something about tokens whose advantage is 0."""
        return self.entropy_loss_coef > 0 or (self.needs_reference and self.kl_in == "loss")

    @property
    def rewards_divergence(self) -> bool:
        """Whether advantages need the reference's log-probabilities."""
        return self.needs_reference and self.kl_in == "reward"

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
        fields = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        for key in () if self.needs_reference else _UNREAD:
            if getattr(self, key) != fields[key]:
                raise ValueError(f"{key} is not read while init_kl_coef is 0: remove it or set that")
        if self.kl_horizon != fields["kl_horizon"] and not self.target_kl:
            raise ValueError("kl_horizon is not read without target_kl: remove it or set that")

    def _check_rewards(self) -> None:
        if self.adv_estimator not in TOKEN_REWARDED:
            raise ValueError(
                f"kl_in 'reward' needs rewards of single tokens, adv_estimator {self.adv_estimator!r} "
                f"has none: set kl_in to loss, or use {', '.join(sorted(TOKEN_REWARDED))}"
            )
        if self.loss == "grpo":
            raise ValueError(
                "kl_in 'reward' with loss 'grpo', which has its divergence in the loss: set kl_in to "
                "loss, or use loss ppo_clip"
            )
