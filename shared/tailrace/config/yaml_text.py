"""YAML of users: read without letting a few lines grow to gigabytes.

An alias repeats what it names, so nested aliases grow exponentially. The size of a text with all its
aliases written out is computed on the graph of its nodes, before anything is built.
"""

from typing import Any

import yaml

MAX_NODES = 1_000_000


def load_yaml(text: str) -> Any:
    """Returns the content; raises `yaml.YAMLError`, also for aliases that grow beyond all bounds."""
    node = checked_node(text)
    try:
        return None if node is None else yaml.SafeLoader("").construct_document(node)
    except ValueError as error:  # a number of too many digits, a date that is none
        raise yaml.YAMLError(str(error)) from error


def checked_node(text: str) -> yaml.Node | None:
    """Returns the root of the text's nodes; None for an empty text. Raises `yaml.YAMLError`."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _num_nodes(node, {}) > MAX_NODES:
            raise yaml.YAMLError(
                f"aliases make it larger than {MAX_NODES} values: write it without so many of them"
            )
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    return node


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of nodes with aliases written out; nodes that contain themselves are refused."""
    if id(node) in known:
        if known[id(node)] == 0:
            raise yaml.YAMLError("an alias contains itself")
        return known[id(node)]
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_num_nodes(child, known) for child in children)
    return known[id(node)]
