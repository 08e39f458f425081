"""A node of the prefix tree, what a look-up finds among nodes, and how a tree prints itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hybrid_jax.cache.pools.pages import NodePages

LOSSES_KEPT = 8  # per node, the deepest
ENDINGS_KEPT = 8  # per node, the latest
MAX_NODES, MAX_TOKENS = 200, 6  # of the picture of a tree, and of each node in it
ARENA = 0  # number of the tier that rows work in
# Where what the arena lacks comes from, in words: tiers below, and an engine that has computed it for this one.
HOSTS_MEMORY, DISK, OTHER_ENGINE = "the host's memory", "the disk", "another engine"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """An entry that was given away.

    Attributes:
        position: where it stood.
        look_up: how many prompts had been looked up by then.
        pages: its pages went as well.
        taken_back: the request that wrote it took it back, to overwrite it.
    """

    position: int
    look_up: int
    pages: bool
    taken_back: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Ending:
    """How a sequence ended after the last point that was saved of it.

    Attributes:
        saved: that point, in tokens; 0 if nothing was saved.
        tokens: int32[n] its tokens after that.
    """

    saved: int
    tokens: np.ndarray


@dataclass(eq=False, slots=True)
class Held:
    """The pages that one tier has of a node.

    Attributes:
        pages: those that overlap its span, as the tier's `PageStore` lists them.
        num_children: children that the tier has as well.
    """

    pages: NodePages
    num_children: int = 0


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """A span of tokens below its parent; the object keeps its identity as long as its end stands.

    Splits put a new node above, merges keep the lower one, so whoever keeps a node keeps the position `end`.

    Attributes:
        tokens: int32[end - start] token ids of the edge from the parent.
        start, end: absolute positions of the first one, and after the last.
        parent: None for the root, and for a node that left the tree.
        children: by their first token.
        held: pages of the span, by the number of the tier that has them; empty while it is known but not cached.
        slots: handles of the checkpoints at `end`, by the number of the tier that has one.
        pins: holds that keep the node from eviction, in every tier.
        promised_by: owners of running requests that will leave a checkpoint at `end`.
        num_announced: prompts not yet computed that end here.
        num_expected: waiting prompts that end here or below.
        expected_until: turn of the last of them; only while there are any.
        note: what the tree's policy keeps of `end`, if it is a resume point; nothing to the tree.
        losses: checkpoints that stood on its span and were given away, by position.
        endings: how sequences ended that were saved up to a point on its span, or up to the span's end.
        last_use: the tree's clock when the node was last resumed from or filled.
    """

    tokens: np.ndarray
    start: int
    end: int = field(init=False)
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    pins: int = 0
    promised_by: set[str] = field(default_factory=set)
    num_announced: int = 0
    num_expected: int = 0
    expected_until: int = 0
    last_use: int = 0
    note: Any = None
    losses: list[Loss] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens)  # never changes

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"

    @property
    def cached(self) -> bool:
        """Whether some tier has the pages of the span."""
        return bool(self.held)

    def has(self, tier: int) -> bool:
        """Whether a tier has the pages of the span."""
        return tier in self.held

    def has_checkpoint(self, tier: int) -> bool:
        """Whether a checkpoint at the span's end is in a tier."""
        return tier in self.slots

    @property
    def needed(self) -> bool:
        """Somebody relies on a node ending exactly here."""
        return bool(self.pins or self.promised_by or self.num_announced)

    @property
    def above(self) -> Node:
        """The parent of a node that has one."""
        assert self.parent is not None, f"radix: nothing is above the node that ends at {self.end}"
        return self.parent

    def around(self, position: int) -> Node:
        """The node on the path to this one that `position` lies in, its start excluded; the root for 0."""
        node = self
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node

    def lose(self, loss: Loss) -> None:
        """Remembers what the node gave away; of many the deepest."""
        kept = [known for known in self.losses if known.position != loss.position]
        self.losses = sorted([*kept, loss], key=lambda known: known.position)[-LOSSES_KEPT:]

    def remember(self, ending: Ending) -> None:
        """Keeps how a sequence ended; of many the latest."""
        text = ending.tokens.tobytes()
        others = [
            known
            for known in self.endings
            if known.saved != ending.saved or not text.startswith(known.tokens.tobytes())
        ]
        self.endings = [*others, ending][-ENDINGS_KEPT:]

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self) -> np.ndarray:
        """int32[end] the tokens of its path."""
        return np.concatenate([node.tokens for node in self.path()])

    def walk(self) -> Iterator[Node]:
        """This node and everything below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def branch_point(end_node: Node, known_len: int) -> Node | None:
    """The node where an announced prompt leaves what was known before; None where it only goes on from there.

    Args:
        end_node: the node at its end.
        known_len: tokens of it that were known before it was announced.
    """
    node = end_node
    while node.start >= known_len > 0:
        node = node.above
    parts = node.end == known_len and node is not end_node and len(node.children) > 1
    return node if parts else None


def shared_len(edge: np.ndarray, tokens: np.ndarray, text: bytes, position: int) -> int:
    """Leading tokens of an edge that a prompt has from `position` on.

    Args:
        edge: int32[n], contiguous.
        tokens: int32[m] the prompt. text: its bytes: whole edges are compared as such, ten times as fast.
    """
    if text.startswith(edge.data, position * edge.itemsize):
        return len(edge)
    return common_prefix_len(edge, tokens[position:])


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """Leading elements that two integer arrays share."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


