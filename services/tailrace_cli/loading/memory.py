"""Estimate of the memory of every device: weights, optimizer, activations, keys and values (pure).

Sizes follow from the model's configuration and the settings alone. Weights, gradients and the optimizer
are exact. Activations are those of a decoder layer with two norms, attention and a gated feed-forward
part, as autograd keeps them for the backward pass; `tests/unit/tailrace_cli/test_memory.py` compares
them with measured ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace_cli.cluster.placement import GpuDemand, GpuPlacement, PlacementError, place
from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.facts import MachineFacts, ModelFacts

GIB = 1 << 30
HOST = "this machine"
_HOST = -1  # place of a process that computes on no GPU
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
    others: int = 0  # reference and critic, or versions in shared memory
    cache: int = 0  # keys and values
    activations: int = 0  # estimate; of a sharded learner also the layers that are gathered

    @property
    def least(self) -> int:
        """Bytes that are held for sure."""
        return self.weights + self.gradients + self.optimizer + self.others + self.cache


@dataclass(frozen=True)
class Memory:
    """Bytes on one place. `capacity` is 0 if unknown; `needs` are those of one process, by user."""

    place: str
    capacity: int
    parts: dict[str, int]
    activations: int = 0
    needs: dict[str, Needs] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """Bytes that the run holds for sure."""
        return sum(self.parts.values())


class _User(NamedTuple):
    """User of memory: bytes of one process, and the places of each of its processes."""

    name: str
    needs: Needs
    places: Sequence[int]


def memory_of(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> Iterator[Memory]:
    """Memory of the host, and of every GPU that the learner or an engine uses."""
    num_gpus = len(machine.gpu_bytes)
    users = _users(experiment, model, machine)
    for where in sorted({where for user in users for where in user.places}):
        if where < num_gpus:
            yield Memory(
                HOST if where == _HOST else f"GPU {where}",
                machine.host_bytes if where == _HOST else machine.gpu_bytes[where],
                {user.name: user.places.count(where) * user.needs.least for user in users},
                sum(user.places.count(where) * user.needs.activations for user in users),
                {user.name: user.needs for user in users if where in user.places},
            )


def memory_table(memories: Sequence[Memory]) -> Iterator[str]:
    """Lines of a table in GiB, at most 80 columns; places with the same needs share a line."""
    columns = ("weights", "grads", "optim", "others", "KV", "activ", "sum", "of")
    yield f"{'memory   GiB each':<24}" + "".join(f"{name:>7}" for name in columns)
    rows: dict[tuple[str, Needs, int], list[str]] = {}
    for memory in memories:
        for user, needs in memory.needs.items():
            rows.setdefault((user, needs, memory.capacity), []).append(memory.place)
    for (user, needs, capacity), places in rows.items():
        total = needs.least + needs.activations
        shown = [_short(size) for size in (*needs, total, capacity)]
        where = places[0] if len(places) == 1 else f"{places[0]} to {places[-1].split()[-1]}"
        where = where.replace(HOST, "host")
        yield f"{f'{user}, {where}':<24}" + "".join(f"{size:>7}" for size in shown)


def _short(size: int) -> str:
    return "-" if not size else gib(size) if size >= GIB // 100 else "<0.01"


def _users(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> list[_User]:
    ranks, servers = (
        experiment.learner.strategy_args.num_ranks,
        experiment.cluster.num_inference_servers,
    )
    num_gpus = len(machine.gpu_bytes)
    placed = _placed(experiment, num_gpus)
    of_learner = placed.learner or (_HOST,) * ranks
    of_engines = tuple(gpu for gpus in placed.servers for gpu in gpus) or (_HOST,) * servers
    is_on_gpu = bool(placed.servers)
    capacity = min(machine.gpu_bytes, default=0) if is_on_gpu else 0
    return [
        _User("learner", rank_needs(experiment, model), of_learner),
        _User("engine", engine_needs(experiment, model, capacity), of_engines),
        _User("published weights", Needs(others=published_bytes(experiment, model)), (_HOST,)),
    ]


def _placed(experiment: Experiment, num_gpus: int) -> GpuPlacement:
    if not num_gpus:
        return GpuPlacement()
    try:
        return place(GpuDemand.of(experiment), num_gpus, experiment.cluster.num_nodes)
    except PlacementError:  # a problem of its own; then everything is counted on the first GPU
        demand = GpuDemand.of(experiment)
        return GpuPlacement((0,) * min(demand.num_ranks, 1), ((0,),) * min(demand.num_servers, 1))


def rank_needs(experiment: Experiment, model: ModelFacts) -> Needs:
    """Memory of one rank of the learner."""
    learner, number = experiment.learner, model.num_parameters
    ranks = learner.strategy_args.num_ranks
    moments = 2 if learner.training_args.optimizer == "adamw" else 0
    trained = _adapter_parameters(experiment, model) if learner.lora else number
    critic = 16 * number if learner.critic is not None and not learner.critic.shared else 0
    return Needs(
        weights=(4 * number + (4 * trained if learner.lora else 0)) // ranks,
        gradients=4 * trained // ranks,
        optimizer=4 * moments * trained // ranks,
        others=critic + _reference_bytes(experiment, number),
        activations=_kept_activations(experiment, model) + _gathered(experiment, model),
    )


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

    The torch engine stages a new version beside the active one, others in the host's memory.
    """
    inference = experiment.inference
    element = _engine_element(experiment, is_on_gpu=bool(gpu_bytes))
    sets, cut = (2 if inference.engine == "torch" else 1), inference.gpus_per_server
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


def _engine_element(experiment: Experiment, *, is_on_gpu: bool) -> int:
    dtype = experiment.inference.dtype
    if dtype == "auto":
        dtype = experiment.learner.model_args.dtype if is_on_gpu else "float32"
    return _BYTES[dtype]


def published_bytes(experiment: Experiment, model: ModelFacts) -> int:
    """Versions that the learner and weight_sync hold in shared memory."""
    element = _BYTES[experiment.learner.model_args.dtype]
    copies = 2 if experiment.learner.lora else experiment.weight_sync.keep_versions + 2
    copies += experiment.learner.strategy_args.resolved_name == "fsdp2"  # written by all ranks
    return element * model.num_parameters * copies


def gib(size: int) -> str:
    """Returns a size in GiB as text."""
    return f"{size / GIB:.1f}" if size >= GIB // 10 else f"{size / GIB:.2g}"
