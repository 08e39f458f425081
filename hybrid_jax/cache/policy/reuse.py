"""How likely a resume point is to be used again, by what it is and how long it has waited: learned while serving.

Points are put into classes (see `points`). Per class a life table is kept over age: how many points of that age were
used again, lived on, or could no longer be. Ages are on a clock that runs with the workload, in bins that widen
geometrically. The result is an index per class and age: the most uses per unit of time that keeping the point can
bring from now on, if one gives up at the best moment (the Gittins index of a stopping problem; Gittins 1979). Sorting
by it protects a point that is about to be used again, and lets go of one that would have been used by now.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

AGE_RATIO = 2.0  # of neighbouring bins
MAX_AGE = 200_000
PRIOR_HAZARD = 0.2  # per bin, before anything was seen
PRIOR_WEIGHT = 24.0  # observations that a parent's hazard counts for
DECAY = 0.996  # of all counts, at every update
MAX_HAZARD = 0.98
STEPS = 2  # parts of a bin between whose indices is interpolated

USED, LIVED, LOST = range(3)


def age_edges() -> np.ndarray:
    """Lower bounds of the age bins: 1, 2, 3, ... widening by AGE_RATIO."""
    edges = [1]
    while edges[-1] < MAX_AGE:
        edges.append(max(edges[-1] + 1, int(edges[-1] * AGE_RATIO)))
    return np.array(edges, np.float64)


class LifeTables:
    """Life tables of classes, each of which shrinks towards a parent; class 0 is all points.

    Attributes:
        edges: lower bounds of the bins, and the end of the last one: float64[num_bins + 1].
        steps: ages at which the index changes: lower bounds of STEPS equal parts of every bin.
        index: float64[classes, num_bins * STEPS] uses per unit of time, as of the last `update`.
    """

    def __init__(self) -> None:
        self.edges = age_edges()
        self.num_bins = len(self.edges) - 1
        self._widths = np.diff(self.edges)
        self._lower = self.edges.tolist()
        parts = np.arange(STEPS) / STEPS
        self.steps = (self.edges[:-1, None] + self._widths[:, None] * parts).reshape(-1).tolist()
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._priors: list[float] = []
        self._ids: dict[tuple, int] = {}
        self._counts = np.zeros((3, 0, self.num_bins))
        self._noted: list[tuple[int, int, int]] = []  # what, class and bin, not counted yet
        self.index = np.zeros((0, self.num_bins * STEPS))
        self._add((), -1, 1.0)

    def __len__(self) -> int:
        return len(self._parents)

    def class_of(self, features: tuple, prior: float = 1.0) -> int:
        """The class of all points with these features; each prefix of the features is a parent.

        Args:
            features: the most telling first.
            prior: factor on its parent's probability of a use, before anything was seen; for the first feature.
        """
        known = self._ids.get(features)
        if known is None:
            parent = self.class_of(features[:-1], prior)
            known = self._add(features, parent, prior if len(features) == 1 else 1.0)
        return known

    def _add(self, features: tuple, parent: int, prior: float) -> int:
        number = self._ids[features] = len(self._parents)
        self._parents.append(parent)
        self._priors.append(prior)
        self._depths.append(len(features))
        if number == len(self.index):
            grown = max(16, 2 * number)
            self._counts = np.concatenate(
                (self._counts, np.zeros((3, grown - number, self.num_bins))), axis=1
            )
            more = np.zeros((grown - number, self.num_bins * STEPS))
            self.index = np.concatenate((self.index, more))
        self.index[number] = self._indices(self._hazards()[number:])[0]
        return number

    def bin_of(self, age: float) -> int:
        """The bin of an age of at least 1."""
        return min(bisect_right(self._lower, age) - 1, self.num_bins - 1)

    def count(self, number: int, age_bin: int, what: int) -> None:
        """A point of a class was USED in that bin, LIVED through it, or was LOST in it; its parents' too."""
        self._noted.append((what, number, age_bin))

    def counts(self) -> np.ndarray:
        """How many of a class were USED, LIVED and LOST in a bin, older ones fading: float64[3, classes, num_bins]."""
        if self._noted:
            what, number, age_bin = np.array(self._noted).T
            self._noted.clear()
            parents = np.array(self._parents)
            while len(number):
                np.add.at(self._counts, (what, number, age_bin), 1.0)
                number = parents[number]
                known = number >= 0
                what, number, age_bin = what[known], number[known], age_bin[known]
        return self._counts[:, : len(self)]  # a view

    def update(self) -> None:
        """Ages all counts a little and computes every index anew."""
        counts = self.counts()
        counts *= DECAY
        self.index[: len(self)] = self._indices(self._hazards())

    def _hazards(self) -> np.ndarray:
        """Probability of being used in a bin, given that the point came so far: float64[classes, num_bins]."""
        used, lived, lost = self.counts()
        seen = used + lived + 0.5 * lost
        hazards = np.empty((len(self), self.num_bins))
        depths, parents = np.array(self._depths), np.array(self._parents)
        priors = np.array(self._priors)
        for depth in range(depths.max() + 1):
            rows = np.flatnonzero(depths == depth)
            prior = PRIOR_HAZARD if depth == 0 else priors[rows, None] * hazards[parents[rows]]
            hazards[rows] = (used[rows] + PRIOR_WEIGHT * prior) / (seen[rows] + PRIOR_WEIGHT)
        return np.minimum(hazards, MAX_HAZARD)

    def _indices(self, hazards: np.ndarray) -> np.ndarray:
        """Best ratio of expected uses to expected time, over all bins at whose end to give up: float64[classes, steps].

        After its peak an index never rises again: so late there are too few observations to trust a rise.
        """
        hazard = np.ascontiguousarray(hazards.T)  # [num_bins, classes], as everything here
        survival = 1 - hazard
        time = self._widths[:, None] * (1 - 0.5 * hazard)
        # Row k is for those who come to bin k: their share that is still there, their uses and time, the best ratio.
        alive, (uses, spent, index) = np.ones_like(hazard), np.zeros((3, *hazard.shape))
        for last in range(self.num_bins):
            rows = slice(last + 1)
            uses[rows] += alive[rows] * hazard[last]
            spent[rows] += alive[rows] * time[last]
            np.maximum(index[rows], uses[rows] / spent[rows], out=index[rows])
            alive[rows] *= survival[last]
        falling = np.maximum.accumulate(index[::-1])[::-1]
        behind = np.arange(self.num_bins)[:, None] > index.argmax(axis=0)
        index = np.where(behind, falling, index)
        following = np.concatenate((index[1:], index[-1:]))
        parts = (np.arange(STEPS)[:, None] + 0.5) / STEPS
        # [num_bins, STEPS, classes]
        mixed = (1 - parts) * index[:, None] + parts * following[:, None]
        return mixed.reshape(-1, len(hazards)).T
