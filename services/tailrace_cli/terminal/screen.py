"""Printout of an episode: every turn, token counts, tool calls, rewards, forks."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from tailrace.ledger import Prompt
from tailrace.sdk.env import Env
from tailrace_agents.core.episode import EpisodeResult
from tailrace_protos.base import as_float32, as_uint8
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.reward import Score
from tailrace_protos.session import LedgerNode
from tailrace_protos.tool import ToolResult
from tailrace_protos.trajectory import TokenRow

_STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


class Screen:
    """`Watcher` of environments and agent loops, on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._turn = 0

    def line(self, text: str) -> None:
        """Prints a line of plain text."""
        self._console.print(text, soft_wrap=True)

    def panel(self, title: str, text: str, style: str) -> None:
        """Prints a framed text."""
        body = Text(text.rstrip("\n"))
        self._console.print(Panel(body, title=Text(title), title_align="left", style=style))

    def on_reset(self, observation: str) -> None:
        """Prints the first observation."""
        self._turn = 0
        self.panel("environment", observation, "cyan")

    def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
        """Prints the reply and the environment's answer."""
        self._turn += 1
        self.panel(f"model, turn {self._turn}", reply, "green")
        self.panel(f"environment, reward {reward:g}{', the end' if done else ''}", observation, "cyan")

    def on_call(self, prompt: Prompt, node: LedgerNode, was_known: bool) -> None:
        """Prints the new messages of a prompt, a fork if there is one, and the reply."""
        num_new, num_prompt = len(prompt.inserted_ids), len(prompt.prompt_ids)
        if prompt.is_fork:
            self.line(f"the prefix forked: {num_new} of {num_prompt} prompt tokens were rendered anew")
        elif self._turn and not prompt.parent_id:
            self.line("another conversation begins")
        self.messages(prompt.messages)
        counts = f"{num_prompt} tokens in ({num_new} new), {len(node.token_ids) // 4} out"
        self.reply(node.reply, f"{counts}, {node.finish_reason.value}")
        if node.num_malformed:
            self.line(f"{node.num_malformed} tool calls could not be read")

    def on_node(self, node: LedgerNode) -> None:
        """Prints a call that the gateway recorded."""
        num_new = len(node.inserted_ids) // 4
        if node.is_fork:
            self.line(f"the prefix forked: {num_new} prompt tokens were rendered anew")
        elif self._turn and not node.parent_id:
            self.line("another conversation begins")
        self._panels(node.messages)
        counts = f"{num_new} new tokens in, {len(node.token_ids) // 4} out"
        self.reply(node.reply, f"{counts}, {node.finish_reason.value}")

    def recorder(self, env: Env, task: EpisodeTask) -> "Screen":
        """See `Watcher`."""
        return self

    async def save(self) -> None:
        """Keeps nothing."""

    def on_tool(self, call: ToolCall, result: ToolResult, was_known: bool) -> None:
        """Prints a tool's result."""
        kind = f", error {result.error_kind.value}" if result.is_error else ""
        title = f"tool {call.name}, {result.elapsed_s * 1000:.0f} ms{kind}"
        self.panel(title, result.content, "red" if result.is_error else "yellow")

    def messages(self, messages: Sequence[ChatMessage]) -> None:
        """Prints messages to the model; tool results were printed when they arrived."""
        self._panels(message for message in messages if message.role != "tool")

    def continued(self, known: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> None:
        """Prints the messages that follow the `known` ones, or all of another conversation."""
        if list(messages[: len(known)]) == list(known):
            self.messages(messages[len(known) :])
            return
        self.line("another conversation, or the messages before were changed")
        self.messages(messages)

    def _panels(self, messages: Iterable[ChatMessage]) -> None:
        for message in messages:
            self.panel(message.role, message.content, _STYLES.get(message.role, "white"))

    def reply(self, reply: ChatMessage, counts: str) -> None:
        """Prints the model's reply."""
        self._turn += 1
        parts = [f"(thinks) {reply.reasoning}" if reply.reasoning else "", reply.content]
        parts += [f"-> {call.name}({call.arguments})" for call in reply.tool_calls]
        self.panel(f"model, turn {self._turn}: {counts}", "\n".join(filter(None, parts)), "green")

    def end(self, result: EpisodeResult, score: Score | None) -> None:
        """Prints the end of the episode, its reward and its rows."""
        reason = f" ({result.reason})" if result.reason else ""
        given = f"return {sum(result.transcript.turn_rewards):g}, {result.transcript.num_turns} turns"
        self.line(f"outcome {result.outcome.value}{reason}, {given}")
        if score is not None:
            parts = ", ".join(f"{name} {value:g}" for name, value in score.components.items())
            self.line(
                f"reward {score.reward:g} ({parts})" if score.error is None else score.error.reason
            )
        metrics = {name: value for name, value in result.metrics.items() if value}
        if metrics:
            self.line(", ".join(f"{name} {value:g}" for name, value in sorted(metrics.items())))
        rows = result.transcript.rows(score.reward if score is not None else 0.0)
        for number, row in enumerate(rows):
            self.line(_row_line(f"row {number + 1} of {len(rows)}", row))


def _row_line(name: str, row: TokenRow) -> str:
    mask = as_uint8(row.loss_mask).astype(bool)
    mean = float(as_float32(row.inference_logprobs)[mask].mean()) if mask.any() else 0.0
    return (
        f"{name}: {len(mask)} tokens, {int(mask.sum())} of them sampled at mean log-probability "
        f"{mean:.3f}, return {row.reward:g}"
    )
