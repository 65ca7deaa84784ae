"""The model by token ids: policies of loops and environments that keep every call in a ledger.

Invariants: a loop's call is in the journal before the loop sees its answer; an environment's turn is in
the journal before the next one is sampled; a recorded answer is never sampled again.
"""

import hashlib
import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.chat.long_texts import with_long_texts
from tailrace.ledger import Ledger, Prompt
from tailrace.ledger.tree import Call
from tailrace.sdk.agent_loop import ChatReply, EpisodeOverError, EpisodePolicy, Remaining
from tailrace.sdk.policy import Policy, TurnRequest
from tailrace.sdk.workflow import given_reward
from tailrace_agents.core.environments import StepResult
from tailrace_agents.core.journal import EpisodeRecords
from tailrace_agents.core.machine import Episode
from tailrace_agents.core.model import EnvPolicy, EnvView, LoopPlan, ReplayMismatchError
from tailrace_agents.core.tools import NO_TOOLS, BoundTools, NoTools
from tailrace_agents.core.transcript import EnvTranscript, LoopTranscript
from tailrace_agents.ports import LoopObserver
from tailrace_protos.base import as_float32, as_int32, copy_float32, copy_int32, pack_int32
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, SamplingParams
from tailrace_protos.journal import CallRecord, EnvStep
from tailrace_protos.session import LedgerNode


