"""Losses, corrections and picks as plain numpy in float64: values, derivatives and what was counted.

Nothing of the learner's code is used but the settings. All arrays are flat over tokens, in any order
that keeps the tokens of a row together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig

Array = NDArray[np.float64]
Counts = dict[str, int]


@dataclass(frozen=True)
class Tokens:
    """M trained tokens."""

    p: Array  # log pi
    o: Array  # log pi_old
    m: Array  # log mu
    a: Array  # advantages
    rows: NDArray[np.int64]  # which row each token is of
    turns: NDArray[np.int64]  # which turn, no two rows sharing one
    picked: NDArray[np.bool_]

    @property
    def u(self) -> Array:
        """pi / pi_old."""
        return np.exp(self.p - self.o)


@dataclass(frozen=True)
class Found:
    """`jacobian[t, s]`: how the loss of token t changes with log pi of token s."""

    values: Array  # [M]
    jacobian: Array  # [M, M]
    counts: Counts


Formula = Callable[[Tokens, LearnerConfig], Found]


def alone(values: Array, slopes: Array, **counts: NDArray[np.bool_]) -> Found:
    """A loss of which each token sees itself only."""
    return Found(values, np.diag(slopes), {name: int(flags.sum()) for name, flags in counts.items()})


def same(owners: NDArray[np.int64]) -> Array:
    """[M, M] 1 where two tokens have one owner."""
    return (owners[:, None] == owners[None, :]).astype(float)


def sums(values: Array, owners: NDArray[np.int64]) -> Array:
    return same(owners) @ values


def means(values: Array, owners: NDArray[np.int64]) -> Array:
    return sums(values, owners) / sums(np.ones_like(values), owners)


def clipped(t: Tokens, ratio: Array, low: float, high: float, dual: float = 0.0) -> Found:
    """-ratio A inside of the bounds; outside of them a constant, where A pushes outwards."""
    above, below = (t.a > 0) & (ratio > 1 + high), (t.a < 0) & (ratio < 1 - low)
    is_dual = (t.a < 0) & (ratio > dual) & (dual > 0)
    used = np.where(above, 1 + high, np.where(below, 1 - low, np.where(is_dual, dual, ratio)))
    slopes = np.where(above | below | is_dual, 0.0, -ratio * t.a)
    counts = {"clip_fraction": above | below}
    if dual:
        counts["dual_clip_fraction"] = is_dual
    return alone(-used * t.a, slopes, **counts)


def scaled(found: Found, factors: Array, **counts: NDArray[np.bool_]) -> Found:
    """Each token's loss times a constant."""
    more = {name: int(flags.sum()) for name, flags in counts.items()}
    return Found(factors * found.values, factors[:, None] * found.jacobian, found.counts | more)


def weighed(t: Tokens, weights: Array, **counts: NDArray[np.bool_]) -> Found:
    """-w A log pi, w being a constant."""
    return alone(-weights * t.a * t.p, -weights * t.a, **counts)


def ppo_clip(t: Tokens, c: LearnerConfig) -> Found:
    return clipped(t, t.u, c.pg_clip, c.pg_clip, c.dual_clip)


def dapo(t: Tokens, c: LearnerConfig) -> Found:
    return clipped(t, t.u, c.pg_clip, c.pg_clip_high, c.dual_clip)


def decoupled_ppo(t: Tokens, c: LearnerConfig) -> Found:
    rho = np.exp(t.o - t.m)
    is_cut = rho > c.tis_cap
    factors = np.where(is_cut, c.tis_cap, rho)
    return scaled(ppo_clip(t, c), factors, behaviour_truncated_fraction=is_cut)


def segment(t: Tokens, c: LearnerConfig) -> Found:
    return clipped(t, np.exp(means(t.p - t.o, t.turns)), c.pg_clip, c.pg_clip_high)


def gspo(t: Tokens, c: LearnerConfig) -> Found:
    return clipped(t, np.exp(means(t.p - t.o, t.rows)), c.gspo_clip, c.gspo_clip_high)


def gmpo(t: Tokens, c: LearnerConfig) -> Found:
    d, bound = t.p - t.o, c.gmpo_clip
    is_out = np.where(t.a < 0, d < -bound, d > bound)
    used = np.where(is_out, np.where(t.a < 0, -bound, bound), d)
    values = -t.a * np.exp(means(used, t.rows))
    sizes = sums(np.ones_like(d), t.rows)
    jacobian = same(t.rows) * values[:, None] / sizes * ~is_out[None, :]
    return Found(values, jacobian, {"clip_fraction": int(is_out.sum())})


