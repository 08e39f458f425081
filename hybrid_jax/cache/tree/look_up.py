"""What a look-up finds in the prefix tree, and why a prompt did not hit further than it did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hybrid_jax.cache.tree.node import Loss, Node


@dataclass(frozen=True, eq=False)
class Match:
    """What the tree knows about a prompt.

    Attributes:
        match_len: leading tokens found, cached or not.
        cached_len: leading tokens whose pages are cached.
        hit_len: the deepest resume point, a multiple of grain; 0 for none.
        num_tokens: tokens looked up.
        node: the node at or around hit_len; the root when hit_len is 0.
        reached: the node that the match ends in.
        pending: the deepest node above hit_len that another running request has promised to fill.
    """

    match_len: int
    cached_len: int
    hit_len: int
    num_tokens: int
    node: Node
    reached: Node
    pending: Node | None


class Why(Enum):
    """What kept a prompt from resuming further along."""

    COMPLETE = "complete"  # it resumed at the last position it could
    NEVER_SEEN = "never seen"
    NOT_ADMITTED = "not admitted"
    EVICTED = "evicted"
    NO_ROOM = "no room"
    ASKED_FOR = "asked for"  # the request itself needs all of its prompt computed


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """What the tree knew about a prompt when it was seated.

    Attributes:
        match_len, cached_len, hit_len: tokens known, with their pages cached, and skipped.
        possible: most that could have been skipped.
        why: what kept it from more.
        position: where it would have resumed, had that been kept; 0 where nothing was.
        ago: prompts looked up since it was given away.
        pages: its pages were given away as well.
        policy: that chose it.
    """

    match_len: int
    cached_len: int
    hit_len: int
    possible: int
    why: Why
    position: int = 0
    ago: int = 0
    pages: bool = False
    policy: str = ""


def look_up_result(
    match: Match, hit_len: int, *, known_len: int, grain: int, look_ups: int, policy: str
) -> LookUp:
    """What a look-up and what came of it say.

    Args:
        match: of the prompt.
        hit_len: tokens that are skipped in the end.
        known_len: tokens that were known before the prompt came.
        look_ups: prompts looked up so far.
        policy: its name.
    """
    possible = (match.num_tokens - 1) // grain * grain
    reach = min(known_len // grain * grain, possible)
    why, position = Why.NEVER_SEEN, 0
    deepest: Loss | None = None
    if hit_len >= possible:
        why = Why.COMPLETE
    elif hit_len < match.hit_len:
        why, position = Why.NO_ROOM, match.hit_len
    else:
        losses = (loss for node in match.reached.path() for loss in node.losses)
        between = [loss for loss in losses if hit_len < loss.position <= reach]
        deepest = max(between, key=lambda loss: loss.position, default=None)
        if deepest is not None:
            why, position = Why.EVICTED, deepest.position
        elif reach > hit_len:
            why, position = Why.NOT_ADMITTED, reach
    return LookUp(
        match_len=known_len,
        cached_len=match.cached_len,
        hit_len=hit_len,
        possible=possible,
        why=why,
        position=position,
        ago=look_ups - deepest.look_up if deepest else 0,
        pages=deepest is not None and deepest.pages,
        policy=policy,
    )
