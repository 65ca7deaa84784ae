"""WebShop as a conversation: pages as text, answered by `search[words]` or `click[name]`.

The first action in a reply counts (`grammar`). A reply without an action that the page offers is
answered by a note and the same page. `click[buy now]` ends the episode with the published reward;
everything before it is worth nothing.
"""

from __future__ import annotations

from typing import Any

from tailrace.config import decode_config
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.webshop.config import WebShopConfig
from tailrace_envs.webshop.goals import Goal
from tailrace_envs.webshop.grammar import read_action
from tailrace_envs.webshop.pages import Page, text_of
from tailrace_envs.webshop.scoring import score
from tailrace_envs.webshop.shop import Shop, open_shop

INVALID_NOTE = "Invalid action.\n"
RULES = (
    "You are shopping. Find the product of the instruction, choose its options and buy it. Answer "
    "every page with one of its available actions, search[words] or click[name].\n"
)
MAX_QUERY_CHARS = 1000


class WebShopText(TextGame):
    """One shopping trip at a time, for the goal that the seed of `reset` chooses from the split.

    The reward of a purchase is `scoring.score`; `info["success"]` is 1.0 for a reward of 1. The last
    `info` of a purchase has its parts. Options are the keys of `WebShopConfig`.
    """

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, WebShopConfig, "env_config")
        super().__init__(self.config.max_turns)
        self.shop: Shop = open_shop(self.config.catalogue)
        self.goal: Goal = self.shop.goal_for_seed(self.config.split, 0)  # an empty split fails here
        self.page = Page()
        self._reward = 0.0

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self.goal = self.shop.goal_for_seed(self.config.split, seed)
        self.page = Page()
        self._reward = 0.0
        return self._rules() + self._wish() + self._page_text()

    def instructions(self) -> str:
        """See `TextGame`; pages that repeat the instruction need no other."""
        return self._rules() + ("" if self.config.repeat_instruction else self._wish())

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        page = self._next_page(reply)
        if page is None:
            reward = 0.0 - self.config.invalid_action_penalty
            return Answer(INVALID_NOTE + self._text(), reward, is_invalid=True)
        self.page = page
        if page.kind != "bought":
            return Answer(self._text(), 0.0)
        assert page.item is not None
        found = score(self.goal, page.item, page.chosen.values())
        self._reward = found.reward
        numbers = {name: value for name, value in found._asdict().items() if name != "reward"}
        return Answer(self._text(), found.reward, is_over=True, numbers=numbers)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._reward >= 1.0)

    def _next_page(self, reply: str) -> Page | None:
        """Where the reply leads, None if nowhere."""
        action = read_action(reply, self.page.clicks(self.config.items_per_page))
        if action is None:
            return None
        if action.verb == "click":
            return self.page.clicked(action.words)
        if self.page.kind != "start":
            return None
        return Page("results", self.shop.find(action.words[:MAX_QUERY_CHARS], self.config.max_results))

    def _text(self) -> str:
        return (self._wish() if self.config.repeat_instruction else "") + self._page_text()

    def _page_text(self) -> str:
        return text_of(self.page, self.config.items_per_page)

    def _rules(self) -> str:
        return RULES if self.config.instructions else ""

    def _wish(self) -> str:
        return f"Instruction: {self.goal.instruction}\n"
