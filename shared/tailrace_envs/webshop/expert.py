"""Demonstrations of WebShop: the direct way to the goal's product, mixed with random actions."""

from collections.abc import Sequence

from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.webshop.environment import WebShopText
from tailrace_envs.webshop.pages import BACK, BUY, NEXT, PREVIOUS


class WebShopExpert:
    """Expert that searches for attributes and kind, pages to the product, chooses options and buys."""

    def best_replies(self, env: WebShopText) -> Sequence[str]:
        """Next action on the way; a click back to the search if no later result is the product."""
        page, goal = env.page, env.goal
        if page.kind == "start":
            return (f"search[{' '.join((*goal.attributes, goal.product.query))}]",)
        if page.kind == "results":
            return (f"click[{self._on_results(env)}]",)
        if page.kind == "detail" or page.item != goal.product:
            return (f"click[{PREVIOUS}]",)
        clicks = page.clicks(env.config.items_per_page)
        chosen = page.chosen.values()
        missing = [value for value in goal.values if value in clicks and value not in chosen]
        return tuple(f"click[{value}]" for value in missing[:1] or (BUY,))

    def any_replies(self, env: WebShopText) -> Sequence[str]:
        """Every click of the page; on the first page, searches for one word of the instruction."""
        clicks = env.page.clicks(env.config.items_per_page)
        if clicks:
            return tuple(f"click[{name}]" for name in clicks)
        words = (*env.goal.attributes, env.goal.product.query, *env.goal.values)
        return tuple(f"search[{word}]" for word in words)

    def _on_results(self, env: WebShopText) -> str:
        asin = env.goal.product.asin
        clicks = env.page.clicks(env.config.items_per_page)
        if asin in clicks:
            return asin
        is_ahead = env.goal.product in env.page.results[env.page.number * env.config.items_per_page :]
        return NEXT if is_ahead and NEXT in clicks else BACK


demonstrations = demonstrations_of(WebShopText, WebShopExpert(), random_moves=0.2)
