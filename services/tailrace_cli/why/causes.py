"""Causes of time on a critical path, and the settings that move each."""

import enum
from typing import NamedTuple


class Cause(enum.Enum):
    """A kind of time on the path."""

    START = "start"
    ROOM = "room"
    QUEUE = "queue"
    LOST = "lost attempts"
    PREFILL = "prefill"
    DECODE = "decode"
    TOOLS = "tools"
    OUTSIDE = "outside"
    REWARD = "reward"
    GROUP = "group"
    BATCH = "batch"
    LEARNER = "learner"
    WEIGHTS = "weights"
    ADMISSION = "admission"
    EVALUATION = "evaluation"
    FINISH = "finish"


class Remedy(NamedTuple):
    """Meaning of a cause, the keys that move it, and the way to change them."""

    meaning: str
    keys: tuple[str, ...]
    advice: str


REMEDIES: dict[Cause, Remedy] = {
    Cause.START: Remedy(
        "services start, the model is loaded, the warm start trains",
        ("learner.warm_start",),
        "fewer steps of the warm start; the rest is paid once per start",
    ),
    Cause.ROOM: Remedy(
        "an episode waited for a server with room for its context",
        (
            "cluster.num_inference_servers",
            "inference.kv_cache_tokens",
            "inference.gpu_memory_utilization",
            "max_staleness",
        ),
        "more servers, or a larger KV cache on each; a smaller staleness keeps fewer groups in flight",
    ),
    Cause.QUEUE: Remedy(
        "an episode waited for an agents worker",
        ("agents.max_concurrent_episodes", "cluster.num_agents_workers"),
        "more episodes at once; more workers if their processors are busy",
    ),
    Cause.LOST: Remedy(
        "earlier attempts of an episode were lost",
        ("agents.max_deliveries",),
        "read the log of the agents workers: one of them died or lost its connection",
    ),
    Cause.PREFILL: Remedy(
        "a turn waited for its first token: lease, wait in the server, prompt",
        ("inference.max_batched_tokens", "inference.max_running", "cluster.num_inference_servers"),
        "larger batches if memory allows, else more servers",
    ),
    Cause.DECODE: Remedy(
        "the slowest episode of a group sampled its tokens",
        ("agents.generating_args.max_new_tokens", "cluster.num_inference_servers"),
        "a tighter limit of tokens, or more servers with fewer calls in a batch",
    ),
    Cause.TOOLS: Remedy(
        "tools, the environment or your own code ran",
        ("agents.env_threads", "cluster.num_sandboxes"),
        "run slow environments in threads (in_threads), more tool workers, faster tools",
    ),
    Cause.OUTSIDE: Remedy(
        "a workflow or an agent outside played, with its calls at the gateway; in logs of an older "
        "Tailrace all episodes",
        ("cluster.num_gateways", "cluster.num_inference_servers"),
        "see the agent's own times; more servers if it waits for the model",
    ),
    Cause.REWARD: Remedy(
        "an episode waited for its score",
        ("cluster.num_reward_workers", "reward.num_processes"),
        "more workers or processes",
    ),
    Cause.GROUP: Remedy(
        "a group waited for members that were cut off, or for its closing",
        ("scheduler.group_timeout_s",),
        "a shorter time limit of a group",
    ),
    Cause.BATCH: Remedy(
        "a closed group waited for the others of its step",
        ("groups_per_step",),
        "fewer groups in a step",
    ),
    Cause.LEARNER: Remedy(
        "the learner computed a step",
        ("learner.max_tokens_per_micro_batch", "learner.num_threads", "groups_per_step"),
        "larger micro-batches, more processors or ranks, smaller steps",
    ),
    Cause.WEIGHTS: Remedy(
        "an admission waited until the servers had the new weights",
        ("max_staleness",),
        "with a larger staleness more episodes run while weights travel",
    ),
    Cause.ADMISSION: Remedy(
        "no group was admitted: credit, buffer or servers were full",
        ("max_staleness", "cluster.num_inference_servers"),
        "a larger staleness, or more servers if they are full",
    ),
    Cause.EVALUATION: Remedy(
        "an evaluation was under way",
        ("eval_steps", "scheduler.eval_groups"),
        "rarer or smaller evaluations",
    ),
    Cause.FINISH: Remedy(
        "the last checkpoint was written and the run ended",
        ("save_steps",),
        "nothing to gain unless the model is very large",
    ),
}
