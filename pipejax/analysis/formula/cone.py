"""Polyhedral cones with integer coordinates, described by inequalities and by extreme rays.

The double description method (Motzkin, Raiffa, Thompson and Thrall 1953; Fukuda and Prodon 1996):
an additional inequality cuts off some rays, and makes a new one on each edge that it crosses.

The region of a domain where one facet is the largest is a cone. It is cut into simplices, always
from the first ray of a face (a pulling triangulation), so that neighbours share whole walls.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.precision import float_type, is_traced

INT64_LIMIT = 2**62  # larger whole numbers are Python's, which have no limit
BLOCK_ENTRIES = 1 << 22  # of the table (pairs of rays, rays) that one block fills
MIN_COMPILED_PRODUCTS = 10**6  # fewer multiplications are faster in NumPy than XLA compiles

Whole = NumpyArray  # whole numbers: int64, or Python's if these are too small
Vector = NumpyArray  # (dims)
Vectors = NumpyArray  # (vectors, dims)
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
        """Return the part of the cone where normal . x >= 0; `normal` has shape (dims)."""
        # A ray's height is normal . ray. Rays r1, r2, r3 of heights 2, 0, -1: r1 and r2 stay, r3
        # goes. If r1 and r3 are neighbours, their edge crosses the border (height 0) at
        # 1 r1 + 2 r3, a new ray. A ray on the border of an inequality is tight on it.
        heights = self.rays @ exact_integers(normal, int(np.abs(normal).max()) * self.largest_sum)
        stays = heights >= 0
        above, below = self._crossed_edges(np.flatnonzero(heights > 0), np.flatnonzero(~stays))
        bound = 2 * int(np.abs(heights).max(initial=0)) * int(np.abs(self.rays).max())
        height, rays = exact_integers(heights, bound), exact_integers(self.rays, bound)
        crossings = height[above, None] * rays[below] - height[below, None] * rays[above]
        old_tight = np.column_stack([self.tight[stays], heights[stays] == 0])
        is_on_border = np.ones(len(above), bool)
        new_tight = np.column_stack([self.tight[above] & self.tight[below], is_on_border])
        return Cone(
            rays=np.concatenate([self.rays[stays], primitive(crossings)]),
            inequalities=np.vstack([self.inequalities, normal]),
            tight=np.concatenate([old_tight, new_tight]),
        )

    def is_facet(self, inequality: int) -> bool:
        """Return whether an inequality bounds the cone by a facet: a face of dims - 1 dims."""
        return rank(self.rays[self.tight[:, inequality]]) == self.rays.shape[1] - 1

    @property
    def largest_sum(self) -> int:
        """Return an upper bound on the sum of absolute entries of every ray."""
        return int(np.abs(self.rays).max()) * self.rays.shape[1]

    def _crossed_edges(
        self, above: Int[NumpyArray, " above"], below: Int[NumpyArray, " below"]
    ) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]:
        """Return pairs of neighbouring rays, one above the border and one below (index arrays)."""
        # Two rays share an inequality if both are tight on it. They are neighbours if they share at
        # least dims - 2, and no third ray is tight on all of these. Four rays in three dims, tight
        # on {a, b}, {b, c}, {c, d}, {d, a}: the first two are neighbours, as only they share b.
        tight = self.tight.astype(np.float32)  # counts below 2^24 are exact, and BLAS adds them
        with np.errstate(invalid="ignore"):  # BLAS may raise the flag, though no number is invalid
            num_shared = tight[above] @ tight[below].T  # (above, below)
        above_rows, below_columns = np.nonzero(num_shared >= self.rays.shape[1] - 2)
        above, below = above[above_rows], below[below_columns]
        are_neighbours = np.zeros(len(above), bool)
        block_size = max(1, BLOCK_ENTRIES // len(self.rays))
        for start in range(0, len(above), block_size):
            block = slice(start, start + block_size)
            shared = tight[above[block]] * tight[below[block]]  # (pairs, inequalities)
            is_tight_on_shared = shared @ tight.T >= shared.sum(axis=1, keepdims=True)
            are_neighbours[block] = is_tight_on_shared.sum(axis=1) == 2  # the pair alone
        return above[are_neighbours], below[are_neighbours]


def primitive(vectors: Vectors) -> Vectors:
    """Divide integer vectors (vectors, dims) by the greatest common divisor of each."""
    if not len(vectors):
        return vectors
    reduced = vectors // np.gcd.reduce(vectors, axis=1)[:, None]
    return exact_integers(reduced, int(np.abs(reduced).max()))


def exact_integers(whole: NumpyArray, bound: int) -> NumpyArray:
    """Convert integers to a type that holds results up to a bound: int64, or Python's."""
    return whole.astype(np.int64 if bound < INT64_LIMIT else object)


