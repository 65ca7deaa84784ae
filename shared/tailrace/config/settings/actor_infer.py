"""Table of `actor_infer`: the policy from which the inference servers sample."""

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import values
from tailrace.config.settings.rules import Derived, Lookup, Refused, Renamed, Rule, value_names

_ARGS = "actor_infer.generating_args"
_STRATEGY = "actor_infer.strategy_args"


def _same(*keys: str) -> tuple[Rule, ...]:
    return tuple(Renamed(f"{_ARGS}.{key}", (f"agents.generating_args.{key}",)) for key in keys)


def _engine(strategy: Any, _: Lookup) -> Mapping[str, Any]:
    if strategy in ("vllm", "sglang"):
        return {"inference.engine": strategy}
    return {"inference.forward": str(_FORWARDS(strategy))}


def _servers(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    gpus = values.devices(mapping)
    given = lookup("cluster.num_inference_servers")
    servers = {} if given else {"cluster.num_inference_servers": len(gpus)}
    return {"cluster.inference_gpus": gpus, **servers}


_FORWARDS = value_names(torch="auto", hf_infer="generic")

ACTOR_INFER: tuple[Rule, ...] = (
    Refused("actor_infer.model_args.model_type", "an engine serves the policy", ("causal_lm",)),
    Renamed("actor_infer.model_args.dtype", ("inference.dtype",), values.engine_dtype),
    Refused(
        "actor_infer.model_args.attn_implementation",
        "the engine has its own attention over its cache: remove it",
    ),
    Refused(
        "actor_infer.model_args.disable_gradient_checkpointing",
        "an engine computes no gradients",
        (True,),
    ),
    Refused("actor_infer.training_args", "give it to actor_train, which trains the policy", ({},)),
    Derived(
        "actor_infer.device_mapping",
        ("cluster.inference_gpus", "cluster.num_inference_servers"),
        _servers,
        "an inference server on each of these GPUs",
    ),
    Renamed(
        f"{_ARGS}.max_new_tokens",
        ("agents.generating_args.max_new_tokens",),
        remark="of an episode, all its replies together; of one reply: `max_tokens_per_step` of what "
        "is played",
    ),
    *_same("top_p", "top_k", "min_p"),
    Renamed(
        f"{_ARGS}.temperature",
        ("agents.generating_args.temperature", "learner.temperature"),
        remark="where it is sampled, and at which log-probabilities are taken",
    ),
    Renamed(f"{_ARGS}.num_return_sequences", ("group_size",), remark="episodes of one task in a group"),
    Refused(f"{_ARGS}.num_beams", "replies are sampled, never searched", (1,)),
    Refused(f"{_ARGS}.repetition_penalty", "it would sample from another policy than is trained", (1,)),
    Derived(
        f"{_STRATEGY}.strategy_name",
        ("inference.engine", "inference.forward"),
        _engine,
        "`vllm` and `sglang` are engines of these packages; `hf_infer` is ours with the modules of "
        "Hugging Face, `torch` ours with its own forward pass where both agree",
    ),
    Renamed(f"{_STRATEGY}.gpu_memory_utilization", ("inference.gpu_memory_utilization",)),
    *(
        Refused(
            f"{_STRATEGY}.{key}",
            "an engine has one device; cluster.num_inference_servers is how many engines there are",
            (1,),
        )
        for key in ("tp_size", "pp_size")
    ),
)
