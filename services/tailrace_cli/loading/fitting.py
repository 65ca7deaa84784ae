"""Comparison of an experiment with its model, its prompts and its machine (pure).

A problem is certain: the run could not do what the experiment asks. A note is likely, or costs only
quality. Memory is counted twice: the least that a run holds for sure (weights, gradients, moments, keys
and values), which must fit, and an estimate with activations, which gives a note.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

from tailrace_agents.config import GeneratingArgs
from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.facts import MachineFacts, ModelFacts, PromptFacts

GIB = 1 << 30
_HOST = -1  # place of a process that computes on no GPU
_LOGIT_COPIES = 3  # float32 logits, their exponentials and their gradients
_KEPT_WIDTHS = 17  # hidden states of a layer that its backward pass needs
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Findings:
    """Problems and notes about one experiment."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Memory:
    """Bytes on one place. `parts`: the least, by its user; `activations`: estimate of the rest."""

    place: str
    capacity: int
    parts: dict[str, int]
    activations: int = 0

    @property
    def least(self) -> int:
        """Bytes that the run holds for sure."""
        return sum(self.parts.values())


def check_lengths(
    experiment: Experiment, model: ModelFacts | None, prompts: Iterable[PromptFacts]
) -> Findings:
    """Compares the limits of episodes with the model's context, the cache and the prompts."""
    found = Findings()
    longest, inference = experiment.agents.max_episode_tokens, experiment.inference
    context = model.context_tokens if model else 0
    if model and 0 < context < longest:
        found.problems.append(
            f"agents.max_episode_tokens: {longest} is more than the context of {model.name} ({context} "
            f"tokens): lower it to {context} or less"
        )
    if model and 0 < context < inference.max_model_len:
        found.notes.append(
            f"inference.max_model_len: {inference.max_model_len} has no effect: {model.name} has a "
            f"context of {context} tokens"
        )
    if not inference.gpu_memory_utilization and inference.kv_cache_tokens < longest:
        found.problems.append(
            f"inference.kv_cache_tokens: {inference.kv_cache_tokens} cannot hold one episode of "
            f"agents.max_episode_tokens ({longest}): raise the first or lower the second"
        )
    for prompt in prompts:
        _check_prompt(experiment, prompt, found)
    penalized = experiment.learner.overlong_max_tokens - experiment.learner.overlong_buffer_tokens
    sampled = min(experiment.agents.generating_args.max_new_tokens, longest)
    if 0 < sampled <= penalized:
        found.problems.append(
            f"learner.overlong_max_tokens: its penalty begins at {penalized} sampled tokens, and an "
            f"episode ends at {sampled} (agents.generating_args.max_new_tokens, "
            "agents.max_episode_tokens): lower it or raise these"
        )
    return found


def _check_prompt(experiment: Experiment, prompt: PromptFacts, found: Findings) -> None:
    """Room for a reply after the longest prompt of a tag."""
    agents, scheduler = experiment.agents, experiment.scheduler
    used = {*scheduler.tags, *(scheduler.eval_tags or scheduler.tags)}
    key = "custom_envs" if prompt.tag in agents.custom_envs else "datasets"
    if prompt.tag not in used or not prompt.num_tokens:
        return
    room = agents.max_episode_tokens - prompt.num_tokens
    if room < 1:
        found.problems.append(
            f"agents.max_episode_tokens: {agents.max_episode_tokens} leaves no room for a reply to "
            f"agents.{key}.{prompt.tag}, {prompt.place}: its prompt has {prompt.num_tokens} tokens: "
            "raise it, or shorten the prompt"
        )
        return
    is_trained = prompt.tag in scheduler.tags
    args: GeneratingArgs = agents.generating_args if is_trained else agents.eval_generating_args
    if args.max_new_tokens > room:
        name = "generating_args" if is_trained else "eval_generating_args"
        found.notes.append(
            f"agents.{name}.max_new_tokens: {args.max_new_tokens} cannot be used up: the prompt of "
            f"agents.{key}.{prompt.tag} ({prompt.num_tokens} tokens) leaves {room} of "
            f"agents.max_episode_tokens"
        )


