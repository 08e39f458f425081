"""Texts and traffic for a simulated cache."""

from __future__ import annotations

import random

import numpy as np

from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.tree.node import Node


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def ask(cache: SimulatedCache, prompt: str, output: str = "") -> int:
    return cache.request(tokens(prompt), tokens(prompt + output))


def text(node: Node) -> str:
    return "".join(chr(token) for part in node.path() for token in part.tokens.tolist())


def traffic(seed: int, count: int) -> list[tuple[str, str]]:
    """Conversations that go on, part, and are asked again; now and then a stranger."""
    rng = random.Random(seed)
    draw = lambda least, most: "".join(rng.choice("abc") for _ in range(rng.randrange(least, most)))
    chats, pairs = [draw(40, 60)], []
    for _ in range(count):
        action, number = rng.random(), rng.randrange(len(chats))
        prompt = chats[number] + draw(1, 30)
        if action < 0.2:
            prompt = chats[number][: rng.randrange(len(chats[number]))] + draw(1, 50)
        elif action < 0.35:
            prompt = draw(1, 80)
        output = draw(0, 20)
        pairs.append((prompt, output))
        if action < 0.9:
            chats.append(prompt + output)
            chats = chats[-12:]
    return pairs
