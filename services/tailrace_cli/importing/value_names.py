"""Values and remedies that the tables of several systems share."""

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.config.settings import value_names
from tailrace.config.settings.values import whole_number
from tailrace.config.suggestions import not_one_of

kl_estimator = value_names("k1", "abs", "k2", "k3", kl="k1", mse="k2", low_var_kl="k3")
optimizer = value_names("adamw", "sgd", adam="adamw", AdamW="adamw", SGD="sgd")
agent_mode = value_names("inline", "subproc", online="outside")
reasoning_parser = value_names(
    "auto", "none", **{"qwen3": "think", "deepseek-r1": "think", "gpt-oss": "harmony"}
)
tool_parser = value_names(
    "auto",
    "none",
    "mistral",
    "pythonic",
    "qwen3_coder",
    **{"qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "llama3": "llama3_json"},
    **{"deepseekv3": "deepseek", "gpt-oss": "gpt_oss", "glm": "glm45", "glm45": "glm45"},
)
engine = value_names("vllm", "sglang", hf="torch")
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
aggregation = value_names(
    *(name.replace("-", "_") for name in _AGGREGATIONS),
    **{name: name.replace("-", "_") for name in _AGGREGATIONS},
)

MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}

NO_ENGINE = "no key of inference says this; inference.engine_args passes arguments to the engine"
ONE_DEVICE = "a learner's rank has one device; more of them share the work"
NO_CUT = "megatron alone cuts layers over ranks"
NO_STAGES = "a rank has all layers, or a part of each: cut them by tensor parallelism"
NO_KL = "the divergence has no weight: its coefficient is 0 or it is switched off"
NO_DECAY = "the learning rate is constant"
NO_LAMBDA = "the estimator is not gae, which alone looks ahead by values"

TRACKERS = (
    "learner.tensorboard",
    "learner.wandb.project",
    "learner.wandb.mode",
    "learner.trackers.mlflow.experiment",
    "learner.trackers.trackio.project",
)
_PROJECTS = {
    "wandb": "learner.wandb.project",
    "mlflow": "learner.trackers.mlflow.experiment",
    "trackio": "learner.trackers.trackio.project",
}


def trackers(names: Sequence[Any], project: Any, without: Sequence[str]) -> Mapping[str, Any]:
    """Switches trackers on; those of `without` write nothing that a run does not write anyway."""
    ours: dict[str, Any] = {"learner.tensorboard": "tensorboard" in names}
    for name in names:
        if name in _PROJECTS:
            ours |= {_PROJECTS[name]: str(project)}
        elif name != "tensorboard" and name not in without:
            raise ValueError(not_one_of(repr(name), ["tensorboard", *_PROJECTS, *without]))
    return ours | ({"learner.wandb.mode": "online"} if "wandb" in names else {})


def not_negative(value: Any) -> int:
    """Turns a negative number into 0: -1 means "never" for an interval, "all" for `top_k`."""
    return 0 if isinstance(value, int | float) and value < 0 else whole_number(value, 0)


def masked(used: Any) -> str:
    """Treatment of replies that a limit cut off."""
    return "mask" if used else "train"


def pass_bounds(tokens: Any) -> Mapping[str, Any]:
    """Bounds of the tokens of one pass."""
    return {
        "learner.max_tokens_per_micro_batch": tokens,
        "learner.min_tokens_per_micro_batch": min(tokens, 1024),
    }


def layers(given: Any) -> list[str]:
    """Layers of adapters by their names in the model; Megatron-Core joins some of them."""
    if given != "all-linear" and not isinstance(given, list):
        raise ValueError(f"expected a list of layers, or all-linear, found {given!r}")
    chosen = [given] if isinstance(given, str) else given
    return [name for layer in chosen for name in MEGATRON_LAYERS.get(layer, (layer,))]