def check_groups(experiment: Experiment, prompts: Iterable[PromptFacts]) -> Findings:
    """Compares the sizes of steps, groups, ranks and data sets."""
    found = Findings()
    run, learner, scheduler = experiment.run, experiment.learner, experiment.scheduler
    if run.groups_per_step % learner.num_mini_batches:
        found.notes.append(
            f"learner.num_mini_batches: {learner.num_mini_batches} does not divide groups_per_step "
            f"({run.groups_per_step}): the mini-batches of a step differ in size"
        )
    ranks = learner.strategy_args.num_ranks // learner.strategy_args.tensor_parallel_size
    rows = run.group_size * (run.groups_per_step // learner.num_mini_batches)
    if rows < ranks:
        found.notes.append(
            f"learner.strategy_args.num_ranks: a mini-batch has {rows} episodes for {ranks} ranks: "
            "some compute nothing"
        )
    for prompt in prompts:
        if not prompt.num_rows:
            continue
        place = f"agents.datasets.{prompt.tag}"
        if prompt.tag in scheduler.tags and prompt.num_rows < run.groups_per_step // len(
            scheduler.tags
        ):
            found.notes.append(
                f"{place}: it has {prompt.num_rows} rows, so that a step (groups_per_step "
                f"{run.groups_per_step}) plays some of them more than once"
            )
        if prompt.tag in scheduler.eval_tags and prompt.num_rows < scheduler.eval_groups // len(
            scheduler.eval_tags
        ):
            found.notes.append(
                f"{place}: it has {prompt.num_rows} rows, and scheduler.eval_groups "
                f"({scheduler.eval_groups}) plays them more than once"
            )
    return found


def check_devices(experiment: Experiment, machine: MachineFacts) -> Findings:
    """Compares the devices that sections name with those of this machine."""
    num_gpus = len(machine.gpu_bytes)
    problems = [] if num_gpus else [*_without_gpus(experiment)]
    cluster, learner = experiment.cluster, experiment.learner
    named = {
        "learner_gpus": cluster.learner_gpus,
        "inference_gpus": cluster.inference_gpus,
        "reward_gpus": cluster.reward_gpus,
        "num_gpus_per_node": range(cluster.num_gpus_per_node or 0),
    }
    problems += [
        f"cluster.{key}: it asks for GPU {max(gpus)}, counted from 0, and torch sees {num_gpus} here: "
        "name fewer"
        for key, gpus in named.items()
        if gpus and max(gpus) >= num_gpus
    ]
    ranks = learner.strategy_args.num_ranks
    if num_gpus and learner.device != "cpu" and ranks > num_gpus:
        problems.append(
            f"learner.strategy_args.num_ranks: {ranks} ranks need a GPU each, and torch sees "
            f"{num_gpus} here: lower it, or use learner.device cpu"
        )
    return Findings(problems)


def _without_gpus(experiment: Experiment) -> Iterator[str]:
    """Problems of sections that name a GPU, on a machine without one."""
    asked = {
        "learner.device": experiment.learner.device,
        "inference.device": experiment.inference.device,
    }
    if any(entry.kind == "model" for entry in experiment.reward.components):
        asked["reward.model_args.device"] = experiment.reward.model_args.device
    for key, device in asked.items():
        if device == "cuda":
            yield (
                f"{key}: torch sees no CUDA device here: use cpu or auto, or install a build of torch "
                "for CUDA and its driver"
            )
    if experiment.inference.gpu_memory_utilization:
        yield (
            "inference.gpu_memory_utilization: it needs a CUDA device, and torch sees none: remove it "
            "and set inference.kv_cache_tokens"
        )


def check_memory(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> Findings:
    """Compares what the run holds with the memory of its devices."""
    found = Findings()
    for memory in memory_of(experiment, model, machine):
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in memory.parts.items() if size)
        if memory.least > memory.capacity:
            found.problems.append(
                f"pretrain: {model.name} ({model.num_parameters:,} parameters) needs at least "
                f"{_gib(memory.least)} GiB of {memory.place}, which has {_gib(memory.capacity)} "
                f"({parts}): use a smaller model, learner.lora, more ranks with their own devices, "
                "fewer servers, or a smaller inference.kv_cache_tokens"
            )
        elif memory.least + memory.activations > memory.capacity:
            found.notes.append(
                f"memory: {memory.place} has {_gib(memory.capacity)} GiB; the run holds "
                f"{_gib(memory.least)} ({parts}) and about {_gib(memory.activations)} for activations: "
                "if that is too much, lower learner.max_tokens_per_micro_batch, or set "
                "learner.model_args.disable_gradient_checkpointing to false"
            )
    published = _published_bytes(experiment, model)
    if machine.shm_bytes and published > machine.shm_bytes:
        found.problems.append(
            f"weight_sync.keep_versions: versions of the weights need {_gib(published)} GiB of shared "
            f"memory, and /dev/shm has {_gib(machine.shm_bytes)} free: enlarge it (Docker: "
            "--shm-size), or lower keep_versions"
        )
    return found


