"""Rules of verl whose result depends on further settings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.settings import Lookup, NoEffectError, value_names
from tailrace.config.settings.values import whole_number
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.rules import is_gae, is_on, listed
from tailrace_cli.importing.verl.loss import ACTOR, CORRECTION, weighs_current_policy
from tailrace_learner.config_registry import ESTIMATORS

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

PARALLEL = ("inference.tensor_parallel_size", "inference.pipeline_parallel_size")

has_critic = is_gae("algorithm.adv_estimator")
penalizes = is_on("algorithm.use_kl_in_reward")
_ESTIMATORS = value_names(
    *("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo"),
    **{f"{name}_vectorized": name for name in ("grpo", "rloo")},  # the same numbers, computed faster
)
Derive = Callable[[Any, Lookup], Mapping[str, Any]]
_DISCOUNTED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
tool_parser = value_names("hermes", "qwen3_coder", **{"gpt-oss": "gpt_oss"})
_WRITTEN_ANYWAY = ("console", "file")


def row_budget(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Tokens of a pass: its rows, each as long as a row may become."""
    if lookup(f"{ACTOR}.use_dynamic_bsz"):
        raise NoEffectError("use_dynamic_bsz packs passes by tokens")
    length = lookup("data.max_prompt_length", 0) + lookup("data.max_response_length", 0)
    if not length:
        raise ValueError("rows of unknown length: passes are packed by tokens here")
    return names.pass_bounds(whole_number(rows) * whole_number(length))


