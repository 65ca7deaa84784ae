"""Curves of a run as PNG pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from tailrace_cli.report.metrics_file import Row, series


@dataclass(frozen=True)
class Panel:
    """One picture: its title and the metric keys drawn in it."""

    title: str
    keys: tuple[str, ...]


_CRITIC = ("value_loss", "explained_variance")
PANELS = (
    Panel("Success rate: held-out evaluation, training", ("eval/success_rate", "success_rate")),
    Panel("Reward per episode", ("reward_mean", "reward_std")),
    Panel("Loss", ("loss",)),
    Panel("Entropy of the policy, nats per token", ("entropy",)),
    Panel("Staleness of trained tokens, optimizer steps", ("staleness_mean", "staleness_max")),
    Panel("Learner against inference log-probabilities", ("mismatch_kl", "behaviour_kl")),
    Panel("Trained tokens per second", ("tokens_per_s",)),
    Panel("Gradient norm", ("grad_norm", "critic_grad_norm")),
    Panel("Divergence from the reference, and its weight", ("kl", "kl_coef")),
    Panel("The critic: its loss, and the variance of returns that it explains", _CRITIC),
)


def draw(panel: Panel, rows: Sequence[Row]) -> bytes | None:
    """PNG bytes of a panel, or None when the run has no value for any of its keys."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for key in panel.keys:
        steps, values = series(rows, key)
        if steps:
            marker = "o" if key.startswith("eval/") else None
            axes.plot(steps, values, label=key, linewidth=1.3, marker=marker, markersize=3)
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step")
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