def cispo(t: Tokens, c: LearnerConfig) -> Found:
    low, high = 1 - c.cispo_clip, 1 + c.cispo_clip_high
    weights = np.minimum(np.maximum(t.u, low), high)
    return weighed(t, weights, clip_fraction=(t.u < low) | (t.u > high))


def sapo(t: Tokens, c: LearnerConfig) -> Found:
    tau = np.where(t.a > 0, c.sapo_tau, c.sapo_tau_negative)
    gate = 1 / (1 + np.exp(-tau * (t.u - 1)))
    return alone(-4 / tau * gate * t.a, -4 * gate * (1 - gate) * t.u * t.a)


def tis_pg(t: Tokens, c: LearnerConfig) -> Found:
    ratio = np.exp(t.p - t.m)
    weights = np.minimum(ratio, c.tis_cap)
    return weighed(t, weights, behaviour_truncated_fraction=ratio > c.tis_cap)


def topr(t: Tokens, c: LearnerConfig) -> Found:
    ratio = np.exp(sums(t.p - t.m, t.rows))
    is_tapered = (t.a <= 0) & (ratio < 1)
    return weighed(t, np.where(is_tapered, ratio, 1.0), tapered_fraction=is_tapered)


def kimi15(t: Tokens, c: LearnerConfig) -> Found:
    d, half = t.p - t.o, c.kimi_tau / 2
    total = sums(d, t.rows)
    jacobian = np.diag(-t.a + half * total) + half * same(t.rows) * d[:, None]
    return Found(-t.a * t.p + half * total * d, jacobian, {})


def m2po(t: Tokens, c: LearnerConfig) -> Found:
    values = np.where(t.picked, 0.0, -np.exp(t.p - t.m) * t.a)
    return alone(values, values, m2_masked_fraction=t.picked)


def kl_cov(t: Tokens, c: LearnerConfig) -> Found:
    d, penalty = t.p - t.o, c.kl_cov_coef * t.picked
    follow = -t.u * t.a
    slopes = follow + penalty * np.sign(d)
    return alone(follow + penalty * np.abs(d), slopes, cov_picked_fraction=t.picked)


def clip_cov(t: Tokens, c: LearnerConfig) -> Found:
    found = clipped(t, t.u, c.pg_clip, c.pg_clip_high)
    return scaled(found, np.where(t.picked, 0.0, 1.0), cov_picked_fraction=t.picked)


def dppo_tv(t: Tokens, c: LearnerConfig) -> Found:
    change, d = np.exp(t.p) - np.exp(t.m), t.p - t.m
    up, down = (t.a > 0) & (change > c.dppo_delta), (t.a < 0) & (-change > c.dppo_delta)
    ratio = np.exp(d)
    follow = np.where(up | down, 0.0, -np.minimum(ratio, c.dppo_cap) * t.a)
    tau = c.dppo_kl_coef
    return alone(
        follow + tau * d**2,
        follow + 2 * tau * d,
        tv_masked_fraction=up | down,
        behaviour_truncated_fraction=ratio > c.dppo_cap,
    )


FORMULAS: dict[str, Formula] = {
    "vanilla_pg": lambda t, c: weighed(t, np.ones_like(t.p)),
    "ppo_clip": ppo_clip,
    "dapo": dapo,
    "grpo": ppo_clip,
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
    "sft": lambda t, c: alone(-t.p, -np.ones_like(t.p)),
}

NONE = {"behaviour_correction": "none"}
# Bounds that some tokens are beyond and some are not.
SETTINGS: dict[str, dict[str, object]] = {
    "vanilla_pg": {},
    "ppo_clip": {"pg_clip": 0.1, "dual_clip": 1.2},
    "dapo": {"pg_clip": 0.1, "pg_clip_high": 0.3, "dual_clip": 1.4},
    "grpo": {"pg_clip": 0.15, "pg_clip_high": 0.4, "dual_clip": 1.3},
    "decoupled_ppo": {"tis_cap": 1.5, "pg_clip": 0.2, "dual_clip": 1.3, **NONE},
    "segment": {"pg_clip": 0.1, "pg_clip_high": 0.2},
    "gspo": {"gspo_clip": 0.05, "gspo_clip_high": 0.07},
    "gmpo": {"gmpo_clip": 0.2},
    "cispo": {"cispo_clip": 0.3, "cispo_clip_high": 0.2},
    "sapo": {"sapo_tau": 0.8, "sapo_tau_negative": 1.3},
    "tis_pg": {"tis_cap": 1.3, **NONE},
    "topr": NONE,
    "kimi15": {"kimi_tau": 0.3},
    "m2po": {"m2_threshold": 0.1, **NONE},
    "kl_cov": {"kl_cov_coef": 0.7, "cov_fraction": 0.2},
    "clip_cov": {"cov_fraction": 0.9, "clip_cov_low": -0.2, "clip_cov_high": 0.5, "pg_clip": 0.15},
    "dppo_tv": {"dppo_delta": 0.05, "dppo_cap": 1.3, "dppo_kl_coef": 0.3, **NONE},
    "sft": {},
}


