"""Prometheus metrics of the agents service."""

from prometheus_client import Counter, Gauge, Histogram

EPISODES_ENDED = Counter(
    "tailrace_agents_episodes_ended", "Episodes played to an end here.", ["phase", "outcome"]
)
EPISODES_ABANDONED = Counter(
    "tailrace_agents_episodes_abandoned",
    "Episodes given up unsettled: handed back on drain, fenced by another worker, settled elsewhere, "
    "stopped since their group closed.",
    ["why"],
)
SETTLEMENTS = Counter("tailrace_agents_settlements", "Answers of the trajectory buffer.", ["result"])
TURNS = Counter("tailrace_agents_turns", "Turns that environments answered.")
SAMPLED_TOKENS = Counter("tailrace_agents_sampled_tokens", "Tokens sampled for ended episodes.")
REPLAYED_TURNS = Counter("tailrace_agents_replayed_turns", "Turns taken from a journal.")
REPLAY_MISMATCHES = Counter(
    "tailrace_agents_replay_mismatches",
    "Episodes restarted because the environment answered recorded replies differently than before.",
)
NONFINITE_LOGPROBS = Counter(
    "tailrace_agents_nonfinite_logprobs",
    "Sampled tokens masked because their log-probability is not finite.",
)
UNREWARDED_ROWS = Counter(
    "tailrace_agents_unrewarded_rows", "Rows of conversations without a reward, which are not trained."
)
OF_EPISODES = {
    "num_malformed_tool_calls": Counter(
        "tailrace_agents_malformed_tool_calls", "Tool calls of models that could not be read."
    ),
    "num_cut_tool_outputs": Counter(
        "tailrace_agents_cut_tool_outputs", "Tool results cut to `max_tool_output_chars`."
    ),
    "num_forks": Counter(
        "tailrace_agents_forks", "Model calls whose prompt did not continue recorded tokens."
    ),
}
"""Counters of what episodes count in their own metrics."""
EPISODES = Gauge("tailrace_agents_episodes", "Episodes in each state at this moment.", ["state"])
EPISODE_SECONDS = Histogram(
    "tailrace_agents_episode_seconds",
    "Time from an episode's start in this worker to its settlement.",
    ["phase"],
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
REPLACED_PROCESSES = Counter(
    "tailrace_agents_replaced_workflow_processes",
    "Workflow processes replaced, by cause (timeout, crash).",
    ["cause"],
)
