"""Colours of the published reward: a text that contains the name of one stands for that colour."""

from __future__ import annotations

_NAMES = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
COLOURS = tuple(_NAMES.split())  # in the published order, on which the first one found depends


def base_colour(value: str) -> str:
    """The first of `COLOURS` that an option value contains, even inside a word; without one the value,
    in lower case. `navy blue` and `light blue` are `blue`, `light purple` and `light red` are `light`.
    """
    value = value.lower()
    return next((colour for colour in COLOURS if colour in value), value)
