"""Policy losses by name: one file each, with formula and paper."""

from tailrace_learner.core.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.losses.dapo import dapo
from tailrace_learner.core.losses.ppo_clip import ppo_clip
from tailrace_learner.core.losses.sft import sft

LOSSES: dict[str, Loss] = {"dapo": dapo, "ppo_clip": ppo_clip, "sft": sft}

__all__ = ["LOSSES", "Loss", "LossInputs", "LossTerms", "sft"]
