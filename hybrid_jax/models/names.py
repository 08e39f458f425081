"""Names of tensors as files spell them: with the prefixes of what a model was wrapped in when it was saved.

A backbone that was saved alone lacks the prefix that it has in the whole model. Training tools and models of text and
images put more in front. What is in front of the embedding is in front of all tensors of the backbone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hybrid_jax.models import Family
from hybrid_jax.models.family import HEAD, MTP

# What tools and outer models put in front of the names of a model.
OUTER = re.compile(
    r"(?:(?:module|base_model|model|language_model|text_model|transformer|backbone|llm|thinker)\.)*"
)
# What they put into names, wherever a part of the model was wrapped.
INNER = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
# Parts beside the backbone, which keep their names.
BESIDE = (HEAD.removesuffix("weight"), MTP, "visual.")

Spelling = dict[str, str]  # from the names of a file to those of `Family.stored`


def spellings(names: Iterable[str], family: Family) -> Iterator[tuple[str, Spelling]]:
    """The ways to read the names of a file: as they are, and then without each prefix that its embedding may have.

    Yields:
        the prefix in front of the backbone, and the name that each name stands for.
    """
    names = list(names)
    yield "", {name: family.canonical(name) for name in names}
    root = family.root
    plain = {name: INNER.sub("", name) for name in names}
    split = {name: _split(text) for name, text in plain.items()}
    # Known words in front of the embedding, in place of the backbone's own; or any others, in front of that.
    known = {
        outer for outer, rest in split.values() if family.canonical(root + rest) == family.embed
    }
    others = {
        text.removesuffix(family.embed)
        for text in plain.values()
        if text.endswith(f".{family.embed}")
        and not OUTER.fullmatch(text.removesuffix(family.embed))
    }

    def without(name: str, prefix: str) -> str:
        outer, rest = split[name]
        if prefix in others:
            return family.canonical(plain[name].removeprefix(prefix))
        if rest.startswith(BESIDE):
            return family.canonical(rest)
        return family.canonical(root + rest if outer == prefix else plain[name])

    for prefix in sorted(known | others):
        yield prefix, {name: without(name, prefix) for name in names}


def _split(name: str) -> tuple[str, str]:
    """The prefixes of a name, and the rest."""
    end = OUTER.match(name).end()  # type: ignore[union-attr]  # it matches nothing too
    return name[:end], name[end:]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name among `names` that is most like another one: with the same end, and of these the most alike."""
    wanted = name.split(".")

    def shared(other: str) -> tuple[int, int]:
        parts = other.split(".")
        pairs = zip(reversed(wanted), reversed(parts), strict=False)
        tail = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(parts)))
        return tail, len(set(wanted) & set(parts)) - abs(len(parts) - len(wanted))

    return max(names, key=shared, default=None)
