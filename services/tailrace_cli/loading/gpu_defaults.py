"""Defaults for a run on GPUs: values of keys that an experiment leaves out (pure).

They follow from the model's configuration and the devices. The resolved experiment of a run
(`config.yaml`) shows them, and a resolved experiment gets no others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace_cli.experiment import Experiment, with_values
from tailrace_cli.loading.facts import ModelFacts
from tailrace_cli.loading.needs import engine_needs, rank_needs

_ROOM = 0.85  # share of a device that is planned; the rest is fragments and what is not estimated
_ENGINE_SHARE = 0.85  # of a GPU, for an engine
_MAX_CUT = 8  # GPUs over which a layer is cut
_CUTS = ("vllm", "sglang")
_SHARES = ("torch", *_CUTS)  # engines whose cache takes a share of the memory
_PLACEMENT = (
    "colocated",
    "cluster.learner_gpus",
    "cluster.inference_gpus",
    "cluster.num_inference_servers",
    "learner.strategy_args.num_ranks",
)
_SIZES = ("inference.tensor_parallel_size", "inference.pipeline_parallel_size", "inference.engine_args")


def gpu_defaults(
    experiment: Experiment, model: ModelFacts, gpu_bytes: Sequence[int]
) -> Mapping[str, Any]:
    """Returns values by dotted key, none of which the experiment gives itself.

    bfloat16; half of the GPUs for the learner, or more if its weights and optimizer need them, the rest
    for engines, each on as few GPUs as hold it; one GPU is shared; gradient checkpointing where the
    activations would not fit; a cache of what is left of an engine's GPU.
    """
    found: dict[str, Any] = {}
    for rule in _RULES if gpu_bytes else ():
        chosen = rule(experiment, model, gpu_bytes)
        new = {key: value for key, value in chosen.items() if key not in experiment.given}
        found |= new
        experiment = with_values(experiment, new) if new else experiment
    return found


def _dtype(experiment: Experiment, _: ModelFacts, __: Sequence[int]) -> Mapping[str, Any]:
    return {"learner.model_args.dtype": "bfloat16"} if _has_learner(experiment) else {}


def _has_learner(experiment: Experiment) -> bool:
    return experiment.learner.device != "cpu"


def _has_engine(experiment: Experiment) -> bool:
    return experiment.inference.device != "cpu"


def _cut(experiment: Experiment, model: ModelFacts, gpu_bytes: Sequence[int]) -> Mapping[str, Any]:
    """Tensor parallelism at which the weights take at most half of an engine's share."""
    if not _has_engine(experiment) or experiment.given.intersection((*_SIZES, *_PLACEMENT)):
        return {}
    size, room = 1, _ENGINE_SHARE * min(gpu_bytes) / 2
    weights = engine_needs(experiment, model, min(gpu_bytes)).weights
    while 2 * size <= min(_MAX_CUT, len(gpu_bytes) // 2) and weights / size > room:
        size *= 2
    cuts = size > 1 and experiment.inference.engine in _CUTS
    return {"inference.tensor_parallel_size": size} if cuts else {}


def _placed(experiment: Experiment, model: ModelFacts, gpu_bytes: Sequence[int]) -> Mapping[str, Any]:
    """Ranks and engines on all GPUs."""
    has_both = _has_learner(experiment) and _has_engine(experiment)
    if not has_both or experiment.given.intersection(_PLACEMENT):
        return {}
    num_gpus, size = len(gpu_bytes), experiment.inference.gpus_per_server
    if num_gpus <= size:
        return {"colocated": True, "learner.strategy_args.num_ranks": num_gpus}
    checkpointed = {"learner.model_args.disable_gradient_checkpointing": False}
    ranks = max(num_gpus // 2, 1)
    while ranks + 1 <= num_gpus - size:
        tried = {**checkpointed, "learner.strategy_args.num_ranks": ranks}
        needs = rank_needs(with_values(experiment, tried), model)
        if needs.least + needs.activations <= _ROOM * min(gpu_bytes):
            break
        ranks += 1
    return {
        "learner.strategy_args.num_ranks": ranks,
        "cluster.num_inference_servers": max((num_gpus - ranks) // size, 1),
    }


def _checkpointed(
    experiment: Experiment, model: ModelFacts, gpu_bytes: Sequence[int]
) -> Mapping[str, Any]:
    """Gradient checkpointing where the activations do not fit into what a rank has left."""
    if not _has_learner(experiment):
        return {}
    needs = rank_needs(experiment, model)
    is_full = needs.activations > _ROOM * min(gpu_bytes) - needs.least
    return {"learner.model_args.disable_gradient_checkpointing": False} if is_full else {}


def _cache(experiment: Experiment, model: ModelFacts, gpu_bytes: Sequence[int]) -> Mapping[str, Any]:
    """Share of a GPU for an engine, which has it to itself: a colocated learner sleeps meanwhile."""
    if not _has_engine(experiment) or "inference.kv_cache_tokens" in experiment.given:
        return {}
    if experiment.inference.engine not in _SHARES:  # `hf` refuses the key, and engines of users may
        return {}
    return {"inference.gpu_memory_utilization": _ENGINE_SHARE}


# In this order: each sees what the former ones chose.
_RULES = (_dtype, _cut, _placed, _checkpointed, _cache)
