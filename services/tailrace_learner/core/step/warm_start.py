"""The warm start: supervised steps on demonstrations."""

import math
from collections.abc import Callable, Iterator
from itertools import islice

from tailrace_learner.config import LearnerConfig, WarmStart
from tailrace_learner.core.algorithms.aggregation import row_count
from tailrace_learner.core.algorithms.losses.sft import LOSS as SFT
from tailrace_learner.core.batch.ranks import ONE_RANK, Shares
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.optimizer import learning_rate_at
from tailrace_learner.core.step.passes import PassRunner
from tailrace_learner.ports import Ranks, WeightUpdater


class TooFewDemonstrationsError(ValueError):
    """The demonstrations ended early. Attributes: `num_rows` (that came), `num_needed`."""

    def __init__(self, num_rows: int, num_needed: int) -> None:
        super().__init__(
            f"learner.warm_start.demonstrations gave {num_rows} usable rows of {num_needed} needed: "
            "lower num_steps or batch_size, or let it yield more"
        )
        self.num_rows = num_rows
        self.num_needed = num_needed


class DivergedError(ValueError):
    """The loss of the last step is not finite. Attribute: `loss`."""

    def __init__(self, loss: float) -> None:
        super().__init__(
            f"learner.warm_start diverged, its last loss is {loss}: lower learning_rate, or raise "
            "warmup_steps"
        )
        self.loss = loss


def warm_start(
    policy: PolicyModel,
    rows: Iterator[TrainingRow],
    warm: WarmStart,
    config: LearnerConfig,
    on_step: Callable[[int, float], None],
    optimizer: WeightUpdater,
    ranks: Ranks = ONE_RANK,
) -> float:
    """Trains and returns the last step's mean loss. `on_step(step, loss)` is called after each.

    Every rank gets the same rows. `optimizer` is made with `warm.training_args`.
    """
    args = warm.training_args
    plain = LearnerConfig(  # independent of what the run trains with
        behaviour_correction="none",
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        min_tokens_per_micro_batch=0,
        share_prefixes=config.share_prefixes,
        model_args=config.model_args,
    )
    passes = PassRunner(policy, SFT, plain, StartWeights(policy.parameters))
    loss = math.nan
    for step in range(warm.num_steps):
        batch = list(islice(rows, warm.batch_size))
        if len(batch) < warm.batch_size:
            taken = step * warm.batch_size + len(batch)
            raise TooFewDemonstrationsError(taken, warm.num_steps * warm.batch_size)
        parts = Shares(ranks.num_ranks).passes(batch, ranks.rank, passes.micro_batches)
        loss_sum = sum(_pass(passes, part, batch) for part in parts)
        count = row_count(batch, plain)
        rate = learning_rate_at(step, warm.num_steps, args)
        optimizer.update(count=count, learning_rate=rate, max_grad_norm=args.max_grad_norm)
        loss = ranks.sums([loss_sum])[0] / count
        on_step(step + 1, loss)
    return loss


def checked(loss: float) -> float:
    """Last loss of a warm start; `DivergedError` if it is not finite."""
    if not math.isfinite(loss):
        raise DivergedError(loss)
    return loss


def _pass(passes: PassRunner, rows: list[TrainingRow], batch: list[TrainingRow]) -> float:
    if rows:
        return passes.run(rows, MetricSums(), is_first=False)
    passes.idle(batch[0], is_first=False)
    return 0.0
