"""WebShop as a conversation: the model reads pages and answers `search[words]` or `click[name]`.

The first action in a reply counts. A reply without an action that the page offers gets a note and the
same page. `click[buy now]` ends the episode with the published reward, to the power `reward_exponent`;
earlier steps have no reward.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from tailrace.config import decode_config
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.webshop.config import WebShopConfig
from tailrace_envs.webshop.goals import Goal
from tailrace_envs.webshop.pages import Page, text_of
from tailrace_envs.webshop.scoring import score
from tailrace_envs.webshop.shop import Shop, open_shop

INVALID_NOTE = "Invalid action.\n"
RULES = (
    "You are shopping. Find the product of the instruction, choose its options and buy it. Answer "
    "every page with one of its available actions, search[words] or click[name].\n"
)
MAX_QUERY_CHARS = 1000

_OPENER = re.compile(r"\b(search|click)\s*\[", re.IGNORECASE)
_WORDS = re.compile(r"((?:[^\[\]]|\[[^\[\]]*\])*)\]")  # with brackets in pairs
_UP_TO_A_BRACKET = re.compile(r"([^\]]*)\]")


class Action(NamedTuple):
    """Action on a page. `words`: the normalized words of a search, or the clicked name."""

    verb: Literal["search", "click"]
    words: str


class WebShopText(TextGame):
    """Plays one shopping trip at a time, for the goal that the seed of `reset` selects from the split.

    The reward of a purchase is `scoring.score`; `info["success"]` is 1.0 for a score of 1. The `info`
    of a purchase has the parts of the score. Options are the keys of `WebShopConfig`.
    """

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, WebShopConfig, "env_config")
        super().__init__(self.config.max_turns)
        self.shop: Shop = open_shop(self.config.catalogue)
        self.goal: Goal = self.shop.goal_for_seed(self.config.split, 0)  # an empty split fails here
        self.page = Page()
        self._score = 0.0

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self.goal = self.shop.goal_for_seed(self.config.split, seed)
        self.page = Page()
        self._score = 0.0
        return self._rules() + self._instruction_line() + self._page_text()

    def instructions(self) -> str:
        """See `TextGame`; if pages repeat the instruction, only the rules must stay."""
        return self._rules() + ("" if self.config.repeat_instruction else self._instruction_line())

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
        self._score = found.reward
        numbers = {name: value for name, value in found._asdict().items() if name != "reward"}
        reward = found.reward**self.config.reward_exponent
        return Answer(self._text(), reward, is_over=True, numbers=numbers)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._score >= 1.0)

    def _next_page(self, reply: str) -> Page | None:
        """Page that the reply leads to; None without a valid action."""
        action = read_action(reply, self.page.clicks(self.config.items_per_page))
        if action is None:
            return None
        if action.verb == "click":
            return self.page.clicked(action.words)
        if self.page.kind != "start":
            return None
        words = action.words[:MAX_QUERY_CHARS]
        return Page("results", self.shop.find(words, self.config.max_results, self.config.split))

    def _text(self) -> str:
        return (self._instruction_line() if self.config.repeat_instruction else "") + self._page_text()

    def _page_text(self) -> str:
        return text_of(self.page, self.config.items_per_page)

    def _rules(self) -> str:
        return RULES if self.config.instructions else ""

    def _instruction_line(self) -> str:
        return f"Instruction: {self.goal.instruction}\n"


def read_action(reply: str, names: Sequence[str]) -> Action | None:
    """Returns the first action of a reply: `search[words]` or a click on one of the page's `names`.

    Case and the number of spaces do not matter. Names may contain brackets. Every name can be clicked
    as it is written, also if other names differ from it only in case or spaces, or begin with it: an
    exact name wins, then the longest. None: no action, no words, or a click on another name.
    """
    opener = _OPENER.search(reply, 0, reply.rfind("]") + 1)
    if opener is None:
        return None
    rest = reply[opener.end() :]
    if opener.group(1).lower() == "click":
        name = _clicked(rest, names)
        return None if name is None else Action("click", name)
    found = _WORDS.match(rest) or _UP_TO_A_BRACKET.match(rest)
    words = normalized(found.group(1)) if found else ""
    return Action("search", words) if words else None


def normalized(text: str) -> str:
    """Normalizes a name or words: lower case, single spaces."""
    return " ".join(text.lower().split())


def _clicked(rest: str, names: Sequence[str]) -> str | None:
    """Name at the beginning of `rest`, closed by a bracket."""
    exact = _longest(name for name in names if rest.startswith(f"{name}]"))
    if exact is not None:
        return exact
    written = normalized(rest)
    return _longest(name for name in names if _begins(written, normalized(name)))


def _begins(written: str, name: str) -> bool:
    return written.startswith(name) and written[len(name) :].lstrip().startswith("]")


def _longest(names: Iterable[str]) -> str | None:
    return max(names, key=len, default=None)