# --- what a look-up finds, and why a prompt did not hit further than it did ---------------------------


class Found(NamedTuple):
    """What one tier has of a prompt.

    Attributes:
        cached_len: leading tokens whose pages it has.
        hit_len: its deepest resume point, a multiple of grain; 0 for none.
        node: the node at or around hit_len; the root when hit_len is 0.
    """

    cached_len: int
    hit_len: int
    node: Node


@dataclass(frozen=True, eq=False)
class Match:
    """What the tree knows about a prompt.

    Attributes:
        match_len: leading tokens found, cached or not.
        num_tokens: tokens looked up.
        found: what each tier has of it, by the tier's number.
        reached: the node that the match ends in.
        pending: the deepest node above the arena's hit that another running request has promised to fill.
    """

    match_len: int
    num_tokens: int
    found: tuple[Found, ...]
    reached: Node
    pending: Node | None

    @property
    def cached_len(self) -> int:
        """Leading tokens whose pages are in the arena."""
        return self.found[ARENA].cached_len

    @property
    def hit_len(self) -> int:
        """The deepest resume point in the arena; 0 for none."""
        return self.found[ARENA].hit_len

    @property
    def node(self) -> Node:
        """The node at or around hit_len."""
        return self.found[ARENA].node


class Why(Enum):
    """What kept a prompt from resuming further along."""

    COMPLETE = "complete"  # it resumed at the last position it could
    NEVER_SEEN = "never seen"
    NOT_ADMITTED = "not admitted"
    ENDED = "ended"  # an earlier sequence had more of the prompt, but ended before that was saved
    EVICTED = "evicted"
    TAKEN_BACK = "taken back"  # by the request that wrote it, to overwrite it
    GIVEN_BACK = "given back"  # pages of layers with a window, by a text that went on past them
    NO_ROOM = "no room"
    SLOWER = "slower"  # to copy it from another tier than to compute it
    ASKED_FOR = "asked for"  # the request itself needs the rest of its prompt computed


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """What the tree knew about a prompt when it was seated.

    Attributes:
        match_len, hit_len: tokens known, and skipped.
        loaded: how many of the skipped ones the arena had not, so that they were copied from another tier.
        loaded_from: which tier that was, in words; "" for none.
        slower_from: the tier that had more, where computing was faster than copying from there.
        why: what kept it from more.
        position: where it would have resumed, had that been kept; 0 where nothing was. Of a sequence that ended too
            early, the last point that was saved.
        ago: other prompts looked up since it was given away.
        pages: its pages were given away as well.
        tail: of a sequence that ended too early, its tokens after the last point that was saved.
        policy: of the cache.
    """

    match_len: int
    hit_len: int
    why: Why
    loaded: int = 0
    loaded_from: str = ""
    slower_from: str = ""
    position: int = 0
    ago: int = 0
    pages: bool = False
    tail: int = 0
    policy: str = ""


