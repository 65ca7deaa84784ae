"""Tables of `critic` and `reference`: the models that the learner holds beside the policy.

They compute in the learner's processes, with the settings of the policy: settings of their own may only
repeat those.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.settings import values
from tailrace.config.settings.actor_train import (
    OPTIMIZER,
    SCHEDULE,
    tokens_of_a_pass,
    updates_of_a_step,
)
from tailrace.config.settings.rules import Derivation, Derived, Lookup, Refused, Renamed, Rule, same


def _repeats(derive: Derivation, of_actor: str) -> Derivation:
    """Returns a check that `derive` gives the values that the policy has already."""

    def check(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        for key, wanted in derive(value, lookup).items():
            if lookup(key) != wanted:
                raise ValueError(
                    f"it computes with the policy, whose {key} is {_shown(lookup(key))} and not "
                    f"{wanted!r}: give {of_actor} the same value, or remove this one"
                )
        return {}

    return check


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)


def _repeated(name: str, of_actor: str, derive: Derivation) -> Rule:
    return Derived(name, (), _repeats(derive, of_actor), f"as `{of_actor}`, or not given")


def _to(key: str, convert: Callable[[Any], Any] = same) -> Derivation:
    return lambda value, _lookup: {key: convert(value)}


def _model_args(role: str) -> tuple[Rule, ...]:
    converters: dict[str, Callable[[Any], Any]] = {
        "dtype": values.dtype,
        "attn_implementation": values.attention,
        "disable_gradient_checkpointing": same,
    }
    of_model = tuple(
        _repeated(
            f"{role}.model_args.{key}",
            f"actor_train.model_args.{key}",
            _to(f"learner.model_args.{key}", convert),
        )
        for key, convert in converters.items()
    )
    devices = _to("cluster.learner_gpus", values.devices)
    return (
        *of_model,
        _repeated(f"{role}.device_mapping", "actor_train.device_mapping", devices),
    )


def _samples_nothing(role: str) -> Rule:
    return Refused(f"{role}.generating_args", "only actor_infer samples", ({},))


CRITIC: tuple[Rule, ...] = (
    Renamed("critic", ("learner.critic",), remark="`{}`: one with all defaults"),
    *(
        Renamed(f"critic.{key}", (f"learner.critic.{key}",))
        for key in ("pretrain", "shared", "value_loss_coef", "value_clip", "critic_warmup")
    ),
    Refused(
        "critic.model_args.model_type",
        "a critic is a trunk with a value for every token",
        ("auto_token_classification", "trl"),
    ),
    *_model_args("critic"),
    _repeated(
        "critic.strategy_args.strategy_name",
        "actor_train.strategy_args.strategy_name",
        _to("learner.strategy_args.strategy_name", values.strategy),
    ),
    *(
        Renamed(f"critic.training_args.{key}", (f"learner.critic.training_args.{key}",))
        for key in OPTIMIZER
    ),
    Renamed(
        f"critic.training_args.{SCHEDULE}",
        (f"learner.critic.training_args.{SCHEDULE}",),
        values.schedule,
    ),
    *(
        _repeated(f"critic.training_args.{key}", f"actor_train.training_args.{key}", derive)
        for key, derive in (
            ("per_device_train_batch_size", tokens_of_a_pass),
            ("gradient_accumulation_steps", updates_of_a_step),
        )
    ),
    _samples_nothing("critic"),
)

REFERENCE: tuple[Rule, ...] = (
    Renamed("reference", ("learner.reference",), remark="`{}`: the weights at the run's start"),
    *(Renamed(f"reference.{key}", (f"learner.reference.{key}",)) for key in ("pretrain", "offload")),
    Refused(
        "reference.model_args.model_type", "it is a language model as the policy is", ("causal_lm",)
    ),
    *_model_args("reference"),
    Refused(
        "reference.strategy_args.strategy_name",
        "it computes in the learner, with the modules of Hugging Face",
        ("hf_infer",),
    ),
    Refused("reference.training_args", "it is never trained", ({},)),
    _samples_nothing("reference"),
)
