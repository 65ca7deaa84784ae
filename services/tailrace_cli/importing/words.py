"""Values that several of the other systems write in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.config.settings.setting import Lookup, choice

kl_estimator = choice("k1", "abs", "k2", "k3", kl="k1", mse="k2", low_var_kl="k3")

NO_ENGINE = "inference servers run our own torch engine, which has no such setting"
PARALLEL = "an engine and a learner's rank have one device each; more of them share the work"
NO_CUT = "megatron alone cuts layers over ranks"
NO_STAGES = "a rank has all layers, or a part of each: cut them by tensor parallelism"
NO_EPOCHS = "give max_steps: rows are drawn for as many steps as a run has"
NO_KL = "the divergence weighs nothing: its coefficient is 0 or it is switched off"


TRACKERS = ("learner.tensorboard", "learner.wandb.project", "learner.wandb.mode")


def trackers(names: Sequence[Any], project: Any, without: Sequence[str]) -> Mapping[str, Any]:
    """Which trackers are on; those of `without` write nothing that is not written anyway."""
    unknown = [name for name in names if name not in ("tensorboard", "wandb", *without)]
    if unknown:
        raise ValueError(f"there is no tracker {unknown[0]}, but TensorBoard, W&B and metrics.jsonl")
    ours: dict[str, Any] = {"learner.tensorboard": "tensorboard" in names}
    if "wandb" in names:
        ours |= {"learner.wandb.project": str(project), "learner.wandb.mode": "online"}
    return ours


def whole(value: Any, least: int, greatest: int = 10**9) -> int:
    """A whole number within bounds, also one written as a float."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not is_whole or not least <= value <= greatest:
        raise ValueError(f"expected a whole number from {least} to {greatest}")
    return int(value)


def all_or(value: Any) -> int:
    """`top_k`: -1 and None are "from all", 0 here."""
    return max(int(value), 0)


def aggregation(value: Any) -> str:
    """Names of the ways from token losses to one number."""
    ours = str(value).replace("-", "_")
    known = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
    if ours not in known:
        raise ValueError(f"is none of {', '.join(known)}")
    return ours


def masked(used: Any) -> str:
    """What becomes of replies that were cut."""
    return "mask" if used else "train"


def steps_or_never(value: Any) -> int:
    """An interval in steps: negative is never, 0 here."""
    return max(int(value), 0)


def estimates_values(estimator: str) -> Callable[[Lookup], bool]:
    """Whether the setting `estimator` chooses one with a critic."""
    return lambda lookup: str(lookup(estimator)) == "gae"


def datasets(tag: str, key: str, paths: Any) -> Mapping[str, Any]:
    """Data sets of files or hub names: their entries and, at `key`, their names."""
    files = [paths] if isinstance(paths, str) else list(paths)
    names = [tag] if len(files) == 1 else [f"{tag}_{index}" for index in range(len(files))]
    entries = {
        f"agents.datasets.{name}.path": str(path) for name, path in zip(names, files, strict=True)
    }
    return {**entries, key: names}
