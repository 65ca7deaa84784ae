"""One session in this replica: its ledger, the position in its log, and its calls in flight."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace.chat import ParsedReply
from tailrace.ledger import Ledger, Prompt
from tailrace_gateway.core.errors import ApiError, SessionOverError
from tailrace_gateway.core.in_flight import InFlightCall
from tailrace_protos.base import as_int32
from tailrace_protos.chat import ToolCall
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import CallRefused, LedgerNode, OpenSession, RewardSet

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(LedgerNode | RewardSet | CallRefused)


class Session:
    """Ledger and log position of one session.

    Invariant: the ledger holds the first `num_read` entries of the log and the calls sampled here.
    """

    def __init__(
        self,
        record: OpenSession,
        nonce: str,
        key_hash: str,
        ledger: Ledger,
        sampling: SamplingParams,
    ) -> None:
        self.record = record
        self.nonce = nonce
        self.key_hash = key_hash
        self.ledger = ledger
        self.sampling = sampling  # the session's parameters with the model's end-of-turn ids
        self.refusals: set[str] = set()  # codes of calls that exceeded a limit of the session
        self.missing: dict[str, LedgerNode] = {}  # masked calls that the log lacks, by id
        self.num_read = 0
        self.is_behind = False  # other replicas appended entries that are not read yet
        self.is_open = True
        self.last_used_s = 0.0
        self.renewal_due_s = 0.0  # time of the next renewal of its lease while calls are in flight
        self.calls: set[InFlightCall] = set()
        self.by_name: dict[str, InFlightCall] = {}  # calls in flight by name, for retries
        self._nodes: dict[str, LedgerNode] = {}  # in the order of recording
        self._next_number = 0  # of a call

    @property
    def session_id(self) -> str:
        """Id of the session, which is the episode's id."""
        return self.record.episode_id

    @property
    def num_calls(self) -> int:
        """Number of calls in the ledger; each choice counts."""
        return len(self._nodes)

    def number_call(self) -> int:
        """Return the number of a new call, which no call that this replica knows has."""
        number = max(self._next_number, self.num_calls)
        self._next_number = number + 1
        return number

    @property
    def last_call_id(self) -> str:
        """Id of the newest call, of several choices the first; empty without calls."""
        return self.ledger.last_call_id

    def has_call(self, completion_id: str) -> bool:
        """True if the ledger has a call of this id."""
        return completion_id in self._nodes

    def node(self, completion_id: str) -> LedgerNode:
        """Return a call of the ledger."""
        return self._nodes[completion_id]

    def find_tool_call(self, call_id: str) -> ToolCall | None:
        """Return the newest tool call of this id; None if no reply has one."""
        made = (call for node in reversed(self._nodes.values()) for call in node.reply.tool_calls)
        return next((call for call in made if call.id == call_id), None)

    def prompt_ids(self, completion_id: str) -> NDArray[np.int32]:
        """Return all prompt tokens [P] of a call."""
        node = self._nodes[completion_id]
        parts = [as_int32(node.inserted_ids)]
        while node.parent_id and not node.is_rendered_whole:
            node = self._nodes[node.parent_id]
            parts += (as_int32(node.token_ids), as_int32(node.inserted_ids))
        return np.concatenate(parts[::-1])

    def apply(self, entries: Sequence[bytes], first: int) -> None:
        """Apply log entries that begin at number `first`; skip known ones."""
        for entry in entries[max(0, self.num_read - first) :]:
            self.take(_decoder.decode(entry))
            self.num_read += 1
        self.is_behind = False

    def take(self, entry: LedgerNode | RewardSet | CallRefused) -> None:
        """Apply one node, reward or refusal."""
        if isinstance(entry, CallRefused):
            self.refusals.add(entry.code)
        elif isinstance(entry, RewardSet):
            if self.has_call(entry.completion_id):
                self.ledger.set_reward(entry.reward, entry.completion_id)
        elif not self.has_call(entry.completion_id):
            self.ledger.add(entry)
            self._nodes[entry.completion_id] = entry

    def record_call(
        self,
        prompt: Prompt,
        generation: Generation,
        parsed: ParsedReply,
        completion_id: str,
        broken_constraint: str,
        choice: int,
    ) -> LedgerNode:
        """Record a call that this replica sampled."""
        node = self.ledger.record(prompt, generation, parsed, completion_id, broken_constraint, choice)
        self._nodes[completion_id] = node
        return node

    def appended(self, num_entries: int, length: int) -> None:
        """Update the position after an append of this replica; `length` is the log's new length.

        If other replicas appended meanwhile, a later read returns our entries with theirs and skips
        ours.
        """
        if length == self.num_read + num_entries:
            self.num_read = length
        else:
            self.is_behind = True

    def deadline_error(self) -> SessionOverError:
        """Return the error of a call after the deadline."""
        reason = f"the deadline of session {self.session_id!r} has passed"
        return SessionOverError(reason, code="session_deadline_exceeded")

    def close(self, error: ApiError | None = None) -> None:
        """Accept no more calls; end those in flight with `error`, or else as closed."""
        self.is_open = False
        for call in self.calls:
            call.cancel(error or SessionOverError("the session was closed while this call ran"))
