"""Comparison of an experiment with its model, its prompts and its machine (pure).

A problem is certain: the run could not do what the experiment asks. A note is likely, or costs only
quality. Memory (`memory`) must hold the least that a run needs for sure; the estimate with activations
gives a note.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tailrace.config import ConfigError
from tailrace_cli.cluster.placement import GpuDemand, PlacementError, place
from tailrace_cli.experiment import Experiment, steps_of_epochs
from tailrace_cli.loading.facts import MachineFacts, ModelFacts, PromptFacts
from tailrace_cli.loading.memory import gib, host_parts, memory_of
from tailrace_cli.loading.needs import engine_needs
from tailrace_cli.validation import unscored_datasets, unscored_rows
from tailrace_inference.config import LEAST_TEMPERATURES


@dataclass
class Findings:
    """Problems and notes about one experiment."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    used = {*scheduler.tags, *experiment.evaluated_tags}
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
    for name, max_new_tokens in _reply_limits(experiment, prompt.tag).items():
        if max_new_tokens > room:
            found.notes.append(
                f"{name}.max_new_tokens: {max_new_tokens} cannot be used up: the prompt of "
                f"agents.{key}.{prompt.tag} ({prompt.num_tokens} tokens) leaves {room} of "
                "agents.max_episode_tokens"
            )


def _reply_limits(experiment: Experiment, tag: str) -> dict[str, int]:
    """Tokens that an episode of the tag may sample, by the section that says so."""
    agents = experiment.agents
    limits = {
        f"evaluations.{name}": args.max_new_tokens
        for name, args in experiment.run.evaluations.items()
        if (args.tag or name) == tag and args.max_new_tokens is not None
    }
    if tag in experiment.scheduler.tags:
        return limits | {"agents.generating_args": agents.generating_args.max_new_tokens}
    return limits or {"agents.eval_generating_args": agents.eval_generating_args.max_new_tokens}


def check_temperatures(experiment: Experiment) -> Findings:
    """Temperatures that the engine would refuse, in each turn of each episode."""
    engine = experiment.inference.engine
    least, agents = LEAST_TEMPERATURES.get(engine, 0.0), experiment.agents
    asked: dict[str, float | None] = {
        "agents.generating_args": agents.generating_args.temperature,
        "agents.eval_generating_args": agents.eval_generating_args.temperature,
    }
    for name, args in experiment.run.evaluations.items():
        asked[f"evaluations.{name}"] = args.temperature
    return Findings(
        [
            f"{section}.temperature: {given:g} is too low for the engine {engine}: take 0 (greedy), or "
            f"at least {least:g}"
            for section, given in asked.items()
            if given is not None and 0 < given < least
        ]
    )


def check_scored(experiment: Experiment, prompts: Iterable[PromptFacts]) -> Findings:
    """Rows that nothing scores and that no loop of the user's plays, as far as rows were read."""
    unscored, own = unscored_datasets(experiment), experiment.agents.agent_loops.keys()
    return Findings(
        [
            unscored_rows(prompt.tag)
            for prompt in prompts
            if prompt.tag in unscored and prompt.loops and own.isdisjoint(prompt.loops)
        ]
    )


def _too_few_epochs(experiment: Experiment, prompts: Iterable[PromptFacts]) -> Iterator[str]:
    """Problem of epochs without one whole step, where the number of all rows is known."""
    rows = {prompt.tag: prompt.num_rows for prompt in prompts}
    named = {
        tag: rows.get(tag, 0) for tag in experiment.scheduler.tags if tag in experiment.agents.datasets
    }
    if not experiment.run.num_epochs or not all(named.values()):
        return
    try:
        steps_of_epochs(experiment, named)
    except ConfigError as error:
        yield str(error).removeprefix(f"{experiment.source}: ")


def check_groups(experiment: Experiment, prompts: Sequence[PromptFacts]) -> Findings:
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
    found.problems.extend(_too_few_epochs(experiment, prompts))
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
        found.notes += [
            f"{place}: it has {prompt.num_rows} rows, and {key} ({num_tasks}) plays them more than once"
            for key, num_tasks, share in _evaluated(experiment, prompt.tag)
            if prompt.num_rows < share
        ]
    return found


def check_held_out(experiment: Experiment, prompts: Sequence[PromptFacts]) -> Findings:
    """Rows of data sets that are trained and evaluated, as far as rows were read."""
    found, run = Findings(), experiment.run
    if not (run.max_steps or run.num_epochs):
        return found
    trained = [prompt for prompt in prompts if prompt.tag in experiment.scheduler.tags]
    for prompt in prompts:
        if prompt.tag not in experiment.evaluated_tags or not prompt.digests:
            continue
        place = f"agents.datasets.{prompt.tag}"
        if prompt in trained:
            found.notes.append(
                f"{place}: it is trained (scheduler.tags) and evaluated, so that evaluations play rows "
                "that were trained: name other rows in scheduler.eval_tags or evaluations"
            )
            continue
        found.notes += [
            f"{place}: it is evaluated, and {shared} of its first {len(prompt.digests)} rows are rows "
            f"of agents.datasets.{other.tag} too, which is trained: leave them out of one of both"
            for other in trained
            if (shared := _num_shared(prompt, other))
        ]
    return found


