"""Counts a tree from scratch: what the tree's own counters and tables must agree with."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_jax.cache.pools.pages import NodePages
from hybrid_jax.cache.tree.node import Node


@dataclass(kw_only=True)
class Census:
    """What all nodes together hold.

    Attributes:
        nodes, known_nodes, known_tokens: nodes; those without pages, and their tokens.
        pages: the pages of every cached node.
        slots: the node of each checkpoint.
        promises: per owner the promised nodes, by position.
    """

    nodes: int = 0
    known_nodes: int = 0
    known_tokens: int = 0
    pages: list[NodePages] = field(default_factory=list)
    slots: dict[int, Node] = field(default_factory=dict)
    promises: dict[str, dict[int, Node]] = field(default_factory=dict)


def count_nodes(root: Node) -> Census:
    """Walks a tree, checks its links on the way, and counts; raises AssertionError on a broken link."""
    seen = Census()
    for node in root.walk():
        _check_links(node)
        if node is root:
            continue
        seen.nodes += 1
        if node.cached:
            seen.pages.append(node.pages)
        else:
            seen.known_nodes += 1
            seen.known_tokens += len(node.tokens)
        if node.slot:
            seen.slots[node.slot] = node
        for owner in node.promised_by:
            seen.promises.setdefault(owner, {})[node.end] = node
    return seen


def _check_links(node: Node) -> None:
    cached = sum(child.cached for child in node.children.values())
    assert cached == node.num_cached_children, (
        f"radix: node [{node.start}, {node.end}) counts {node.num_cached_children} cached children, "
        f"has {cached}"
    )
    for first, child in node.children.items():
        assert len(child.tokens) > 0, f"radix: an empty edge below {node.end}"
        assert child.parent is node and child.start == node.end, (
            f"radix: child at {child.start} hangs below a node that ends at {node.end}"
        )
        assert first == int(child.tokens[0]), (
            f"radix: child under {first} starts with {child.tokens[0]}"
        )
        assert node.cached or not child.cached, (
            f"radix: cached at {child.end} below known {node.end}"
        )
