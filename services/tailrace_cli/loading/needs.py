"""Estimate of the memory of one process: weights, optimizer, activations, keys and values (pure).

Sizes follow from the model's configuration and the settings alone. Weights, gradients and the optimizer
are exact. Activations are those of a decoder layer with two norms, attention and a gated feed-forward
part, as autograd keeps them for the backward pass; `tests/unit/tailrace_cli/test_memory.py` compares
them with measured ones.
"""

from typing import NamedTuple

from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.facts import ModelFacts

_LOGIT_COPIES = 3  # float32 logits, their exponentials and their gradients
_NORM_BYTES = (
    26  # float32 that two norms and the residual stream keep, for each number of a hidden state
)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Needs(NamedTuple):
    """Bytes of one process on one device."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    others: int = 0  # reference, critic, a step's first weights; on the host, copies of weights
    cache: int = 0  # keys and values
    activations: int = 0  # estimate; of a sharded learner also the layers that are gathered

    @property
    def least(self) -> int:
        """Bytes that are held for sure."""
        return self.weights + self.gradients + self.optimizer + self.others + self.cache


def rank_needs(experiment: Experiment, model: ModelFacts) -> Needs:
    """Memory of one rank of the learner."""
    learner, number = experiment.learner, model.num_parameters
    ranks = learner.strategy_args.num_ranks
    moments = 2 if learner.training_args.optimizer == "adamw" else 0
    trained = trained_parameters(experiment, model)
    return Needs(
        weights=(4 * number + (4 * trained if learner.lora else 0)) // ranks,
        gradients=4 * trained // ranks,
        optimizer=4 * moments * trained // ranks,
        others=_start_bytes(experiment, trained) // ranks
        + _critic_bytes(experiment, model.role_sizes.get("critic") or number)
        + _reference_bytes(experiment, model.role_sizes.get("reference") or number),
        activations=_kept_activations(experiment, model) + _gathered(experiment, model),
    )


def trained_parameters(experiment: Experiment, model: ModelFacts) -> int:
    """Numbers that are trained: all of the model, or those of its adapters."""
    return _adapter_parameters(experiment, model) if experiment.learner.lora else model.num_parameters


def _start_bytes(experiment: Experiment, trained: int) -> int:
    """Bytes of the weights at a step's start, which all mini-batches after the first compare with."""
    learner = experiment.learner
    has_shared_critic = learner.critic is not None and learner.critic.shared
    is_read = learner.proximal_logprobs == "recompute" or has_shared_critic
    return 4 * trained if learner.num_mini_batches > 1 and is_read else 0


def _critic_bytes(experiment: Experiment, num_parameters: int) -> int:
    """Bytes of a critic of its own, whole on each rank, and of its weights at a step's start."""
    learner = experiment.learner
    if learner.critic is None or learner.critic.shared:
        return 0
    return (20 if learner.num_mini_batches > 1 else 16) * num_parameters


def _adapter_parameters(experiment: Experiment, model: ModelFacts) -> int:
    """Numbers of low-rank adapters on the linear layers of their names."""
    lora = experiment.learner.lora
    assert lora is not None
    hidden, inner, wide = model.hidden_size, model.inner_size, model.attention_width
    narrow = model.kv_width // (2 * model.num_layers) if model.num_layers else 0
    widths = {
        "q_proj": hidden + wide,
        "k_proj": hidden + narrow,
        "v_proj": hidden + narrow,
        "o_proj": wide + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    names = widths if lora.target_modules == ("all-linear",) else lora.target_modules
    return model.num_layers * lora.r * sum(widths.get(name, 0) for name in names)


def _reference_bytes(experiment: Experiment, num_parameters: int) -> int:
    """Bytes of the reference model that a rank holds all the time."""
    learner = experiment.learner
    if not learner.needs_reference or (learner.reference and learner.reference.offload):
        return 0
    whole = num_parameters * (2 if learner.model_args.dtype == "bfloat16" else 4)
    is_cut = learner.reference is not None and learner.reference.sharded
    return whole // learner.strategy_args.num_ranks if is_cut else whole


def layer_bytes(model: ModelFacts, dtype: str) -> int:
    """Bytes that the backward pass of one layer needs for each token."""
    size = _BYTES[dtype]
    wide = model.attention_width or model.hidden_size
    heads = wide + (model.kv_width // (2 * model.num_layers) if model.num_layers else wide)
    norms = (_NORM_BYTES + (0 if size == 4 else 2)) * model.hidden_size
    of_heads = (2 * size + (4 + size if model.has_head_norms else 0)) * heads
    return norms + of_heads + 4 * size * (model.inner_size or 4 * model.hidden_size)


def _kept_activations(experiment: Experiment, model: ModelFacts) -> int:
    learner = experiment.learner
    tokens, each = learner.max_tokens_per_micro_batch, layer_bytes(model, learner.model_args.dtype)
    per_token = model.num_layers * each
    if not learner.model_args.disable_gradient_checkpointing:
        per_token = 4 * model.num_layers * model.hidden_size + each
    return tokens * per_token + _LOGIT_COPIES * 4 * learner.logprob_chunk_tokens * model.vocab_size


def _gathered(experiment: Experiment, model: ModelFacts) -> int:
    """Weights that `fsdp2` gathers: embeddings and output in float32 with gradients, and two layers."""
    learner = experiment.learner
    if learner.strategy_args.resolved_name != "fsdp2" or not model.num_layers:
        return 0
    tables = model.num_tables * model.vocab_size * model.hidden_size
    layer = (model.num_parameters - tables) // model.num_layers
    return 2 * 4 * tables + 3 * _BYTES[learner.model_args.dtype] * layer


def engine_needs(experiment: Experiment, model: ModelFacts, gpu_bytes: int) -> Needs:
    """Memory of one device of an engine; `gpu_bytes`: 0 on the host.

    `torch` and `hf` hold the active version, the staged one and the base of adapters; others stage and
    merge in the host's memory.
    """
    inference = experiment.inference
    element = engine_element(experiment, is_on_gpu=bool(gpu_bytes))
    sets, cut = 1, inference.gpus_per_server
    if inference.engine in ("torch", "hf"):
        sets = 3 if experiment.learner.lora else 2
    weights = sets * element * model.num_parameters // cut
    activations = (
        16 * inference.max_running * model.vocab_size
        + 48 * inference.max_batched_tokens * model.hidden_size
    )
    if inference.gpu_memory_utilization and gpu_bytes:
        share = int(inference.gpu_memory_utilization * gpu_bytes)
        least = element * model.kv_width * experiment.agents.max_episode_tokens // cut
        return Needs(weights, cache=max(share - weights - activations, least), activations=activations)
    cached = element * model.kv_width * inference.kv_cache_tokens // cut
    return Needs(weights, cache=cached, activations=activations)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return _BYTES[dtype]


def engine_element(experiment: Experiment, *, is_on_gpu: bool) -> int:
    """Bytes of one weight, key or value of an engine."""
    dtype = experiment.inference.dtype
    if dtype == "auto":
        dtype = experiment.learner.model_args.dtype if is_on_gpu else "float32"
    return _BYTES[dtype]