def weights(t: Tokens, c: LearnerConfig) -> tuple[Array, Counts]:
    """Of the configured behaviour correction, [M]."""
    rho = np.exp(t.o - t.m)
    if c.correction_level == "sequence":
        rho = np.exp(sums(t.o - t.m, t.rows))
    flags: dict[str, NDArray[np.bool_]] = {}
    if c.behaviour_correction == "tis":
        flags["tis_truncated_fraction"] = rho > c.tis_cap
        found = np.minimum(rho, c.tis_cap)
    elif c.behaviour_correction == "mis":
        flags["mis_masked_fraction"] = rho > c.tis_cap
        found = np.where(rho > c.tis_cap, 0.0, rho)
    elif c.behaviour_correction == "icepop":
        inside = (c.icepop_low <= rho) & (rho <= c.icepop_high)
        flags["icepop_masked_fraction"] = ~inside
        found = np.where(inside, rho, 0.0)
    else:
        found = np.ones_like(rho)
    if c.geometric_mask:
        typical, bound = np.exp(means(t.o - t.m, t.rows)), 1 + c.geometric_mask
        flags["geometric_masked_fraction"] = (typical < 1 / bound) | (typical > bound)
        found = np.where(flags["geometric_masked_fraction"], 0.0, found)
    return found, {name: int(each.sum()) for name, each in flags.items()}


CORRECTED: dict[str, dict[str, object]] = {
    "tis": {"tis_cap": 1.2},
    "tis_sequence": {"tis_cap": 1.2, "correction_level": "sequence"},
    "mis": {"behaviour_correction": "mis", "tis_cap": 1.2},
    "mis_sequence": {
        "behaviour_correction": "mis",
        "tis_cap": 1.4,
        "correction_level": "sequence",
    },
    "icepop": {"behaviour_correction": "icepop", "icepop_low": 0.7, "icepop_high": 1.4},
    "geometric": {**NONE, "geometric_mask": 0.1},
    "tis_geometric": {"tis_cap": 1.2, "geometric_mask": 0.1},
    "none": NONE,
}


def candidates(t: Tokens, c: LearnerConfig) -> set[int]:
    """Of `clip_cov`: in the band, and not held back by the clip."""
    covariance = (t.p - t.p.mean()) * (t.a - t.a.mean())
    slopes = np.diag(clipped(t, t.u, c.pg_clip, c.pg_clip_high).jacobian)
    band = (c.clip_cov_low < covariance) & (covariance < c.clip_cov_high)
    return set(np.flatnonzero(band & ((slopes != 0) | (t.a == 0))).tolist())


def picks(loss: str, t: Tokens, c: LearnerConfig, draws: Array) -> set[int]:
    """The tokens that a loss's selection is to pick."""
    if loss == "m2po":
        return _left_out((t.p - t.m) ** 2, np.flatnonzero((t.p - t.m) * t.a > 0).tolist(), c)
    num_picked = max(int(len(t.p) * c.cov_fraction), 1)
    if loss == "clip_cov":
        return set(sorted(candidates(t, c), key=lambda place: draws[place])[:num_picked])
    covariance = (t.p - t.p.mean()) * (t.a - t.a.mean())
    order = sorted(range(len(t.p)), key=lambda place: (-covariance[place], draws[place]))
    return set(order[:num_picked])


def _left_out(squares: Array, waiting: Iterable[int], c: LearnerConfig) -> set[int]:
    """The largest first, one after the other, while the rest is too far on average."""
    queue = sorted(waiting, key=lambda place: -squares[place])
    left_out: set[int] = set()
    while queue and np.delete(squares, list(left_out)).mean() > c.m2_threshold:
        left_out.add(queue.pop(0))
    return left_out


def interpolated(t_pi: Array, t_mu: Array, ages: NDArray[np.int64], version: int = 100) -> Array:
    """log pi_old on the line between mu and pi, one version behind the learner's `version`."""
    found = []
    for p, m, age in zip(t_pi, t_mu, ages, strict=True):
        sampled, proximal = version - int(age), version - 1
        alpha = 0.0 if sampled >= proximal else (proximal - sampled) / (version - sampled)
        found.append(m + alpha * (p - m))
    return np.array(found)