def _num_shared(prompt: PromptFacts, other: PromptFacts) -> int:
    """Rows of a data set, of those read, that another one has too."""
    known = set(other.digests)
    return sum(digest in known for digest in prompt.digests)


def _evaluated(experiment: Experiment, tag: str) -> Iterator[tuple[str, int, int]]:
    """Evaluations of a tag: the key of their number of tasks, its value, and the tag's share."""
    scheduler = experiment.scheduler
    if tag in scheduler.eval_tags:
        share = scheduler.eval_groups // len(scheduler.eval_tags)
        yield "scheduler.eval_groups", scheduler.eval_groups, share
    for name, args in experiment.run.evaluations.items():
        if (args.tag or name) == tag:
            key = f"evaluations.{name}.num_tasks" if args.num_tasks else "scheduler.eval_groups"
            num_tasks = args.num_tasks or scheduler.eval_groups
            yield key, num_tasks, num_tasks


def check_devices(experiment: Experiment, machine: MachineFacts) -> Findings:
    """Compares the devices that sections name with those of this machine."""
    num_gpus = len(machine.gpu_bytes)
    problems = [] if num_gpus else [*_without_gpus(experiment)]
    cluster = experiment.cluster
    named = {
        "reward_gpus": cluster.reward_gpus,
        "num_gpus_per_node": range(cluster.num_gpus_per_node or 0),
    }
    if not num_gpus:  # `place` says it of a machine that has some
        named |= {"learner_gpus": cluster.learner_gpus, "inference_gpus": cluster.inference_gpus}
    problems += [
        f"cluster.{key}: it asks for GPU {max(gpus)}, counted from 0, and there are {num_gpus}: "
        "name fewer"
        for key, gpus in named.items()
        if gpus and max(gpus) >= num_gpus
    ]
    try:
        if num_gpus or cluster.learner_gpus or cluster.inference_gpus:
            place(GpuDemand.of(experiment), num_gpus, cluster.num_nodes)
    except PlacementError as error:
        problems.append(str(error))
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
    found, told = Findings(), set[object]()
    for memory in memory_of(experiment, model, machine):
        same = (memory.capacity, *memory.parts.items(), memory.activations)
        if not memory.capacity or same in told:  # unknown, or a GPU like one before
            continue
        told.add(same)
        parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.parts.items() if size)
        if memory.least > memory.capacity:
            found.problems.append(
                f"pretrain: {model.name} ({model.num_parameters:,} parameters) needs at least "
                f"{gib(memory.least)} GiB of {memory.place}, which has {gib(memory.capacity)} "
                f"({parts}): use a smaller model, learner.lora, more ranks with their own devices, "
                "fewer servers, or a smaller inference.kv_cache_tokens"
            )
        elif memory.least + memory.activations > memory.capacity:
            found.notes.append(
                f"memory: {memory.place} has {gib(memory.capacity)} GiB; the run holds "
                f"{gib(memory.least)} ({parts}) and about {gib(memory.activations)} for activations: "
                "if that is too much, lower learner.max_tokens_per_micro_batch, or set "
                "learner.model_args.disable_gradient_checkpointing to false"
            )
    found.problems.extend(_too_small_share(experiment, model, machine))
    found.problems.extend(_too_little_shared(experiment, model, machine))
    return found


def _too_little_shared(
    experiment: Experiment, model: ModelFacts, machine: MachineFacts
) -> Iterator[str]:
    """Problem of a `/dev/shm` without room for the versions of the weights."""
    host = host_parts(experiment, model, machine)
    shared = host.published + host.staged
    if machine.shm_bytes and shared > machine.shm_bytes:
        staged = f", of which servers stage {gib(host.staged)}" if host.staged else ""
        yield (
            f"weight_sync.keep_versions: versions of the weights need {gib(shared)} GiB of shared "
            f"memory{staged}, and /dev/shm has {gib(machine.shm_bytes)} free: enlarge it (Docker: "
            f"--shm-size), or lower keep_versions{' or the number of servers' if staged else ''}"
        )


def _too_small_share(experiment: Experiment, model: ModelFacts, machine: MachineFacts) -> Iterator[str]:
    """Problem of a share of a GPU that cannot hold weights and one episode; the engine refuses it."""
    share, capacity = experiment.inference.gpu_memory_utilization, min(machine.gpu_bytes, default=0)
    if not (share and capacity and GpuDemand.of(experiment).num_servers):
        return
    room, least = int(share * capacity), engine_needs(experiment, model, capacity).least
    if room < least <= capacity:  # more than the GPU has is told above
        yield (
            f"inference.gpu_memory_utilization: {share:g} of a GPU of {gib(capacity)} GiB is "
            f"{gib(room)}, and the engine needs at least {gib(least)} for weights and the keys and "
            "values of one episode: raise it, or inference.tensor_parallel_size"
        )