def rank(vectors: Vectors) -> int:
    """Return the rank of a matrix of integers (vectors, dims)."""
    # Gauss's elimination without fractions (Bareiss 1968): dividing by the previous pivot leaves
    # whole numbers. [2 1], [4 5] -> the row below becomes (2 [4 5] - 4 [2 1]) / 1 = [0 6].
    rows, rank, previous_pivot = vectors.astype(object), 0, 1
    for column in range(rows.shape[1]):
        nonzero_rows = rank + np.flatnonzero(rows[rank:, column])
        if not len(nonzero_rows):
            continue
        rows[[rank, nonzero_rows[0]]] = rows[[nonzero_rows[0], rank]]  # swap
        pivot, below = rows[rank], rows[rank + 1 :]
        rows[rank + 1 :] = (
            below * pivot[column] - below[:, column, None] * pivot
        ) // previous_pivot
        previous_pivot, rank = pivot[column], rank + 1
    return rank


def regions(cone: Cone, num_facets: int) -> tuple[Vectors, list[Int[NumpyArray, " rays"]]]:
    """Return the domain's rays (rays, dims), and by facet the indices of its region's rays.

    A facet is a sum such as 6F + 4B, and its region is where it is the largest facet. The cone lies
    above the facets; its upward ray (0, .., 0, 1) is no ray of the domain.
    """
    is_above = cone.rays[:, :-1].any(axis=1)
    tight = cone.tight[is_above, len(cone.inequalities) - num_facets :]
    return cone.rays[is_above, :-1], [np.flatnonzero(column) for column in tight.T]


def cells(cone: Cone, num_facets: int) -> list[tuple[int, ...]]:
    """Divide each facet's region (where it is the largest) into simplices, (facet, ray, ray, ..).

    A simplex is a cone with as many extreme rays as dimensions.
    """
    rays, rays_by_facet = regions(cone, num_facets)
    is_above = cone.rays[:, :-1].any(axis=1)
    # A face is the set of its rays, as bits: 0b1010 has rays 1 and 3. An inequality's face, its
    # border, contains the smaller faces on it.
    borders = {_bits(np.flatnonzero(column)) for column in cone.tight[is_above].T} - {0}

    @functools.cache
    def simplices(face: int, dims: int) -> list[tuple[int, ...]]:
        """Divide a face of `dims` dimensions: join its first ray to each wall that lacks it."""
        if dims == 1:
            return [(face.bit_length() - 1,)]
        apex = face & -face  # the lowest bit: 0b1010 -> 0b0010
        subfaces = {face & border for border in borders} - {face, 0}
        walls = [s for s in subfaces if not any(s != t and s & t == s for t in subfaces)]
        far_walls = [wall for wall in walls if not wall & apex]
        bases = [base for wall in far_walls for base in simplices(wall, dims - 1)]
        return [(apex.bit_length() - 1, *base) for base in bases]

    return [
        (facet, *simplex)
        for facet, facet_rays in enumerate(rays_by_facet)
        for simplex in simplices(_bits(facet_rays), rays.shape[1])
    ]


def _bits(members: Int[NumpyArray, " members"]) -> int:
    return sum(1 << member for member in members.tolist())  # 1 and 3 are 0b1010


def largest_sum(facets: Facets, values: Sequence[Any]) -> Any:
    """Return the largest facet: the maximum over facets of the sum of counts times values."""
    # Numbers are added in float64, arrays of float32 in float32, as makespans are.
    shape = np.broadcast_shapes(*(np.shape(value) for value in values))
    if is_traced(*values) or math.prod(shape) * len(facets) >= MIN_COMPILED_PRODUCTS:
        from pipejax.analysis.formula import compiled_sums  # few numbers need no JAX

        return compiled_sums.largest_sum(facets, values)
    dtype = float_type(*values)
    arrays = [np.asarray(value, dtype) for value in values]
    largest = functools.reduce(np.maximum, facet_sums(facets, arrays))
    largest = np.broadcast_to(np.asarray(largest, dtype), shape)
    return largest.copy() if shape else largest.item()


def facet_sums(facets: Facets, values: Sequence[Any]) -> list[Any]:
    """Return each facet's sum of counts times values; terms with a count of 0 are skipped."""
    return [
        sum(count * value for count, value in zip(counts, values, strict=True) if count)
        for counts in facets
    ]
