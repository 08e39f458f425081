"""Speculative decoding: how draft tokens are made, and how many of them are judged at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hybrid_jax.config.checks import flags, integers, integers_of, must, one_of, positive, refusal
from hybrid_jax.config.layers import keeps_pages
from hybrid_jax.config.model import ModelConfig
from hybrid_jax.config.other_names import refuses_other_names

LOOK_UPS = ("ngram", "suffix")
# Methods, and where their drafts come from.
METHODS = {
    "ngram": "looked up in prompt and output",
    "suffix": "looked up by the host in prompt and output",
    "mtp": "predicted by the model's own head",
    "draft": "predicted by a second model",
    "exit": "predicted by a head on the model's cut",
}
MAX_DRAFTS = 30  # a window's tokens are the bits of an int32
MAX_MATCH = 64  # tokens that are compared one by one
MAX_NODES = 16  # of a tree, the row's own token among them


@refuses_other_names
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """The next tokens are drafted, and one pass over the weights judges several of them.

    The output does not change, unless `unjudged_above` is given.

    Attributes:
        method: where drafts come from. "ngram": what followed the last few tokens where they stood before, in prompt or
            output. "suffix": the same by longer matches and by how often it followed, worked out on the host; it drafts
            fewer tokens where it is less sure. "mtp": the model's own head for multi-token prediction. "draft": a
            second, smaller model with the same vocabulary. "exit": a head on the output of the model's cut, so a
            draft costs the layers before it.
        model: directory of the second model, for "draft"; None if the weights of both are in memory already.
        num_tokens: draft tokens that one pass judges, at most 30. A pass brings the accepted ones and one token more.
        tree: drafts that branch. For each draft token, in order, the number of the token that it follows: 0 is the
            row's own token, and the drafts count from 1. At most 15 of them; `num_tokens` becomes their number. With
            "ngram", the branches that follow the row's own token come from different matches; with "mtp", "draft" and
            "exit", the most likely tokens follow. None: one draft follows the other.
        ngram_min, ngram_max: how many last tokens must be found again at least, and how many are compared at most,
            which is at most 64. The longest match counts, and of these the latest. "suffix" takes `ngram_min` alone,
            "mtp", "draft" and "exit" take neither.
        shared: "suffix" also looks in the tokens of other requests, the last `shared_tokens` of them.
        unjudged_above: with "exit", a draft that the head finds more likely than this is kept, whatever the whole model
            would say (SwiftKV, arXiv 2410.03960, appendix E, has 0.95). THIS CHANGES THE OUTPUT, as if a smaller model
            wrote some of the tokens. The output then depends on which tokens happen to be drafted, so also on batch and
            cache. Requests with biases, penalties or allowed tokens are judged. None, the default, changes nothing.
        adaptive: nothing is drafted while so few drafts are accepted that plain decoding would be faster.

    Example:
        >>> SpeculationConfig(method="ngram", num_tokens=3).window
        4
    """

    method: str = "ngram"
    model: str | None = None
    num_tokens: int = 4
    tree: tuple[int, ...] | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    shared: bool = False
    shared_tokens: int = 1 << 20
    unjudged_above: float | None = None
    adaptive: bool = True

    @property
    def window(self) -> int:
        """Tokens of a row that one pass feeds at most: the one drawn last, and the drafts after it."""
        return 1 + self.num_tokens

    @property
    def depths(self) -> tuple[int, ...]:
        """For each token of a window, how many tokens of the window it follows."""
        if self.tree is None:
            return tuple(range(self.window))
        found = [0]
        for parent in self.tree:
            found.append(found[parent] + 1)
        return tuple(found)

    @property
    def most_tokens(self) -> int:
        """The most tokens that a window may bring."""
        return 1 + max(self.depths)

    @property
    def ancestors(self) -> tuple[int, ...]:
        """For each token of a window, bits of itself and of the tokens of the window that it follows."""
        found = [1]
        for number, parent in enumerate(self.tree or range(self.num_tokens), start=1):
            found.append(found[parent] | 1 << number)
        return tuple(found)

    @property
    def keeps_history(self) -> bool:
        """Whether the device keeps the tokens of each row."""
        return self.method == "ngram"

    def __post_init__(self) -> None:
        method, _, model = str(self.method).partition(":")
        if method == "draft" and model:
            raise refusal(self, "method", f"'draft', with model={model!r}")
        one_of(self, "method", tuple(METHODS))
        if self.model is not None:
            must(self, "model", self.method == "draft", f"None with method {self.method!r}")
            must(self, "model", isinstance(self.model, str | os.PathLike), "a directory")
            object.__setattr__(self, "model", os.fspath(self.model))
        self._check_tree()
        integers(self, "num_tokens", "ngram_min", "ngram_max", "shared_tokens")
        flags(self, "adaptive", "shared")
        positive(self, "num_tokens", "ngram_min", "shared_tokens")
        must(self, "num_tokens", self.num_tokens <= MAX_DRAFTS, f"at most {MAX_DRAFTS}")
        must(self, "ngram_max", self.ngram_max <= MAX_MATCH, f"at most {MAX_MATCH}")
        good = self.method != "ngram" or self.ngram_min <= self.ngram_max
        must(self, "ngram_max", good, f"at least ngram_min {self.ngram_min}")
        for name, methods in (("ngram_min", LOOK_UPS), ("ngram_max", ("ngram",))):
            good = self.method in methods or getattr(self, name) == getattr(type(self), name)
            must(self, name, good, f"left out with method {self.method!r}")
        good = self.method == "suffix" or not self.shared
        must(self, "shared", good, f"False with method {self.method!r}")
        if self.unjudged_above is not None:
            good = isinstance(self.unjudged_above, float) and 0 < self.unjudged_above < 1
            must(self, "unjudged_above", good, "a float between 0 and 1, or None")
            good = self.method == "exit" and self.tree is None
            must(self, "unjudged_above", good, "None, except with method 'exit' and no tree")

    def _check_tree(self) -> None:
        """Checks the tree, and lets `num_tokens` follow from it."""
        if self.tree is None:
            return
        parents = integers_of(self.tree)
        if parents is None:
            raise refusal(self, "tree", "a tuple of integers, one for each draft token")
        few = 0 < len(parents) < MAX_NODES
        must(self, "tree", few, f"1 to {MAX_NODES - 1} numbers", f"{len(parents)}")
        for number, parent in enumerate(parents, start=1):
            what = f"for draft token {number} the number of a token before it, 0 to {number - 1}"
            must(self, "tree", 0 <= parent < number, what, f"{parent}")
        must(self, "tree", self.method != "suffix", "None with method 'suffix'")
        object.__setattr__(self, "tree", parents)
        object.__setattr__(self, "num_tokens", len(parents))


def drafting_model(model: ModelConfig, speculation: SpeculationConfig | None) -> ModelConfig:
    """The model with the layers that draft for it, and without those that are not asked for.

    Raises:
        ValueError: the layers that are asked for are not there, or no engine can run them.
    """
    method = None if speculation is None else speculation.method
    if method == "mtp":
        if not model.mtp:
            raise ValueError(
                f"SpeculationConfig: method 'mtp' needs a head for multi-token prediction, and this model of family "
                f"{model.family} was read without one; use load_model(mtp=True) if it has one, or method 'ngram'"
            )
        others = [m for layer in model.mtp for m in layer.mixers if not keeps_pages(m)]
        if others:
            raise ValueError(
                f"SpeculationConfig: method 'mtp' needs a head of attention layers, got one with "
                f"{type(others[0]).__name__}; use method 'ngram'"
            )
    if method == "draft" and model.draft is None:
        raise ValueError(
            "SpeculationConfig: method 'draft' needs a second model; give its directory as `model`"
        )
    if method == "exit" and not model.exit_head:
        what = "has no cut" if model.cut is None else f"with cut {model.cut} has none"
        raise ValueError(
            f"SpeculationConfig: method 'exit' needs a head on the output of the model's cut, and this model {what}; "
            "`hybrid-jax distill --exit-head` trains one; or use method 'ngram'"
        )
    return replace(
        model,
        exit_head=method == "exit",
        mtp=model.mtp if method == "mtp" else (),
        draft=model.draft if method == "draft" else None,
    )
