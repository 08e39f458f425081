"""Reading the prefix tree: how far it knows a prompt, and how far of that a request can skip."""

from __future__ import annotations

import numpy as np

from hybrid_jax.cache.tree.node import Match, Node, shared_len


def look_up(
    root: Node, tokens: np.ndarray, *, grain: int, needs_slots: bool, owner: str = ""
) -> Match:
    """Follows a prompt from the root as far as it is known; changes nothing.

    A model with recurrent layers resumes where a checkpoint stands; a model without resumes at any grain multiple
    whose pages are cached.

    Args:
        root: of the tree.
        tokens: int32[n] the prompt.
        grain: tokens between resume points.
        needs_slots: resuming takes a checkpoint.
        owner: whose own promises do not count as pending.
    """
    limit = len(tokens) - 1  # one token at least is computed, to have logits
    text = tokens.tobytes()
    node, position, cached_len, hit_len = root, 0, 0, 0
    hit, reached, pending = root, root, None
    while position < len(tokens):
        child = node.children.get(tokens.item(position))
        if child is None:
            break
        shared = shared_len(child.tokens, tokens, text, position)
        position += shared
        reached = child
        whole = shared == len(child.tokens)
        if child.cached:
            cached_len = position
            if not needs_slots:
                resume = min(position, limit) // grain * grain
                if resume > hit_len:
                    hit_len, hit = resume, child
            elif whole and child.slot and position <= limit:
                hit_len, hit = position, child
        if not whole:
            break
        if child.promised_by and position <= limit and child.promised_by != {owner}:
            pending = child
        node = child
    if pending is not None and pending.end <= hit_len:
        pending = None
    return Match(position, cached_len, hit_len, len(tokens), hit, reached, pending)


def coverage(root: Node, tokens: np.ndarray, *, needs_slots: bool) -> tuple[int, Node | None]:
    """How many leading tokens have their pages cached, and the node at their end if it is a resume point."""
    node, position, text = root, 0, tokens.tobytes()
    while position < len(tokens):
        child = node.children.get(tokens.item(position))
        if child is None or not child.cached:
            return position, None
        shared = shared_len(child.tokens, tokens, text, position)
        position += shared
        if shared < len(child.tokens):
            stands = position == len(tokens) and not needs_slots
            return position, child if stands else None
        node = child
    return position, node if node.slot or not needs_slots else None