def model_engine(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Strategy of the learner by the engine of its models."""
    if lookup(f"{ACTOR}.strategy") is not None:
        raise NoEffectError(f"{ACTOR}.strategy is given")
    return {"learner.strategy_args.strategy_name": value_names("megatron", dp="fsdp2")(name)}


def tensor_parallel(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Ranks that share layers; without a number of ranks, one group of them."""
    if lookup("learner.strategy_args.strategy_name") != "megatron":
        raise NoEffectError(names.NO_CUT)
    strategy, size = "learner.strategy_args", whole_number(size)
    if lookup(f"{strategy}.num_ranks", size) % size:
        raise ValueError("does not divide trainer.n_gpus_per_node, on each of which a rank computes")
    ranks = lookup(f"{strategy}.num_ranks", size)
    return {f"{strategy}.tensor_parallel_size": size, f"{strategy}.num_ranks": ranks}


def cut_engine(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """GPUs that share the layers of an engine."""
    return _of_engine(PARALLEL[0], size, lookup)


def stages(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Stages of an engine."""
    return _of_engine(PARALLEL[1], size, lookup)


def _of_engine(key: str, size: Any, lookup: Lookup) -> Mapping[str, Any]:
    if lookup("inference.engine", "torch") == "torch":
        raise NoEffectError(f"the engine {lookup(f'{ROLLOUT}.name', 'hf')} is not cut")
    return {key: whole_number(size)}


def longest(prompt: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Length of prompt and reply together."""
    both = prompt + lookup("data.max_response_length", 0)
    room = lookup(f"{ROLLOUT}.max_model_len", both)
    return {"agents.max_episode_tokens": both, "inference.max_model_len": room}


def estimator(name: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """The estimator, with the keys that it needs."""
    ours: dict[str, Any] = {"learner.adv_estimator": _ESTIMATORS(name)}
    if name == "remax":
        ours["agents.greedy_baseline"] = True
    if name == "gae":
        ours["learner.critic"] = {}
    return ours


def members(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Episodes of a group; with `remax` the greedy one too, which verl plays beside the others."""
    return {"group_size": whole_number(count) + bool(lookup("algorithm.adv_estimator") == "remax")}


def correction(level: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weights for tokens that another policy sampled, and their level; see `bypass`."""
    if lookup(f"{CORRECTION}.bypass_mode"):
        if lookup(f"{CORRECTION}.loss_type", "ppo_clip") != "reinforce":
            raise NoEffectError("with bypass_mode the ratio itself is to the policy that sampled")
        if not weighs_current_policy(lookup):
            raise ValueError("the loss tis_pg has weights of tokens alone: token")
        return {"learner.loss": "tis_pg", "learner.behaviour_correction": "none"}
    weights = {"learner.behaviour_correction": "tis"}
    return weights | {"learner.correction_level": value_names("token", "sequence")(level)}


def corrects(lookup: Lookup) -> bool:
    """Holds if tokens have such weights."""
    is_bypassed = bool(lookup(f"{CORRECTION}.bypass_mode")) and not weighs_current_policy(lookup)
    return lookup(f"{CORRECTION}.rollout_is") is not None and not is_bypassed


def bypass(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Comparison with the policy that sampled instead of that at a step's start."""
    if used and not weighs_current_policy(lookup):
        raise ValueError(
            "losses compare with the policy at a step's start, and behaviour_correction weighs that by "
            "the policy that sampled"
        )
    return {}


def rejected_rows(options: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Rows that are left out by their mean log-ratio, with bounds like `0.99_1.01`."""
    if options != "seq_mean_k1":
        raise ValueError("rows are left out by the mean of their log-ratios alone: seq_mean_k1")
    bounds = str(lookup(f"{CORRECTION}.rollout_rs_threshold")).split("_")
    try:
        low, high = map(float, bounds)
    except ValueError as error:
        raise ValueError("expected rollout_rs_threshold with two bounds, like 0.99_1.01") from error
    if high <= 1 or not math.isclose(low * high, 1, rel_tol=1e-3):
        raise ValueError(
            f"bounds {low} and {high}: the lower one is 1 over the upper one here (geometric_mask)"
        )
    return {"learner.geometric_mask": round(high - 1, 9)}


def is_grpo(lookup: Lookup) -> bool:
    """Holds for the estimator that can leave out the deviation."""
    return lookup("algorithm.adv_estimator") in ("grpo", "grpo_vectorized")


def discounts(lookup: Lookup) -> bool:
    """Holds if the estimator discounts, or the discount is 1."""
    is_none = bool(lookup("algorithm.gamma") == 1.0)
    return is_none or lookup("algorithm.adv_estimator") in _DISCOUNTED


def redraw(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Treatment of groups with equal returns, if they give no learning signal."""
    name = lookup("algorithm.adv_estimator", "grpo")
    if used and not (name in ESTIMATORS and ESTIMATORS[name].compares_group):
        raise ValueError(f"{name} learns from groups of equal returns too: here they are never redrawn")
    return {"learner.zero_variance_groups": "redraw" if used else "count"}


def kl_in_loss(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in the loss."""
    if not used:
        return {}
    if not kl_of_loss(lookup):
        raise NoEffectError("kl_loss_coef is 0")
    return {"learner.init_kl_coef": kl_of_loss(lookup), "learner.kl_in": "loss"}


def kl_in_reward(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in rewards, with a fixed or adaptive weight."""
    if not used:
        return {}
    if not kl_of_reward(lookup):
        raise NoEffectError("kl_ctrl.kl_coef is 0")
    ours: dict[str, Any] = {
        "learner.init_kl_coef": kl_of_reward(lookup),
        "learner.kl_in": "reward",
        "learner.kl_estimator": names.kl_estimator(lookup("algorithm.kl_penalty", "kl")),
    }
    if lookup("algorithm.kl_ctrl.type") == "adaptive":
        ours["learner.target_kl"] = lookup("algorithm.kl_ctrl.target_kl", 0.1)
        ours["learner.kl_horizon"] = lookup("algorithm.kl_ctrl.horizon", 10_000)
    return ours


def kl_of_loss(lookup: Lookup) -> float:
    """Weight of the divergence in the loss; 0 without one."""
    return lookup(f"{ACTOR}.kl_loss_coef", 0.001) if lookup(f"{ACTOR}.use_kl_loss") else 0.0


def kl_of_reward(lookup: Lookup) -> float:
    """Weight of the divergence in rewards; 0 without one."""
    return lookup("algorithm.kl_ctrl.kl_coef", 0.001) if penalizes(lookup) else 0.0


def has_reference(lookup: Lookup) -> bool:
    """Holds if a divergence has a weight, in the loss or in rewards."""
    return bool(kl_of_loss(lookup) or kl_of_reward(lookup))


def trackers(given: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Trackers: a list of names, or one name."""
    project = lookup("trainer.project_name", lookup("trainer.experiment_name"))
    return names.trackers(listed(given), project, _WRITTEN_ANYWAY)


def uses_project(lookup: Lookup) -> bool:
    """Holds if a tracker has projects."""
    given = listed(lookup("trainer.logger", []))
    return any(name in given for name in ("wandb", "mlflow", "trackio"))


def adapts(lookup: Lookup) -> bool:
    """Holds if the weight of the divergence adapts."""
    return penalizes(lookup) and lookup("algorithm.kl_ctrl.type") == "adaptive"


def lora(rank: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Adapters, with their scale and layers."""
    if not rank:
        return {}
    layers = lookup(f"{MODEL}.target_modules", "all-linear")
    return {
        "learner.lora.r": rank,
        "learner.lora.alpha": float(lookup(f"{MODEL}.lora_alpha", 16)),
        "learner.lora.target_modules": listed(layers),
    }


def megatron_lora(rank: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The same, as Megatron-Core names the layers."""
    if not rank:
        return {}
    section = f"{MODEL}.lora"
    layers = lookup(f"{section}.target_modules", list(names.MEGATRON_LAYERS))
    return {
        "learner.lora.r": rank,
        "learner.lora.alpha": float(lookup(f"{section}.alpha", 32)),
        "learner.lora.target_modules": names.layers(layers),
    }


def agent_loop(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Agent loop of rows that name none."""
    if name == "single_turn_agent":
        return {}
    if name != "tool_agent":
        raise ValueError(
            "name the class of your loop under agents.agent_loops, and the loop in agents.datasets.*."
            "agent_name"
        )
    return loop(True, lookup)


def rows(section: str) -> Derive:
    """Number of rows to use, of a data set that is one file; -1 is all."""

    def derive(count: Any, lookup: Lookup) -> Mapping[str, Any]:
        if not isinstance(count, int) or count < 0:
            return {}
        if lookup(f"agents.datasets.{section}") is None:
            raise ValueError("give agents.datasets.*.limit to each of the data sets")
        return {f"agents.datasets.{section}.limit": count}

    return derive


def loop(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Agent loop of all data sets."""
    tags = [*lookup("scheduler.tags", ()), *lookup("scheduler.eval_tags", ())]
    return {f"agents.datasets.{tag}.agent_name": "tool_agent" for tag in tags} if used else {}


def eval_sampling(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Checks that evaluations without sampling have the temperature 0, which alone counts here."""
    if not used and lookup(f"{ROLLOUT}.val_kwargs.temperature"):
        raise ValueError(
            "val_kwargs.temperature is not 0, with which some versions sample all the same"
        )
    raise NoEffectError("the temperature alone counts")


def critic_path(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weights of the critic, if they are not the policy's."""
    is_copy = path == lookup(f"{MODEL}.path")
    return {} if is_copy or not has_critic(lookup) else {"learner.critic.pretrain": path}


def overlong(section: str) -> Derive:
    """Penalty for the last tokens before the longest reply, by the buffer in `section`."""

    def derive(used: Any, lookup: Lookup) -> Mapping[str, Any]:
        if not used:
            return {}
        longest, buffer = lookup("data.max_response_length"), lookup(f"{section}.len")
        if not longest or not buffer:
            raise ValueError("needs data.max_response_length and the length of the buffer")
        return {"learner.overlong_max_tokens": longest, "learner.overlong_buffer_tokens": buffer}

    return derive


def reward_model(name: str) -> Derive:
    """Directory of the reward model, in the setting `name`."""

    def derive(used: Any, lookup: Lookup) -> Mapping[str, Any]:
        path = lookup(name)
        if used and not path:
            raise ValueError(f"{name} names no model")
        return {"reward.reward_pretrain": path} if used else {}

    return derive
