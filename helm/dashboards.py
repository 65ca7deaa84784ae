"""Dashboards of Grafana as tables: title, unit, queries with their legends.

`@` in a query stands for the labels that the dashboard's variables choose.
"""

from typing import NamedTuple


class Panel(NamedTuple):
    """One panel: Grafana's name of the unit, and queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]


def _rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}@[$__rate_interval]))"


def _quantile(metric: str, by: str = "", quantile: float = 0.9) -> str:
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket@[$__rate_interval]))"
    return f"histogram_quantile({quantile:g}, {rate})"


def _step(name: str) -> str:
    return f'max(tailrace_scheduler_step_metric@{{name="{name}"}})'


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "run": (
        "Tailrace: run",
        [
            Panel("Step", "short", {"step": "max(tailrace_learner_step@)"}),
            Panel(
                "Success",
                "percentunit",
                {"training": _step("success_rate"), "evaluation": _step("eval/success_rate")},
            ),
            Panel("Reward", "short", {"mean": _step("reward_mean"), "deviation": _step("reward_std")}),
            Panel(
                "Episodes by state",
                "short",
                {"{{state}}": "sum by (state) (tailrace_agents_episodes@)"},
            ),
            Panel(
                "Episodes ended",
                "cps",
                {"{{outcome}}": _rate("tailrace_scheduler_settled_episodes_total", "outcome")},
            ),
            Panel("Sampled tokens", "cps", {"tokens": _rate("tailrace_agents_sampled_tokens_total")}),
            Panel(
                "Time of an episode",
                "s",
                {
                    "median": _quantile("tailrace_agents_episode_seconds", quantile=0.5),
                    "90%": _quantile("tailrace_agents_episode_seconds"),
                },
            ),
            Panel(
                "Idle seconds of the step, by cause",
                "s",
                {"{{name}}": 'max by (name) (tailrace_scheduler_step_metric@{name=~"idle/.*"})'},
            ),
            Panel(
                "Unexpected exceptions",
                "cps",
                {"all": f"{_rate('tailrace_runtime_failures_total')} or vector(0)"},
            ),
            Panel(
                "Event loop delay, 99%",
                "s",
                {
                    "{{service}}": _quantile(
                        "tailrace_runtime_event_loop_delay_seconds", "service", 0.99
                    )
                },
            ),
            Panel(
                "Replicas wanted by the autoscaler",
                "short",
                {"{{target}}": "max by (target) (tailrace_autoscaler_desired_replicas@) or vector(0)"},
            ),
            Panel("Ready", "short", {"{{service}}": "sum by (service) (tailrace_runtime_ready@)"}),
            Panel(
                "Memory",
                "bytes",
                {"{{service}} {{pod}}": "sum by (service, pod) (process_resident_memory_bytes@)"},
            ),
        ],
    ),
    "engines": (
        "Tailrace: engines",
        [
            Panel("Servers", "short", {"ready": "max(tailrace_scheduler_servers@)"}),
            Panel(
                "Generated tokens",
                "cps",
                {"{{pod}}": _rate("tailrace_inference_generated_tokens_total", "pod")},
            ),
            Panel(
                "Requests",
                "short",
                {
                    "running {{pod}}": "sum by (pod) (tailrace_inference_num_running@)",
                    "waiting {{pod}}": "sum by (pod) (tailrace_inference_num_waiting@)",
                },
            ),
            Panel(
                "Cache in use",
                "percentunit",
                {
                    "{{pod}}": "sum by (pod) (tailrace_inference_used_tokens@) / "
                    "sum by (pod) (tailrace_inference_capacity_tokens@)"
                },
            ),
            Panel(
                "Prompt tokens found in the cache",
                "percentunit",
                {
                    "share": _share(
                        "tailrace_inference_prefix_hit_tokens_total",
                        "tailrace_inference_prompt_tokens_total",
                    )
                },
            ),
            Panel(
                "Time of a step, 90%",
                "s",
                {"{{pod}}": _quantile("tailrace_inference_step_seconds", "pod")},
            ),
            Panel(
                "Preemptions", "cps", {"{{pod}}": _rate("tailrace_inference_preemptions_total", "pod")}
            ),
            Panel(
                "Tokens computed again",
                "cps",
                {"{{pod}}": _rate("tailrace_inference_recomputed_tokens_total", "pod")},
            ),
            Panel(
                "Calls that ended",
                "cps",
                {
                    "{{outcome}}": "sum by (outcome) (rate(tailrace_channel_ended_calls_total"
                    '@{side="client"}[$__rate_interval]))'
                },
            ),
            Panel(
                "Calls continued after a failure",
                "cps",
                {"all": _rate("tailrace_policy_continued_calls_total")},
            ),
        ],
    ),
    "queues": (
        "Tailrace: queues",
        [
            Panel(
                "Admission waits for",
                "short",
                {"{{reason}}": "max by (reason) (tailrace_scheduler_blocked@)"},
            ),
            Panel("Groups", "short", {"{{state}}": "max by (state) (tailrace_scheduler_groups@)"}),
            Panel(
                "Unsettled episodes", "short", {"all": "max(tailrace_scheduler_unsettled_episodes@)"}
            ),
            Panel(
                "Messages in mailboxes",
                "short",
                {"{{service}}": "sum by (service) (tailrace_runtime_mailbox_messages@)"},
            ),
            Panel(
                "Time of a handler, 90%",
                "s",
                {"{{service}}": _quantile("tailrace_runtime_handler_seconds", "service")},
            ),
            Panel(
                "NATS requests, 90%",
                "s",
                {"{{service}}": _quantile("tailrace_bus_call_seconds", "service")},
            ),
            Panel(
                "Durable publishes without acknowledgement",
                "short",
                {"{{service}}": "sum by (service) (tailrace_bus_unacked_publishes@)"},
            ),
            Panel(
                "Redis: commands that wait",
                "short",
                {"{{service}}": "sum by (service) (tailrace_store_waiting_commands@)"},
            ),
            Panel(
                "Dropped messages, dead letters",
                "cps",
                {
                    "dropped": f"{_rate('tailrace_bus_dropped_messages_total')} or vector(0)",
                    "dead letters": f"{_rate('tailrace_bus_dead_letters_total')} or vector(0)",
                },
            ),
            Panel(
                "Gateway requests",
                "cps",
                {"{{status}}": f"{_rate('tailrace_gateway_requests_total', 'status')} or vector(0)"},
            ),
            Panel(
                "Spans by result",
                "cps",
                {
                    "{{receiver}} {{result}}": _rate("tailrace_tracing_spans_total", "receiver, result")
                    + " or vector(0)"
                },
            ),
        ],
    ),
    "staleness": (
        "Tailrace: staleness",
        [
            Panel(
                "Staleness of trained tokens, in steps",
                "short",
                {
                    "mean": _step("staleness_mean"),
                    "largest": _step("staleness_max"),
                    "bound": "max(tailrace_scheduler_max_staleness@)",
                },
            ),
            Panel(
                "Tokens not trained",
                "cps",
                {"{{reason}}": _rate("tailrace_learner_masked_tokens_total", "reason")},
            ),
            Panel(
                "Versions",
                "short",
                {
                    "published": "max(tailrace_weight_sync_newest_version@)",
                    "slowest server": "min(tailrace_inference_policy_version@)",
                },
            ),
            Panel(
                "Difference to the servers, by server",
                "short",
                {"{{server_id}}": "max by (server_id) (tailrace_learner_drift@)"},
            ),
            Panel(
                "Divergence from the sampling policy",
                "short",
                {"behaviour_kl": _step("behaviour_kl"), "mismatch_kl": _step("mismatch_kl")},
            ),
        ],
    ),
    "tools": (
        "Tailrace: tools and rewards",
        [
            Panel(
                "Calls",
                "cps",
                {"{{tool}} {{outcome}}": _rate("tailrace_tool_calls_total", "tool, outcome")},
            ),
            Panel(
                "Time of a call at its worker, 90%",
                "s",
                {"{{tool}}": _quantile("tailrace_tool_call_seconds", "tool")},
            ),
            Panel(
                "Time that callers wait, 90%",
                "s",
                {"{{tool}}": _quantile("tailrace_tool_client_call_seconds", "tool")},
            ),
            Panel("Running calls", "short", {"{{pod}}": "sum by (pod) (tailrace_tool_running_calls@)"}),
            Panel("Sessions", "short", {"{{pod}}": "sum by (pod) (tailrace_tool_sessions@)"}),
            Panel("Workers lost in a call", "cps", {"all": _rate("tailrace_tool_lost_workers_total")}),
            Panel(
                "Sandbox: processes that ended by themselves",
                "cps",
                {"all": _rate("tailrace_sandbox_lost_zygotes_total")},
            ),
            Panel(
                "Sandbox: open sessions",
                "short",
                {"{{pod}}": "sum by (pod) (tailrace_sandbox_sessions@)"},
            ),
            Panel(
                "Episodes scored",
                "cps",
                {"{{result}}": _rate("tailrace_reward_scores_total", "result")},
            ),
            Panel(
                "Time of a reward function, 90%",
                "s",
                {"{{function}}": _quantile("tailrace_reward_call_seconds", "function")},
            ),
        ],
    ),
    "learner": (
        "Tailrace: learner",
        [
            Panel("Loss", "short", {"loss": _step("loss")}),
            Panel("Gradient norm", "short", {"norm": _step("grad_norm")}),
            Panel("Entropy", "short", {"entropy": _step("entropy")}),
            Panel(
                "Use of time",
                "percentunit",
                {
                    "computing": _rate("tailrace_learner_busy_seconds_sum"),
                    "waiting for groups": _rate("tailrace_learner_wait_seconds_sum"),
                },
            ),
            Panel("Trained tokens", "cps", {"tokens": _rate("tailrace_learner_trained_tokens_total")}),
            Panel(
                "Steps in an hour", "short", {"steps": "max(delta(tailrace_learner_step@[10m])) * 6"}
            ),
            Panel(
                "Updates without a finite loss or gradient",
                "cps",
                {"all": _rate("tailrace_learner_skipped_updates_total")},
            ),
            Panel(
                "Groups that no checkpoint holds",
                "bytes",
                {"bytes": "max(tailrace_learner_retained_bytes@)"},
            ),
            Panel(
                "Time of a checkpoint, 90%",
                "s",
                {"save": _quantile("tailrace_learner_checkpoint_seconds")},
            ),
            Panel(
                "Failed writes",
                "cps",
                {
                    "checkpoints": _rate("tailrace_learner_failed_checkpoints_total"),
                    "trajectory files": _rate("tailrace_learner_failed_trajectory_files_total"),
                },
            ),
            Panel("Free disk", "bytes", {"run directory": "min(tailrace_scheduler_free_disk_bytes@)"}),
        ],
    ),
    "weights": (
        "Tailrace: weights",
        [
            Panel(
                "Versions",
                "short",
                {
                    "published": "max(tailrace_weight_sync_newest_version@)",
                    "{{pod}}": "max by (pod) (tailrace_inference_policy_version@)",
                },
            ),
            Panel(
                "Learner: time to publish, 90%",
                "s",
                {"publish": _quantile("tailrace_learner_publish_seconds")},
            ),
            Panel(
                "weight_sync: offer to announcement, 90%",
                "s",
                {
                    "all": _quantile("tailrace_weight_sync_take_seconds"),
                    "differences": _quantile("tailrace_weight_sync_delta_seconds"),
                },
            ),
            Panel(
                "Servers: fetch, stage, 90%",
                "s",
                {
                    "fetch": _quantile("tailrace_inference_weights_fetch_seconds"),
                    "stage": _quantile("tailrace_inference_weights_stage_seconds"),
                },
            ),
            Panel(
                "Servers: pause, 90%",
                "s",
                {"{{pod}}": _quantile("tailrace_inference_weights_swap_seconds", "pod")},
            ),
            Panel(
                "Versions that servers applied",
                "cps",
                {"{{outcome}}": _rate("tailrace_weight_sync_applied_versions_total", "outcome")},
            ),
            Panel(
                "Failed updates, refused offers",
                "cps",
                {
                    "updates": _rate("tailrace_inference_failed_weight_updates_total"),
                    "offers": _rate("tailrace_weight_sync_refused_offers_total"),
                },
            ),
        ],
    ),
}
