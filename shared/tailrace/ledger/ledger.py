"""Transcript of one episode: its conversations with their prompts, sampled tokens and rewards.

Invariants: a token is trained only if an engine sampled it, and by one row only; a prompt consists of
recorded ids and newly inserted ids, never of a reply that was encoded again; recording a call twice
changes nothing; a ledger restored from its nodes is the same ledger.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.chat import ParsedReply, Renderer
from tailrace.config.run import ReasoningPolicy
from tailrace.ledger.export import Unanswered, export_rows, export_turns
from tailrace.ledger.prompting import (
    Prompt,
    Rendering,
    Sampled,
    prompt_of_messages,
    prompt_of_tokens,
)
from tailrace.ledger.returns import credit, is_rejected
from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.base import copy_float32, copy_int32
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason
from tailrace_protos.session import ExportStyle, LedgerNode, RewardScope
from tailrace_protos.trajectory import TokenRow


class Ledger:
    """Tree of calls. Pure: it reads no clock, calls no engine and stores nothing elsewhere."""

    __slots__ = ("_reasoning", "_rendering", "_tree", "_unanswered", "reward")

    def __init__(self, renderer: Renderer, *, reasoning: ReasoningPolicy = "keep") -> None:
        self._rendering = Rendering(renderer)
        self._reasoning: ReasoningPolicy = reasoning
        self._tree = CallTree()
        self._unanswered: Unanswered | None = None
        self.reward: float | None = None  # of the episode, beside those of calls

    @classmethod
    def restore(
        cls,
        renderer: Renderer,
        nodes: Iterable[LedgerNode],
        *,
        reasoning: ReasoningPolicy = "keep",
    ) -> "Ledger":
        """Builds the ledger that has these `nodes`."""
        ledger = cls(renderer, reasoning=reasoning)
        for node in nodes:
            ledger.add(node)
        return ledger

    def prepare(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        rendering: Rendering | None = None,
    ) -> Prompt:
        """Makes the prompt for the next reply of a conversation given as text; records nothing.

        `rendering`: of a call with template arguments of its own. Raises `ValueError` without
        messages, `TemplateError` if the template cannot render them.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        return prompt_of_messages(
            self._tree, rendering or self._rendering, self._reasoning, tuple(messages), tuple(tools)
        )

    def prepare_tokens(
        self, prompt_ids: NDArray[np.int32], messages: Sequence[ChatMessage] = ()
    ) -> Prompt:
        """Makes the prompt of these ids [P]; `messages` are the new ones, if the caller has their text.

        Ids that begin with all ids of a recorded call continue that call; others begin a conversation.
        """
        if not len(prompt_ids):
            raise ValueError("a prompt needs at least one token")
        return prompt_of_tokens(self._tree, prompt_ids, tuple(messages))

    def leave_unanswered(self, messages: tuple[ChatMessage, ...], inserted_ids: bytes) -> None:
        """Keeps a prompt that no budget is left for: a row of all turns shows it at its end."""
        self._unanswered = Unanswered(messages, inserted_ids)

    def record(
        self,
        prompt: Prompt,
        generation: Sampled,
        parsed: ParsedReply | ChatMessage,
        completion_id: str,
        broken_constraint: str = "",
        choice: int = 0,
    ) -> LedgerNode:
        """Keeps a call's tokens and its reply; returns a call that is already recorded as it is."""
        known = self._tree.get(completion_id)
        if known is not None:
            return known.node
        reply, num_malformed = (
            (parsed, 0) if isinstance(parsed, ChatMessage) else (parsed.message, parsed.num_malformed)
        )
        node = LedgerNode(
            completion_id=completion_id,
            parent_id=prompt.parent_id,
            messages=prompt.messages,
            inserted_ids=copy_int32(prompt.inserted_ids),
            token_ids=copy_int32(generation.token_ids),
            inference_logprobs=copy_float32(generation.inference_logprobs),
            spans=generation.spans,
            finish_reason=generation.finish_reason or FinishReason.ABORT,
            reply=reply,
            tools=prompt.tools,
            is_rendered_whole=prompt.is_rendered_whole,
            is_fork=prompt.is_fork,
            num_malformed=num_malformed,
            template_args=prompt.template_args,
            broken_constraint=broken_constraint,
            choice=choice,
        )
        self._tree.add(node)
        return node

    def add(self, node: LedgerNode) -> Call:
        """Takes over a node as it is; it replaces a node of the same id. Returns its place in the tree.

        Raises `UnknownCompletionError` if its parent is missing, `ValueError` if its bytes are no whole
        tokens, or if there is not one log-probability for each sampled token.
        """
        if len(node.token_ids) % 4 or len(node.inserted_ids) % 4:
            raise ValueError(f"call {node.completion_id!r}: its ids are not int32")
        if len(node.token_ids) != len(node.inference_logprobs):  # 4 bytes each
            raise ValueError(
                f"call {node.completion_id!r}: its log-probabilities are not those of its tokens"
            )
        return self._tree.add(node)

    def mask(self, completion_id: str, reason: str) -> LedgerNode:
        """Excludes the tokens of a call from training; raises `UnknownCompletionError`."""
        node = self._tree.find(completion_id).node
        return self._replace(msgspec.structs.replace(node, is_masked=True, mask_reason=reason))

    def set_reward(self, reward: float, completion_id: str = "") -> LedgerNode:
        """Sets the reward of a call, the last one for an empty id; raises `UnknownCompletionError`."""
        node = self._tree.find(completion_id).node
        return self._replace(msgspec.structs.replace(node, reward=float(reward)))

    def settle(self, reward: float) -> None:
        """Makes all rewards sum to `reward`: the episode's is the rest beside those of calls."""
        given = [node.reward for node in self.nodes if node.reward is not None]
        rest = reward - math.fsum(given)
        self.reward = None if given and math.isclose(rest, 0.0, abs_tol=1e-9) else rest

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of all calls, with the episode's at the last one; None for a call without any."""
        rewards = [call.node.reward for call in self._tree]
        if rewards and self.reward is not None:
            last = len(rewards) - len(self._tree.last_choices())
            rewards[last] = (rewards[last] or 0.0) + self.reward
        return tuple(rewards)

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults of replies that nothing continued: cut at a limit, unreadable, or against a
        constraint of the call."""
        tree = self._tree
        leaves = [call for call in tree if not tree.children(call) and not is_rejected(tree, call)]
        return tuple(sorted({fault for call in leaves for fault in _faults(call.node)}))

    @property
    def num_sampled(self) -> int:
        """Tokens sampled by all calls."""
        return self._tree.num_sampled

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def num_tokens(self) -> int:
        """Tokens inserted and sampled by all calls."""
        return sum(len(call.node.inserted_ids) + len(call.node.token_ids) for call in self._tree) // 4

    @property
    def num_nonfinite(self) -> int:
        """Sampled tokens of calls that are not masked whose log-probability is not finite."""
        nodes = (call.node for call in self._tree)
        raw = b"".join(node.inference_logprobs for node in nodes if not node.is_masked)
        return int(np.count_nonzero(~np.isfinite(np.frombuffer(raw, "<f4"))))

    @property
    def nodes(self) -> tuple[LedgerNode, ...]:
        """Nodes of all calls in the order of their recording."""
        return tuple(call.node for call in self._tree)

    def rows(
        self,
        style: ExportStyle,
        turn_discount: float = 1.0,
        scope: RewardScope = RewardScope.EPISODE,
    ) -> tuple[TokenRow, ...]:
        """Exports the rows to train (`tailrace.ledger.export`); `scope` is that of `reward`."""
        credited = credit(self._tree, turn_discount, self.reward, scope)
        return export_rows(self._tree, style, credited)

    def turn_rows(
        self, style: ExportStyle, reward: float, rewards: Sequence[float], hashes: Sequence[int]
    ) -> tuple[TokenRow, ...]:
        """Exports the first K calls as turns of one line with K `rewards` and observation `hashes`.

        Every row is credited `reward`, the episode's. See `tailrace.ledger.export.export_turns`.
        """
        calls = list(self._tree)[: len(rewards)]
        return export_turns(calls, style, reward, rewards, hashes, self._unanswered)

    def messages(self, completion_id: str = "") -> tuple[ChatMessage, ...]:
        """Returns the conversation of a call with its reply; of the last call for an empty id.

        A prompt that was left unanswered ends the conversation of the last call.
        """
        said: list[ChatMessage] = []
        for call in self._tree.find(completion_id).message_path():
            said += call.node.messages
            said.append(call.node.reply)
        if self._unanswered is not None and not completion_id:
            said += self._unanswered.messages
        return tuple(said)

    @property
    def last_call_id(self) -> str:
        """Id of the last call, of several choices the first; empty without calls."""
        return self._tree.find("").node.completion_id if len(self._tree) else ""

    @property
    def num_cut_replies(self) -> int:
        """Calls whose reply was cut at its limit of tokens."""
        return sum(call.node.finish_reason is FinishReason.LENGTH for call in self._tree)

    def counts(self) -> dict[str, float]:
        """Counts calls, forks, tool calls and masked tokens, as metrics."""
        nodes = self.nodes
        counts = {
            "num_calls": len(nodes),
            "num_sampled_tokens": self.num_sampled,
            "num_forks": sum(node.is_fork for node in nodes),
            "num_malformed_tool_calls": sum(node.num_malformed for node in nodes),
            "num_tool_calls": sum(len(node.reply.tool_calls) for node in nodes),
            "num_cut_replies": self.num_cut_replies,
            "num_broken_constraints": sum(bool(node.broken_constraint) for node in nodes),
            "num_masked_calls": sum(node.is_masked for node in nodes),
            "num_nonfinite_tokens": self.num_nonfinite,
        }
        return {name: float(count) for name, count in counts.items()}

    def _replace(self, node: LedgerNode) -> LedgerNode:
        self._tree.add(node)
        return node


def _faults(node: LedgerNode) -> Iterator[str]:
    if node.finish_reason is FinishReason.LENGTH:
        yield "reply_cut"
    if node.num_malformed:
        yield "malformed_tool_call"
    if node.broken_constraint:
        yield f"{node.broken_constraint}_not_met"
