"""Audit events of a run, as the outbox, EVENTS and `events.jsonl` hold them."""

import msgspec

from tailrace_protos.base import Message
from tailrace_protos.episode import Outcome, StageSeconds
from tailrace_protos.subjects import Phase


class RunStarted(msgspec.Struct, frozen=True, tag="run_started"):
    """The scheduler began (or took over) the run."""

    run: str
    config_digest: str


class WarmStartAdvanced(msgspec.Struct, frozen=True, tag="warm_start_advanced"):
    """The learner's warm start has done another hundredth of its steps, or more."""

    step: int
    num_steps: int
    loss: float


class ModelPrepared(msgspec.Struct, frozen=True, tag="model_prepared"):
    """The learner has its initial weights; a warm start, if any, is done."""

    num_parameters: int
    warm_start_steps: int
    warm_start_s: float
    warm_start_loss: float | None
    forward_path: str = ""  # of rows through the model: shared, packed, rows
    slower_because: str = ""  # reason that no faster way is right


class LearnerResumed(msgspec.Struct, frozen=True, tag="learner_resumed"):
    """A learner starts a lineage at `step` (0: from scratch); later steps of others do not count."""

    lineage: str
    step: int
    next_group_index: int
    checkpoint: str


class GroupAdmitted(msgspec.Struct, frozen=True, tag="group_admitted"):
    """A group was recorded; its episodes follow on the work queue."""

    group_id: str
    group_index: int
    phase: Phase
    num_members: int
    step: int  # optimizer step at admission


class EpisodeRedelivered(msgspec.Struct, frozen=True, tag="episode_redelivered"):
    """An episode went out again: `attempt` is the new one."""

    episode_id: str
    attempt: int
    reason: str


class EpisodeSettled(msgspec.Struct, frozen=True, tag="episode_settled"):
    """An episode's one settlement."""

    episode_id: str
    group_id: str
    member: int
    phase: Phase
    outcome: Outcome
    reason: str
    reward: float
    success: float | None  # `Trajectory.success`
    num_sampled_tokens: int
    num_turns: int
    min_policy_version: int
    max_policy_version: int
    started_unix_s: float
    finished_unix_s: float
    num_tool_calls: int = -1  # -1: not counted, as in environments
    num_cut_replies: int = 0  # ended by a limit of tokens
    stages: StageSeconds = StageSeconds()
    context_tokens: int = 0  # of its longest row; 0: it has none
    reports_success: bool = False  # `success` is not derived from the reward


class GroupClosed(msgspec.Struct, frozen=True, tag="group_closed"):
    """All members settled; a train group with enough valid members went to the learner."""

    group_id: str
    phase: Phase
    num_valid: int
    num_members: int
    sent_to_learner: bool
    num_bytes: int


class GroupDropped(msgspec.Struct, frozen=True, tag="group_dropped"):
    """The learner gave a group back untrained, e.g. because all of it was too stale."""

    group_id: str
    reason: str


class StepFinished(msgspec.Struct, frozen=True, tag="step_finished"):
    """One optimizer step with the groups that made it and the learner's metrics."""

    lineage: str
    step: int
    policy_version: int  # version that the step produced; -1: the learner was stopped before that
    group_ids: tuple[str, ...]
    num_dropped_groups: int
    started_unix_s: float  # first backward of the step
    finished_unix_s: float
    metrics: dict[str, float | None]


class WeightsPublished(msgspec.Struct, frozen=True, tag="weights_published"):
    """A version became available to inference servers."""

    policy_version: int
    lineage: str
    optimizer_step: int
    num_bytes: int


class ServerWeightsApplied(msgspec.Struct, frozen=True, tag="server_weights_applied"):
    """An inference server began to serve a version."""

    server_id: str
    policy_version: int
    swap_s: float


class CheckpointSaved(msgspec.Struct, frozen=True, tag="checkpoint_saved"):
    """A durable checkpoint exists; the groups trained up to it were deleted from the buffer."""

    lineage: str
    step: int
    path: str
    num_groups: int


