"""Players of WebShop: demonstrations of random valid actions, baselines, and the direct way to a goal.

The demonstrations teach to read the pages and to write actions. A search is for some neighbouring words
of the goal. A click is uniformly one of the page's, but a purchase is as likely as any choice of an
option: a trip that never ends has no reward.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tailrace_envs.baselines import Player, random_player
from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.webshop.environment import WebShopText
from tailrace_envs.webshop.goals import Goal
from tailrace_envs.webshop.pages import BACK, BUY, NEXT, PREVIOUS
from tailrace_envs.webshop.shop import Shop, words_of

MAX_SEARCH_WORDS = 3


class WebShopNovice:
    """Novice that clicks on anything and searches for anything that the goal names."""

    def sensible_replies(self, env: WebShopText) -> Sequence[str]:
        """All that a page offers, the purchase once for each option value."""
        replies, item = self.any_replies(env), env.page.item
        if env.page.kind != "item" or item is None:
            return replies
        num_values = sum(map(len, item.options.values()))
        return (*replies, *[f"click[{BUY}]"] * (num_values - 1))

    def any_replies(self, env: WebShopText) -> Sequence[str]:
        """Every click of the page; on the first page, searches for one to three words of the goal."""
        clicks = env.page.clicks(env.config.items_per_page)
        if clicks:
            return tuple(f"click[{name}]" for name in clicks)
        words = (*env.goal.attributes, env.goal.product.query, *env.goal.values)
        spans = (
            words[start : start + length]
            for length in range(1, MAX_SEARCH_WORDS + 1)
            for start in range(len(words) - length + 1)
        )
        return tuple(f"search[{' '.join(span)}]" for span in spans)


_NOVICE = WebShopNovice()
demonstrations = demonstrations_of(WebShopText, _NOVICE, random_moves=0.0)


def direct_action(env: WebShopText, goal: Goal) -> str:
    """Next action on the way to a goal: search, page to the product, choose the options, buy.

    A click back to the search if no later result is the product.
    """
    page = env.page
    if page.kind == "start":
        return f"search[{' '.join((*goal.attributes, goal.product.query))}]"
    clicks = page.clicks(env.config.items_per_page)
    if page.kind == "results":
        is_ahead = goal.product in page.results[page.number * env.config.items_per_page :]
        shown = goal.product.asin if goal.product.asin in clicks else NEXT
        return f"click[{shown if is_ahead and shown in clicks else BACK}]"
    if page.kind == "detail" or page.item != goal.product:
        return f"click[{PREVIOUS}]"
    missing = set(goal.values).intersection(clicks) - set(page.chosen.values())
    return f"click[{next((one for one in goal.values if one in missing), BUY)}]"


def _first_result(env: WebShopText, random: np.random.Generator) -> str:
    """Searches for the instruction, opens the first result and buys it as it is."""
    if env.page.kind == "start":
        return f"search[{env.goal.instruction}]"
    first = next((one.asin for one in env.page.results), BACK)
    return f"click[{first if env.page.kind == 'results' else BUY}]"


def _nearest_train_goal(env: WebShopText, random: np.random.Generator) -> str:
    """Goes the direct way of the train goal whose instruction shares the most words."""
    return direct_action(env, _nearest(env.shop, env.goal.instruction))


@lru_cache(maxsize=4096)
def _nearest(shop: Shop, instruction: str) -> Goal:
    wanted = set(words_of(instruction))
    return max(
        shop.goals_of("train"), key=lambda known: len(wanted.intersection(words_of(known.instruction)))
    )


def baselines() -> dict[str, Player[WebShopText]]:
    """Returns simple players, by name."""
    return {
        "random": random_player(_NOVICE.any_replies),
        "first result": _first_result,
        "answer of the nearest train goal": _nearest_train_goal,
    }
