"""Pages of the shop: their state, their text, and the page after a click.

A page is immutable; every action gives the next page. A page does not depend on the goal.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from tailrace_envs.webshop.catalogue import Product

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
SEPARATOR = " / "  # published option values contain bars, but no slashes
DETAILS = ("description", "features", "reviews")

PageKind = Literal["start", "results", "item", "detail", "bought"]


class Page(NamedTuple):
    """State of a shopper. `results` and `number` stay, so that `< prev` leads back to them."""

    kind: PageKind = "start"
    results: tuple[Product, ...] = ()
    number: int = 0  # page of the results, from 0
    item: Product | None = None
    chosen: Mapping[str, str] = {}  # option value by option
    detail: str = ""

    def clicks(self, per_page: int) -> tuple[str, ...]:
        """Distinct names that can be clicked; none on the page with the search box."""
        if self.kind == "results":
            shown = self.shown(per_page)
            has_next = (self.number + 1) * per_page < len(self.results)
            turns = ((NEXT,) if has_next else ()) + ((PREVIOUS,) if self.number else ())
            return _once(BACK, *turns, *(product.asin for product in shown))
        if self.kind == "item":
            assert self.item is not None
            values = (value for values in self.item.options.values() for value in values)
            return _once(BACK, PREVIOUS, *DETAILS, *values, BUY)
        return (BACK, PREVIOUS) if self.kind == "detail" else ()

    def shown(self, per_page: int) -> tuple[Product, ...]:
        """Products on this page of results."""
        return self.results[self.number * per_page : (self.number + 1) * per_page]

    def clicked(self, name: str) -> "Page":
        """Returns the page after a click on a name of `clicks`.

        An option value with the name of a button acts as the button, as published.
        """
        if name == BACK:
            return Page()
        if name == PREVIOUS:
            return self._previous()
        if self.kind == "results":
            return self._in_results(name)
        if name == BUY:
            return self._replace(kind="bought")
        if name in DETAILS:
            return self._replace(kind="detail", detail=name)
        return self._replace(chosen={**self.chosen, self._option_of(name): name})

    def _in_results(self, name: str) -> "Page":
        if name == NEXT:
            return self._replace(number=self.number + 1)
        item = next(product for product in self.results if product.asin == name)
        return self._replace(kind="item", item=item, chosen={})

    def _previous(self) -> "Page":
        if self.kind == "detail":
            return self._replace(kind="item", detail="")
        if self.kind == "item":
            return self._replace(kind="results", item=None, chosen={})
        return self._replace(number=self.number - 1)

    def _option_of(self, value: str) -> str:
        """Option with this value; if several have it, the first that is not chosen yet."""
        assert self.item is not None
        names = [name for name, values in self.item.options.items() if value in values]
        return next((name for name in names if name not in self.chosen), names[0])


def _once(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def text_of(page: Page, per_page: int) -> str:
    """Text for the model: the page and its available actions."""
    if page.kind == "bought":
        return "Thank you for shopping.\n"
    clicks = page.clicks(per_page)
    actions = f"click[{SEPARATOR.join(clicks)}]" if clicks else "search[words]"
    body = _BODIES[page.kind](page, per_page)
    return f"{body}Available actions: {actions}\n"


def _nothing(page: Page, per_page: int) -> str:
    return ""


def _results(page: Page, per_page: int) -> str:
    num_pages = max(1, -(-len(page.results) // per_page))
    lines = [f"Page {page.number + 1} of {num_pages} ({len(page.results)} results)"]
    lines += [f"{one.asin}: {one.title} ${one.price:.2f}" for one in page.shown(per_page)]
    return "\n".join(lines) + "\n"


def _item(page: Page, per_page: int) -> str:
    item = page.item
    assert item is not None
    rating = f" rated {item.rating:.1f}" if item.rating else ""
    lines = [f"{item.asin}: {item.title} ${item.price:.2f}{rating}"]
    for name, values in item.options.items():
        chosen = page.chosen.get(name)
        lines.append(f"{name}: {SEPARATOR.join(values)}" + (f" chosen {chosen}" if chosen else ""))
    return "\n".join(lines) + "\n"


def _detail(page: Page, per_page: int) -> str:
    item = page.item
    assert item is not None
    parts = {
        "description": (item.description,),
        "features": item.features,
        "reviews": item.reviews,
    }[page.detail]
    return f"{page.detail}:\n" + "".join(f"{part}\n" for part in parts if part)


_BODIES = {
    "start": _nothing,
    "results": _results,
    "item": _item,
    "detail": _detail,
}