class EvaluationStarted(msgspec.Struct, frozen=True, tag="evaluation_started"):
    """Evaluation episodes for the weights of `step` were admitted."""

    evaluation_id: str
    step: int
    policy_version: int
    num_episodes: int
    is_interim: bool = False  # between the first and the last one


class TagEvaluation(msgspec.Struct, frozen=True):
    """Result on the tasks of one tag or named evaluation; both means are 0 without a valid episode.

    `pass_at[k]`: share of tasks that one of k samples solves, estimated without bias from all samples.
    """

    success_rate: float
    reward_mean: float
    num_valid: int
    pass_at: dict[int, float] = {}


class EvaluationFinished(msgspec.Struct, frozen=True, tag="evaluation_finished"):
    """The evaluation's result over its valid episodes, the greedy ones apart."""

    evaluation_id: str
    step: int
    success_rate: float
    reward_mean: float
    num_valid: int
    num_episodes: int
    tags: dict[str, TagEvaluation] = {}  # of the tags, or named evaluations, that were played
    greedy: TagEvaluation | None = None  # of the greedy episodes, which the means above leave out
    greedy_tags: dict[str, TagEvaluation] = {}


class ServerQuarantined(msgspec.Struct, frozen=True, tag="server_quarantined"):
    """A server's log-probabilities are not those of the weights that it says it has.

    Its tokens of later steps than `good_step` are not trained any more, and this start of its process
    is to leave.
    """

    server_id: str
    incarnation: str
    mismatch: float  # mean |log pi - log mu| over version-matched tokens
    max_mismatch: float
    num_tokens: int  # that were read
    step: int  # optimizer step of the weights with which it was read
    good_step: int  # of its last good reading; -1: there was none


class TaskSolved(msgspec.Struct, frozen=True, tag="task_solved"):
    """Every training episode succeeds, so that none teaches anything: the run ends before `max_steps`.

    A learner that resumes takes it back.
    """

    lineage: str
    step: int
    num_groups: int  # in a row, that trained no token
    reason: str


class TrainingEnded(msgspec.Struct, frozen=True, tag="training_ended"):
    """The learner takes no step after `step`, because the task is solved; a checkpoint holds it."""

    lineage: str
    step: int


class RunFinished(msgspec.Struct, frozen=True, tag="run_finished"):
    """The run ended by itself: all steps were made, or its task is solved (`TaskSolved`).

    The final checkpoint and the final evaluation are done.
    """

    step: int
    reason: str


class RunFailed(msgspec.Struct, frozen=True, tag="run_failed"):
    """The run ended by itself, because nothing in it could succeed."""

    rule: str  # failed_groups, untrained_steps, stall, short_sequences, or of its end
    step: int
    reason: str  # for the user: facts, commonest cause, remedy
    service: str  # whose log has more


class HintChanged(msgspec.Struct, frozen=True, tag="hint_changed"):
    """A health hint was raised, or no longer holds."""

    name: str
    is_raised: bool
    text: str  # observation and the likely setting
    step: int


EventBody = (
    RunStarted
    | WarmStartAdvanced
    | ModelPrepared
    | LearnerResumed
    | GroupAdmitted
    | EpisodeRedelivered
    | EpisodeSettled
    | GroupClosed
    | GroupDropped
    | StepFinished
    | WeightsPublished
    | ServerWeightsApplied
    | CheckpointSaved
    | EvaluationStarted
    | EvaluationFinished
    | ServerQuarantined
    | HintChanged
    | TaskSolved
    | TrainingEnded
    | RunFinished
    | RunFailed
)


class Event(msgspec.Struct, frozen=True):
    """An event with its place in the outbox order; one line of `events.jsonl`."""

    seq: str  # Redis outbox id: total order, and the key that makes relaying idempotent
    unix_s: float
    service: str
    body: EventBody


class EventBatch(Message, frozen=True, tag="event_batch"):
    """One message of the EVENTS stream: consecutive events, oldest first.

    Its message id is "<first seq>:<last seq>"; a reader that must count each event once also skips
    what is not newer than the last `seq` it has seen.
    """

    events: tuple[Event, ...]