def look_up_result(
    match: Match,
    hit_len: int,
    *,
    loaded: int = 0,
    loaded_from: str = "",
    slower: Mapping[str, int] = MappingProxyType({}),
    prompt: np.ndarray,
    known_len: int,
    grain: int,
    needs_slots: bool,
    look_ups: int,
    policy: str,
) -> LookUp:
    """What a look-up and what came of it say.

    Args:
        match: of the prompt, or of a part of it if no hit may reach further.
        hit_len: tokens that are skipped in the end. loaded, loaded_from: as in `LookUp`.
        slower: tokens that other tiers had, by their names, and that are computed because that is faster.
        prompt: int32[n] all of it.
        known_len: tokens that were known before the prompt came.
        needs_slots: as in the tree. Without, a prompt may resume wherever there are all pages that are read there.
        look_ups: prompts looked up so far, this one included.
        policy: its name.
    """
    possible = (match.num_tokens - 1) // grain * grain
    path = match.reached.path()
    losses = [loss for node in path for loss in node.losses if loss.position <= match.match_len]
    # What others have left since the prompt came is known as well.
    known_len = max([known_len, match.cached_len, *(loss.position for loss in losses)])
    ending, ended_len = _longest_ending(path, match.match_len, prompt)
    reach = min(max(known_len, ended_len) // grain * grain, possible)
    # Down to here there are pages, if perhaps not those of layers with a window.
    paged = 0 if needs_slots else min(match.cached_len // grain * grain, possible)
    between = [loss for loss in losses if max(hit_len, paged) < loss.position <= reach]
    found = LookUp(
        match_len=max(known_len, ended_len),
        hit_len=hit_len,
        why=Why.NEVER_SEEN,
        loaded=loaded,
        loaded_from=loaded_from,
        policy=policy,
    )
    if hit_len >= possible:
        return replace(found, why=Why.COMPLETE)
    there, tier = max(((length, tier) for tier, length in slower.items()), default=(0, ""))
    if hit_len < there:
        return replace(found, why=Why.SLOWER, position=there, slower_from=tier)
    if hit_len < (deepest := max(tier.hit_len for tier in match.found)):
        return replace(found, why=Why.NO_ROOM, position=deepest)
    if between:
        loss = max(between, key=lambda loss: loss.position)
        why = Why.TAKEN_BACK if loss.taken_back else Why.EVICTED
        ago = look_ups - 1 - loss.look_up
        return replace(found, why=why, position=loss.position, ago=ago, pages=loss.pages)
    if paged > hit_len:
        return replace(found, why=Why.GIVEN_BACK, position=paged)
    if reach > hit_len and (ending is None or known_len // grain * grain > hit_len):
        return replace(found, why=Why.NOT_ADMITTED, position=reach)
    if reach > hit_len and ending is not None:
        return replace(found, why=Why.ENDED, position=ending.saved, tail=len(ending.tokens))
    return found


def _longest_ending(
    path: list[Node], match_len: int, prompt: np.ndarray
) -> tuple[Ending | None, int]:
    """Of the sequences that ended on a path, the one that has most of a prompt, and how many tokens it has."""
    best, best_len = None, 0
    for ending in (ending for node in path for ending in node.endings):
        if ending.saved <= match_len and ending.saved + len(ending.tokens) > best_len:
            length = ending.saved + common_prefix_len(ending.tokens, prompt[ending.saved :])
            if length > best_len:
                best, best_len = ending, length
    return best, best_len


# --- a listing ----------------------------------------------------------------------------------------


class TierLine(NamedTuple):
    """What a tier below the arena has of a node, as a listing shows it.

    Attributes:
        tier: which one, `HOSTS_MEMORY` or `DISK`.
        end: up to which token. The disk knows no nodes and may have less than all of one.
        resumes: whether a checkpoint stands there at that end; on disk, whatever a prompt needs to resume there.
        coming: it is on its way there, and no prompt finds it there yet.
        mark: all that in words.
    """

    tier: str
    end: int
    resumes: bool
    coming: bool
    mark: str


class NodeLine(NamedTuple):
    """A node as a listing shows it.

    Attributes:
        depth: 0 for the children of the root.
        span: where it begins and ends, in tokens.
        text: its first tokens.
        cached: whether its pages are in the arena; if they are in no tier, its tokens are only known.
        resumes: whether a prompt can resume at its end from the arena, because a checkpoint stands there.
        marks: what is cached of it, and who needs it, in words. What has no place stands in the arena.
        below: what the tiers below the arena have of it.
    """

    depth: int
    span: tuple[int, int]
    text: str
    cached: bool
    resumes: bool
    marks: list[str]
    below: tuple[TierLine, ...] = ()

    def __str__(self) -> str:
        start, end = self.span
        return f"{'  ' * self.depth}[{start}, {end}) {self.text}: {', '.join(self.marks)}"


def ids_of(tokens: np.ndarray) -> str:
    """The first tokens of a span, as ids."""
    dots = " ..." if len(tokens) > MAX_TOKENS else ""
    return " ".join(str(token) for token in tokens[:MAX_TOKENS]) + dots


def describe_tree(
    root: Node,
    text_of: Callable[[np.ndarray], str] = ids_of,
    below_of: Callable[[Node], tuple[TierLine, ...]] = lambda _: (),
) -> list[NodeLine]:
    """The nodes of a tree, each after its parent; at most `MAX_NODES`.

    Args:
        root: of the tree. text_of: what is shown of a node's tokens. below_of: what tiers below the arena have of it.
    """
    lines: list[NodeLine] = []
    stack = [(child, 0) for child in reversed(list(root.children.values()))]
    while stack:
        node, depth = stack.pop()
        if len(lines) == MAX_NODES:
            break
        cached, resumes = node.has(ARENA), node.has_checkpoint(ARENA)
        below = below_of(node)
        count = len(node.held[ARENA].pages) if cached else 0
        marks = [f"{count} page{'s' * (count != 1)}"] if cached else []
        marks += [] if cached or any(not line.coming for line in below) else ["known"]
        marks += ["checkpoint"] if resumes else []
        marks += [line.mark for line in below]
        marks += [f"pinned {node.pins}"] if node.pins else []
        marks += [f"promised by {', '.join(sorted(node.promised_by))}"] if node.promised_by else []
        marks += [f"awaited by {node.num_announced}"] if node.num_announced else []
        span, text = (node.start, node.end), text_of(node.tokens)
        lines.append(NodeLine(depth, span, text, cached, resumes, marks, below))
        stack.extend((child, depth + 1) for child in reversed(list(node.children.values())))
    return lines