class TokenModel(NamedTuple):
    """`EpisodeModel` whose calls are token ids."""

    renderer: Renderer
    policy: Policy

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See `EpisodeModel`."""
        return self.renderer.stop_token_ids

    def require_plain_turns(self) -> None:
        """See `EpisodeModel`."""
        self.renderer.require_plain_turns()

    def loop_policy(
        self,
        episode: Episode,
        plan: LoopPlan,
        records: EpisodeRecords,
        tools: BoundTools,
        observer: LoopObserver | None,
    ) -> EpisodePolicy:
        """See `EpisodeModel`."""
        ledger = Ledger(self.renderer, reasoning=plan.reasoning)
        episode.transcript = LoopTranscript(
            ledger, plan.export_style, plan.turn_discount, plan.reward_scope
        )
        return LoopPolicy(self, episode, ledger, records, tools, observer)

    def env_policy(self, episode: Episode, view: EnvView, records: EpisodeRecords) -> EnvPolicy:
        """See `EpisodeModel`."""
        return TurnPolicy(self, episode, view, records)


class LoopPolicy(EpisodePolicy):
    """Policy of one task's loop."""

    __slots__ = ("_episode", "_ledger", "_model", "_observer", "_records", "limits", "tools")

    def __init__(
        self,
        model: TokenModel,
        episode: Episode,
        ledger: Ledger,
        records: EpisodeRecords,
        tools: BoundTools | NoTools,
        observer: LoopObserver | None = None,
    ) -> None:
        self._model = model
        self._episode = episode
        self._ledger = ledger
        self._records = records
        self._observer = observer
        self.tools = tools
        self.limits = episode.limits

    @property
    def episode_id(self) -> str:
        """See `EpisodePolicy`."""
        return self._episode.task.episode_id

    @property
    def renderer(self) -> Renderer:
        """See `EpisodePolicy`."""
        return self._model.renderer

    @property
    def remaining(self) -> Remaining:
        """See `EpisodePolicy`."""
        return self._episode.remaining(self.tools.spent_s)

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> ChatReply:
        """See `EpisodePolicy`."""
        prepare = partial(self._ledger.prepare, tuple(messages), tuple(tools))
        prompt = await with_long_texts(prepare)
        node = await self._ask(prompt, max_new_tokens, sampling)
        return ChatReply(
            node.reply,
            node.finish_reason,
            self._malformed(node, sampling) if node.num_malformed else "",
            node.completion_id,
            len(node.token_ids) // 4,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """See `EpisodePolicy`."""
        prompt = self._ledger.prepare_tokens(np.asarray(prompt_ids, dtype=np.int32))
        node = await self._ask(prompt, max_new_tokens, sampling)
        return Generation(
            as_int32(node.token_ids),
            as_float32(node.inference_logprobs),
            node.spans,
            node.finish_reason,
            None,
            0,
        )

    def set_reward(self, reward: float, completion_id: str = "") -> None:
        """See `EpisodePolicy`."""
        self._ledger.set_reward(given_reward(reward, "set_reward"), completion_id)

    def set_episode_reward(self, reward: float) -> None:
        """See `EpisodePolicy`."""
        self._ledger.reward = given_reward(reward, "set_episode_reward")

    def mask(self, completion_id: str, reason: str) -> None:
        """See `EpisodePolicy`."""
        self._ledger.mask(completion_id, reason)

    async def _ask(
        self, prompt: Prompt, max_new_tokens: int | None, sampling: SamplingParams | None
    ) -> LedgerNode:
        """Answers a prompt, from the journal or by the model."""
        with self._episode.latch:
            call = self._episode.next_call()
            prompt_ids = pack_int32(prompt.prompt_ids)
            node = self._records.known_call(prompt_ids)
            was_known = node is not None
            if node is not None:
                self._ledger.add(node)
                self._episode.num_replayed += 1
            else:
                budget = self._episode.budget(len(prompt.prompt_ids), call, max_new_tokens)
                params = self._params(sampling, call)
                request = TurnRequest(prompt_ids, budget, params, self.episode_id, call)
                answer = await self._episode.sample(self._model.policy, request)
                self._episode.latch.require_running()
                node = self._record(prompt, answer, params)
                await self._records.keep_call(prompt_ids, node)
        if self._observer is not None:
            self._observer.on_call(prompt, node, was_known)
        return node

    def _record(self, prompt: Prompt, generation: Generation, params: SamplingParams) -> LedgerNode:
        completion_id = f"call-{uuid.uuid4().hex}"
        parsed = self.renderer.parse_reply(
            generation.token_ids, prompt.tools, stop=params.stop, id_seed=completion_id
        )
        return self._ledger.record(prompt, generation, parsed, completion_id)

    def _malformed(self, node: LedgerNode, sampling: SamplingParams | None) -> str:
        """Describes the malformed calls of a reply: the ledger keeps their number only."""
        stop = (self._episode.sampling.params if sampling is None else sampling).stop
        return self.renderer.parse_reply(as_int32(node.token_ids), node.tools, stop=stop).malformed

    def _params(self, sampling: SamplingParams | None, call: int) -> SamplingParams:
        """Returns the parameters of a call; a reply always ends where the model ends it.

        `ValueError` for an empty stop text, which ends every reply at once.
        """
        if sampling is None:
            return self._episode.sampling.for_turn(call)
        if "" in sampling.stop:
            raise ValueError("sampling.stop holds an empty text: a call samples at least one token")
        if sampling.stop_token_ids:
            return sampling
        return msgspec.structs.replace(sampling, stop_token_ids=self.renderer.stop_token_ids)


class TurnPolicy(LoopPolicy, EnvPolicy):
    """Policy of an environment's episode: each observation continues the tokens so far.

    With `history_turns` h, the model sees the newest observation and the h turns before it. Such a
    window is a prompt that does not continue: its first observation is rendered as the beginning of a
    prompt, behind the text that the environment wants to stay in sight; the rest are the episode's
    tokens. The context of a turn's row is the prompt that the model saw.
    """

    __slots__ = ("_call", "_hasher", "_known", "_observed", "_transcript", "_windows")

    def __init__(
        self, model: TokenModel, episode: Episode, view: EnvView, records: EpisodeRecords
    ) -> None:
        super().__init__(model, episode, Ledger(model.renderer), records, NO_TOOLS)
        self._transcript = episode.transcript = EnvTranscript(self._ledger, view.style)
        self._windows = None if view.history_turns is None else _Windows(view.history_turns)
        self._hasher = observation_hasher(str(episode.task.task.seed))
        self._call: Call | None = None  # the newest turn
        self._known: CallRecord | None = None  # its record, if it was replayed
        self._observed = 0  # hash of the newest observation

    async def answer(self, observation: str, opening: str) -> str:
        """See `EnvPolicy`; raises `ReplayMismatchError`."""
        turn = self._episode.num_calls
        self._episode.num_calls = turn + 1
        self._observed = observation_hash(self._hasher, observation)
        before = b"" if self._call is None else self._call.sequence()
        inserted, is_whole = self._insert(before, observation, opening)
        self._known = known = self._records.known_turn()
        if known is None:
            said = (ChatMessage("user", observation),)
            prompt = inserted if is_whole else before + inserted
            answer = await self._answered(turn, prompt, said, inserted)
            node = self._sampled(turn, answer, said, inserted, is_whole)
        else:
            node = known.node
            if inserted != node.inserted_ids:
                raise ReplayMismatchError
        self._call = self._ledger.add(node)
        if self._windows is not None:
            self._windows.replies.append(node.token_ids)
        return node.reply.content

    async def take_step(self, step: StepResult) -> None:
        """See `EnvPolicy`; raises `ReplayMismatchError`."""
        assert self._call is not None, "a step without a reply"
        self._transcript.finish_turn(step.reward, self._observed)
        answered = EnvStep(step.reward, step.terminated, step.truncated)
        if self._known is None:
            await self._records.keep_turn(self._call.node, answered)
        elif self._known.step != answered:
            raise ReplayMismatchError
        else:
            self._episode.num_replayed += 1

    def _insert(self, before: bytes, observation: str, opening: str) -> tuple[bytes, bool]:
        """Returns the ids to insert, and whether they are the whole prompt of a window.

        `before` holds the raw ids of the newest turn's prompt and reply.
        """
        renderer = self._model.renderer
        closed = not before or renderer.is_closed(int.from_bytes(before[-4:], "little", signed=True))
        ids = renderer.observation_ids(observation, not before, closed).tobytes()
        if self._windows is None:
            return ids, False
        first = renderer.observation_ids(opening + observation, True, True).tobytes() if before else ids
        window = self._windows.observe(first, ids)
        return (ids, False) if window is None else (window, True)

    async def _answered(
        self, turn: int, prompt: bytes, said: tuple[ChatMessage, ...], inserted: bytes
    ) -> Generation:
        """Samples a turn; one without room stays in the ledger as unanswered."""
        episode = self._episode
        try:
            budget = episode.budget(len(prompt) // 4, turn)
            params = episode.sampling.for_turn(turn)
            view = memoryview(prompt)
            request = TurnRequest(view, budget, params, episode.task.episode_id, turn)
            return await episode.sample(self._model.policy, request)
        except EpisodeOverError:
            self._ledger.leave_unanswered(said, inserted)
            raise

    def _sampled(
        self,
        turn: int,
        answer: Generation,
        said: tuple[ChatMessage, ...],
        inserted: bytes,
        is_whole: bool,
    ) -> LedgerNode:
        """Makes the node of a new turn. It holds copies: views would keep the engine's messages."""
        return LedgerNode(
            str(turn),
            "" if self._call is None else self._call.node.completion_id,
            said,
            inserted,  # type: ignore[arg-type]  # bytes, which the garbage collector does not track
            copy_int32(answer.token_ids),
            copy_float32(answer.inference_logprobs),
            answer.spans,
            answer.finish_reason or FinishReason.ABORT,
            ChatMessage("assistant", self._model.renderer.decode(answer.token_ids)),
            is_rendered_whole=is_whole,
        )


class _Windows:
    """Pieces of the prompts of an episode that show its last `history_turns` turns only."""

    def __init__(self, history_turns: int) -> None:
        self._history_turns = history_turns
        self._openings: list[bytes] = []  # of every turn: its observation as the beginning of a prompt
        self._observations: list[bytes] = []  # the observation as it continued the episode
        self.replies: list[memoryview] = []

    def observe(self, first: bytes, ids: bytes) -> bytes | None:
        """Adds an observation; returns the ids of the prompt, or None while all turns are in sight."""
        begin = len(self._observations) - self._history_turns
        self._openings.append(first)
        self._observations.append(ids)
        if begin <= 0:
            return None
        parts: list[bytes | memoryview] = [self._openings[begin]]
        for reply, observation in zip(
            self.replies[begin:], self._observations[begin + 1 :], strict=True
        ):
            parts += (reply, observation)
        return b"".join(parts)


def observation_hasher(task: str) -> "hashlib.blake2b":
    """Hasher of a task's observations, salted with the task: two tasks never share a hash."""
    salt = hashlib.blake2b(task.encode(), digest_size=16).digest()
    return hashlib.blake2b(digest_size=8, key=salt)


def observation_hash(hasher: "hashlib.blake2b", observation: str) -> int:
    """Hashes an observation; `hasher` stays as it is."""
    salted = hasher.copy()
    salted.update(observation.encode())
    return int.from_bytes(salted.digest(), "little", signed=True)