def memory_of(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> Iterator[Memory]:
    """Memory of the host, and of every GPU that the learner or an engine uses."""
    num_gpus = len(machine.gpu_bytes)
    users = _users(experiment, model, num_gpus)
    for place in sorted({place for user in users for place in user.places}):
        if place < num_gpus:
            yield Memory(
                "this machine" if place == _HOST else f"GPU {place}",
                machine.host_bytes if place == _HOST else machine.gpu_bytes[place],
                {user.name: user.places.count(place) * user.least for user in users},
                sum(user.places.count(place) * user.activations for user in users),
            )


class _User(NamedTuple):
    """User of memory: bytes of one process, and the place of each of its processes."""

    name: str
    least: int
    activations: int
    places: Sequence[int]


def _users(experiment: Experiment, model: ModelFacts, num_gpus: int) -> list[_User]:
    learner, inference, cluster = experiment.learner, experiment.inference, experiment.cluster
    ranks, servers = learner.strategy_args.num_ranks, cluster.num_inference_servers
    of_learner: Sequence[int] = (_HOST,) * ranks
    if num_gpus and learner.device != "cpu":
        of_learner = (cluster.learner_gpus or range(num_gpus))[:ranks]
    of_engines: Sequence[int] = (_HOST,) * servers
    if is_engine_on_gpu := bool(num_gpus) and inference.device != "cpu":
        of_engines = tuple(islice(cycle(cluster.inference_gpus or (0,)), servers))
    return [
        _User(
            "learner", _rank_bytes(experiment, model), _rank_activations(experiment, model), of_learner
        ),
        _User(
            "engine",
            _engine_bytes(experiment, model, is_engine_on_gpu),
            _engine_activations(experiment, model),
            of_engines,
        ),
        _User("published weights", _published_bytes(experiment, model), 0, (_HOST,)),
    ]


def _rank_bytes(experiment: Experiment, model: ModelFacts) -> int:
    """Weights, gradients and optimizer of one rank, with its reference and critic."""
    learner, number = experiment.learner, model.num_parameters
    moments = 2 if learner.training_args.optimizer == "adamw" else 0
    per_weight = 4 if learner.lora else 4 * (2 + moments)
    critic = 16 * number if learner.critic is not None and not learner.critic.shared else 0
    own = number * per_weight // learner.strategy_args.num_ranks
    return own + critic + _reference_bytes(experiment, number)


def _reference_bytes(experiment: Experiment, num_parameters: int) -> int:
    """Bytes of the reference model that a rank holds all the time."""
    learner = experiment.learner
    if not learner.needs_reference or (learner.reference and learner.reference.offload):
        return 0
    whole = num_parameters * (2 if learner.model_args.dtype == "bfloat16" else 4)
    is_cut = learner.reference is not None and learner.reference.sharded
    return whole // learner.strategy_args.num_ranks if is_cut else whole


def _rank_activations(experiment: Experiment, model: ModelFacts) -> int:
    learner = experiment.learner
    width = _BYTES[learner.model_args.dtype] * model.hidden_size * learner.max_tokens_per_micro_batch
    layers = _KEPT_WIDTHS * model.num_layers
    if not learner.model_args.disable_gradient_checkpointing:
        layers = model.num_layers + _KEPT_WIDTHS
    return layers * width + _LOGIT_COPIES * 4 * learner.logprob_chunk_tokens * model.vocab_size


def _engine_bytes(experiment: Experiment, model: ModelFacts, is_on_gpu: bool) -> int:
    """Two sets of weights, since a new version is staged beside the active one, and the cache."""
    inference = experiment.inference
    element = _engine_element(experiment, model, is_on_gpu)
    cached = 0 if inference.gpu_memory_utilization else inference.kv_cache_tokens
    return element * (2 * model.num_parameters + cached * model.kv_width)


def _engine_element(experiment: Experiment, model: ModelFacts, is_on_gpu: bool) -> int:
    dtype = experiment.inference.dtype
    if dtype == "auto":
        dtype = experiment.learner.model_args.dtype if is_on_gpu else "float32"
    return _BYTES[dtype]


def _engine_activations(experiment: Experiment, model: ModelFacts) -> int:
    inference = experiment.inference
    return (
        16 * inference.max_running * model.vocab_size
        + 48 * inference.max_batched_tokens * model.hidden_size
    )


def _published_bytes(experiment: Experiment, model: ModelFacts) -> int:
    """Versions that the learner and weight_sync hold in shared memory."""
    element = _BYTES[experiment.learner.model_args.dtype]
    copies = 2 if experiment.learner.lora else experiment.weight_sync.keep_versions + 2
    return element * model.num_parameters * copies


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB // 10 else f"{size / GIB:.2g}"
