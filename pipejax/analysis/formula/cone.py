"""Polyhedral cones in whole numbers: by inequalities and by extreme rays, both at once.

The double description method (Motzkin, Raiffa, Thompson and Thrall 1953; Fukuda and Prodon 1996):
an inequality that is added cuts off some rays, and makes a new one on each edge that it crosses.
Numbers are whole, so that nothing is ever rounded.

On the region of the domain where a facet is the largest, the form is linear. Each region is a cone;
it is cut into simplices, as many rays as dimensions, on which a convex function that is right at
the rays is nowhere too small: the proof is checked on them. Faces that two regions share are cut
alike: always from the first of their rays (a pulling triangulation), so that cells meet wall to
wall.
"""

import functools
import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.precision import float_type, is_traced

LARGEST = 2**62  # beyond it whole numbers are Python's, which have no limit
PAIRS = 1 << 22  # entries of a table of pairs of rays that is looked at at once
WORTH_COMPILING = 10**6  # multiplications below which NumPy has the answer before XLA has begun

# whole numbers: NumpyArray of int64, or of Python's where these are too small
Whole = NumpyArray
Vector = NumpyArray  # (dims)
Vectors = NumpyArray  # (some, dims)
Facets = tuple[tuple[float, ...], ...]


@short_repr
class Cone(NamedTuple):
    """A pointed cone of full dimension: all x with inequality . x >= 0."""

    rays: Vectors  # (rays, dims) extreme rays, each with the greatest common divisor 1
    inequalities: Vectors  # (inequalities, dims) normals
    # (rays, inequalities) whether a ray lies on the border
    tight: Bool[NumpyArray, "rays inequalities"]

    @classmethod
    def orthant(cls, dims: int) -> "Cone":
        """All x >= 0."""
        unit = np.eye(dims, dtype=np.int64)
        return cls(unit, unit, unit == 0)

    def cut(self, normal: Vector) -> "Cone":
        """Add the inequality normal . x >= 0."""
        value = self.rays @ fitting(normal, int(np.abs(normal).max()) * self.largest_sum)
        keep = value >= 0
        above, below = self._crossed_edges(np.flatnonzero(value > 0), np.flatnonzero(~keep))
        on_border = np.column_stack([self.tight[above] & self.tight[below], np.ones(len(above))])
        crossings = _crossings(self.rays, value, above, below)
        tight = np.column_stack([self.tight[keep], value[keep] == 0])
        return Cone(
            np.concatenate([self.rays[keep], crossings]),
            np.vstack([self.inequalities, normal]),
            np.concatenate([tight, on_border.astype(bool)]),
        )

    def is_facet(self, inequality: int) -> bool:
        """Return whether an inequality bounds the cone by a facet, one dimension less."""
        return rank(self.rays[self.tight[:, inequality]]) == self.rays.shape[1] - 1

    @property
    def largest_sum(self) -> int:
        """Return a bound on the sum of the sizes of any ray's entries."""
        return int(np.abs(self.rays).max()) * self.rays.shape[1]

    def _crossed_edges(
        self, above: Int[NumpyArray, " above"], below: Int[NumpyArray, " below"]
    ) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]:
        """Pairs of neighbours, one above the border and one below it."""
        # Two rays are neighbours where no third lies on all the inequalities that both lie on;
        # these are then at least as many as the dimensions but two.
        tight = self.tight.astype(np.float32)  # counts below 2^24 are exact, and BLAS adds them
        first, second = np.nonzero(tight[above] @ tight[below].T >= self.rays.shape[1] - 2)
        above, below = above[first], below[second]
        are_neighbours = np.zeros(len(above), bool)
        step = max(1, PAIRS // len(self.rays))
        for k in range(0, len(above), step):
            common = tight[above[k : k + step]] * tight[below[k : k + step]]
            on_all = common @ tight.T >= common.sum(axis=1, keepdims=True)
            are_neighbours[k : k + step] = on_all.sum(axis=1) == 2
        return above[are_neighbours], below[are_neighbours]


def _crossings(
    rays: Vectors,
    value: Whole,
    above: Int[NumpyArray, " edges"],
    below: Int[NumpyArray, " edges"],
) -> Vectors:
    """Return the points where edges meet the border: (edges, dims)."""
    bound = 2 * int(np.abs(value).max(initial=0)) * int(np.abs(rays).max())
    value, rays = fitting(value, bound), fitting(rays, bound)
    return primitive(value[above, None] * rays[below] - value[below, None] * rays[above])


def primitive(vectors: Vectors) -> Vectors:
    """Divide whole vectors by the greatest common divisor of their entries."""
    if not len(vectors):
        return vectors
    reduced = vectors // np.gcd.reduce(vectors, axis=1)[:, None]
    return fitting(reduced, int(np.abs(reduced).max()))


def fitting(whole: NumpyArray, bound: int) -> NumpyArray:
    """Whole numbers in a type that holds results of up to a bound."""
    return whole.astype(np.int64 if bound < LARGEST else object)


def rank(vectors: Vectors) -> int:
    """Rank of whole vectors, by elimination in whole numbers (Bareiss 1968)."""
    rows, count, before = vectors.astype(object), 0, 1
    for column in range(rows.shape[1]):
        at = np.flatnonzero(rows[count:, column])
        if not len(at):
            continue
        rows[[count, count + at[0]]] = rows[[count + at[0], count]]
        pivot, below = rows[count], rows[count + 1 :]
        rows[count + 1 :] = (below * pivot[column] - below[:, column, None] * pivot) // before
        before, count = pivot[column], count + 1
        if count == len(rows):
            break
    return count


def regions(cone: Cone, num_facets: int) -> tuple[Vectors, list[Int[NumpyArray, " rays"]]]:
    """Return rays (rays, dims) of the domain, and which of them span the region of each facet.

    The cone is that above the facets; its ray that points upwards alone is left out.
    """
    is_above = cone.rays[:, :-1].any(axis=1)
    tight = cone.tight[is_above, len(cone.inequalities) - num_facets :]
    return cone.rays[is_above, :-1], [np.flatnonzero(column) for column in tight.T]


def cells(cone: Cone, num_facets: int) -> list[tuple[int, ...]]:
    """Cut the region of each facet into simplices: (facet, ray, ray, ...) each."""
    rays, spans = regions(cone, num_facets)
    is_above = cone.rays[:, :-1].any(axis=1)
    # faces are sets of rays, as bits of a whole number; those of inequalities hold all others
    borders = {_bits(np.flatnonzero(column)) for column in cone.tight[is_above].T} - {0}
    cells_by_face: dict[int, list[tuple[int, ...]]] = {}

    def cut(face: int, dims: int) -> list[tuple[int, ...]]:
        if dims == 1:
            return [(face.bit_length() - 1,)]
        if face not in cells_by_face:
            first = face & -face
            smaller = {face & border for border in borders} - {face, 0}
            walls = [s for s in smaller if not any(s != t and s & t == s for t in smaller)]
            cells_by_face[face] = [
                (first.bit_length() - 1, *rest)
                for wall in walls
                if not wall & first
                for rest in cut(wall, dims - 1)
            ]
        return cells_by_face[face]

    return [
        (facet, *cell)
        for facet, span in enumerate(spans)
        for cell in cut(_bits(span), rays.shape[1])
    ]


def _bits(members: Int[NumpyArray, " members"]) -> int:
    return reduce(or_, (1 << member for member in members.tolist()), 0)


def largest_sum(facets: Facets, values: Sequence[Any]) -> Any:
    """Largest of the facets' sums of counts times values, which are numbers or arrays alike."""
    # Numbers are added in float64, arrays of float32 in float32, as makespans are.
    shape = np.broadcast_shapes(*(np.shape(value) for value in values))
    if is_traced(*values) or math.prod(shape) * len(facets) >= WORTH_COMPILING:
        from pipejax.analysis.formula import compiled_sums  # few numbers need no JAX

        return compiled_sums.largest_sum(facets, values)
    dtype = float_type(*values)
    arrays = [np.asarray(value, dtype) for value in values]
    largest = np.asarray(functools.reduce(np.maximum, facet_sums(facets, arrays)), dtype)
    largest = np.broadcast_to(largest, shape)
    return largest.copy() if shape else largest.item()


def facet_sums(facets: Facets, values: Sequence[Any]) -> list[Any]:
    """Sum up facet by facet, in the order of the parameters; skip counts of 0."""
    return [
        sum(count * value for count, value in zip(counts, values, strict=True) if count)
        for counts in facets
    ]
