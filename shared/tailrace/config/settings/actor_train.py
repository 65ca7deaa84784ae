"""Table of `actor_train`: the policy that the learner trains."""

from collections.abc import Mapping
from typing import Any

from tailrace.config.run import RunConfig
from tailrace.config.settings import values
from tailrace.config.settings.rules import Derived, Lookup, Refused, Renamed, Rule

_ARGS = "actor_train.training_args"
_STRATEGY = "actor_train.strategy_args"
_RANKS = "learner.strategy_args.num_ranks"
_CUT = "learner.strategy_args.tensor_parallel_size"
_MAX_TOKENS = "learner.max_tokens_per_micro_batch"
_MIN_TOKENS = "learner.min_tokens_per_micro_batch"
_LONGEST = "agents.max_episode_tokens"
OPTIMIZER = (
    "optimizer",
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "min_lr_ratio",
)
SCHEDULE = "lr_scheduler_type"
_ENOUGH_TOKENS = 1024  # for a pass that does not wait for more


def tokens_of_a_pass(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Returns the bounds of a pass of `rows` rows, each as long as an episode may become."""
    if lookup(_LONGEST) is None:
        raise ValueError(f"needs {_LONGEST}, the length of a row: give it as well")
    tokens = values.whole_number(rows) * values.whole_number_at(_LONGEST, lookup)
    bounds = {_MAX_TOKENS: tokens}
    return bounds if lookup(_MIN_TOKENS) else bounds | {_MIN_TOKENS: min(tokens, _ENOUGH_TOKENS)}


def updates_of_a_step(passes: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Returns the number of updates of a step in which every update has `passes` passes."""
    if lookup(_MAX_TOKENS) is None or lookup(_LONGEST) is None:
        raise ValueError(f"needs {_ARGS}.per_device_train_batch_size: give it as well")
    tokens, longest = (values.whole_number_at(key, lookup) for key in (_MAX_TOKENS, _LONGEST))
    if tokens < longest:
        raise ValueError(
            f"a pass of {tokens} tokens ({_MAX_TOKENS}) holds no row of {longest} ({_LONGEST}): change "
            "one of them"
        )
    ranks, cut = (values.whole_number_at(key, lookup, 1) for key in (_RANKS, _CUT))
    num_groups = max(ranks // cut, 1)  # of ranks with the same rows
    rows_of_update = values.whole_number(passes) * (tokens // longest) * num_groups
    rows = _of_run("group_size", lookup) * _of_run("groups_per_step", lookup)
    if rows % rows_of_update:
        raise ValueError(
            f"an update of {rows_of_update} rows (rows of a pass x passes x data-parallel ranks) does "
            f"not divide the {rows} rows of a step (group_size x groups_per_step): change one of them"
        )
    return {"learner.num_mini_batches": rows // rows_of_update}


def _of_run(key: str, lookup: Lookup) -> int:
    return values.whole_number_at(key, lookup, getattr(RunConfig(exp_name="any"), key))


def _architecture(model_type: Any, lookup: Lookup) -> Mapping[str, Any]:
    if model_type == "causal_lm":  # what an actor always is
        return {}
    if not isinstance(lookup("learner.from_scratch"), Mapping):
        raise ValueError(
            f"{model_type!r} is the architecture of a model with random weights, and "
            "learner.from_scratch does not describe one; a model of `pretrain` is causal_lm here"
        )
    return {"learner.from_scratch.model_type": model_type}


def ranks_on(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Returns the GPUs of the learner, and a rank on each unless a number is given."""
    gpus = values.devices(mapping)
    ranks = {} if len(gpus) == 1 or lookup(_RANKS) else {_RANKS: len(gpus)}
    return {"cluster.learner_gpus": gpus, **ranks}


ACTOR_TRAIN: tuple[Rule, ...] = (
    Derived(
        "actor_train.model_args.model_type",
        ("learner.from_scratch.model_type",),
        _architecture,
        "the architecture, by its Hugging Face name; `causal_lm` leaves it to the model of `pretrain`",
    ),
    Renamed("actor_train.model_args.dtype", ("learner.model_args.dtype",), values.dtype),
    Renamed(
        "actor_train.model_args.attn_implementation",
        ("learner.model_args.attn_implementation",),
        values.attention,
    ),
    Renamed(
        "actor_train.model_args.disable_gradient_checkpointing",
        ("learner.model_args.disable_gradient_checkpointing",),
    ),
    Derived(
        "actor_train.device_mapping",
        ("cluster.learner_gpus", _RANKS),
        ranks_on,
        "a rank on each of these GPUs: a list, or text like `list(range(0, 4))`",
    ),
    Renamed(f"{_STRATEGY}.strategy_name", ("learner.strategy_args.strategy_name",), values.strategy),
    *(
        Renamed(f"{_STRATEGY}.{key}", (f"learner.strategy_args.{key}",))
        for key in ("num_ranks", "zero_stage", "tensor_parallel_size")
    ),
    *(
        Renamed(f"{_STRATEGY}.{key}", (_CUT,))
        for key in ("tp_size", "strategy_config.tensor_model_parallel_size")
    ),
    *(
        Refused(f"{_STRATEGY}.{key}", "a rank has all layers, or a part of each: give tp_size", (1,))
        for key in ("pp_size", "strategy_config.pipeline_model_parallel_size")
    ),
    *(Renamed(f"{_ARGS}.{key}", (f"learner.training_args.{key}",)) for key in OPTIMIZER),
    Renamed(f"{_ARGS}.{SCHEDULE}", (f"learner.training_args.{SCHEDULE}",), values.schedule),
    Derived(
        f"{_ARGS}.per_device_train_batch_size",
        (_MAX_TOKENS, _MIN_TOKENS),
        tokens_of_a_pass,
        "rows of one pass; times `agents.max_episode_tokens`, since passes are packed by tokens",
    ),
    Derived(
        f"{_ARGS}.gradient_accumulation_steps",
        ("learner.num_mini_batches",),
        updates_of_a_step,
        "passes of an update; a step's rows (`group_size` x `groups_per_step`) divided by an update's",
    ),
    Refused("actor_train.generating_args", "give it to actor_infer, which samples replies", ({},)),
)
