"""Policy losses by name: one file each, with formula and paper.

`SELECTIONS` has the losses that must see a whole mini-batch to pick some of its tokens: it is passed
once without gradient before its update, and no backward pass begins before it is complete.
"""

from tailrace_learner.core.algorithms.losses.base import (
    BatchTokens,
    Loss,
    LossInputs,
    LossTerms,
    Selection,
    Spans,
)
from tailrace_learner.core.algorithms.losses.cispo import cispo
from tailrace_learner.core.algorithms.losses.clip_cov import clip_cov, pick_clip_cov
from tailrace_learner.core.algorithms.losses.dapo import dapo
from tailrace_learner.core.algorithms.losses.decoupled_ppo import decoupled_ppo
from tailrace_learner.core.algorithms.losses.dppo_tv import dppo_tv
from tailrace_learner.core.algorithms.losses.gmpo import gmpo
from tailrace_learner.core.algorithms.losses.grpo import grpo
from tailrace_learner.core.algorithms.losses.gspo import gspo
from tailrace_learner.core.algorithms.losses.kimi15 import kimi15
from tailrace_learner.core.algorithms.losses.kl_cov import kl_cov, pick_kl_cov
from tailrace_learner.core.algorithms.losses.m2po import m2po, pick_m2po
from tailrace_learner.core.algorithms.losses.ppo_clip import ppo_clip
from tailrace_learner.core.algorithms.losses.sapo import sapo
from tailrace_learner.core.algorithms.losses.segment import segment
from tailrace_learner.core.algorithms.losses.sft import sft
from tailrace_learner.core.algorithms.losses.tis_pg import tis_pg
from tailrace_learner.core.algorithms.losses.topr import topr
from tailrace_learner.core.algorithms.losses.vanilla_pg import vanilla_pg

LOSSES: dict[str, Loss] = {
    "vanilla_pg": vanilla_pg,
    "ppo_clip": ppo_clip,
    "dapo": dapo,
    "grpo": grpo,
    "decoupled_ppo": decoupled_ppo,
    "segment": segment,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "tis_pg": tis_pg,
    "topr": topr,
    "kimi15": kimi15,
    "m2po": m2po,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
    "dppo_tv": dppo_tv,
    "sft": sft,
}
SELECTIONS: dict[str, Selection] = {
    "m2po": pick_m2po,
    "kl_cov": pick_kl_cov,
    "clip_cov": pick_clip_cov,
}

__all__ = [
    "LOSSES",
    "SELECTIONS",
    "BatchTokens",
    "Loss",
    "LossInputs",
    "LossTerms",
    "Selection",
    "Spans",
    "sft",
]
