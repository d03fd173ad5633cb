"""Search for facets, the linear forms whose maximum is the makespan, with a proof.

The makespan T is the maximum of g . theta over all paths, where theta are the parameters and g is
the counts of a path. So its epigraph {(theta, z): z >= T(theta)} is a cone. The search has some of
the inequalities z >= g . theta; they bound a larger cone, with extreme rays (theta, E(theta)).
The program runs at each of these rays. If T = E at all rays, the form is exact, because T is
convex. If T is larger at a ray, the longest path at this ray gives a new inequality. So every run
of the program gives a facet or a part of the proof.

All numbers are integers. The program runs near a ray, at 2^s theta + d with small random d > 0.
The longest path is nearly always unique there, so its counts are a facet. T(theta) follows from
T(theta) <= T(theta + d / 2^s) < T(theta) + 1.

A cone is described by its inequalities and by its extreme rays. The double description method
(Motzkin, Raiffa, Thompson and Thrall 1953; Fukuda and Prodon 1996) adds an inequality: it removes
the rays beyond the inequality, and adds a ray on each edge that crosses the border.

The region of the parameters in which one facet is the largest is a cone. A pulling triangulation
divides it into simplices, always from the first ray of a face. So neighbours share whole walls.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.precision import float_type, is_traced
from pipejax.engine.lowering.program import Program, run_many_on_host

INT64_LIMIT = 2**62  # larger integers are stored as integers of Python
BLOCK_ENTRIES = 1 << 22  # entries of the table (pairs of rays, rays) in one block
MIN_COMPILED_PRODUCTS = 10**6  # fewer multiplications take NumPy less time than XLA's compilation

Whole = NumpyArray  # integers: int64, or Python's if int64 is too small
Vector = NumpyArray  # (dims)
Vectors = NumpyArray  # (vectors, dims)
Facets = tuple[tuple[float, ...], ...]


@short_repr
class Cone(NamedTuple):
    """A pointed cone of full dimension: all x with inequality . x >= 0 for each inequality."""

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
        # Two rays share an inequality if both are tight on it. They are neighbours if they share
        # at least dims - 2 inequalities, and no third ray is tight on all of them. For example,
        # four rays in three dims are tight on {a, b}, {b, c}, {c, d} and {d, a}. The first two are
        # neighbours, because only they share b.
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
    """Divide each integer vector (vectors, dims) by the greatest common divisor of its entries."""
    if not len(vectors):
        return vectors
    reduced = vectors // np.gcd.reduce(vectors, axis=1)[:, None]
    return exact_integers(reduced, int(np.abs(reduced).max()))


def exact_integers(whole: NumpyArray, bound: int) -> NumpyArray:
    """Convert integers to int64 if results up to `bound` fit, else to Python's integers."""
    return whole.astype(np.int64 if bound < INT64_LIMIT else object)


def rank(vectors: Vectors) -> int:
    """Return the rank of a matrix of integers (vectors, dims)."""
    # Gauss's elimination without fractions (Bareiss 1968): dividing by the previous pivot leaves
    # whole numbers. [2 1], [4 5] -> the row below becomes (2 [4 5] - 4 [2 1]) / 1 = [0 6].
    rows, rank, last_pivot = vectors.astype(object), 0, 1
    for column in range(rows.shape[1]):
        nonzero_rows = rank + np.flatnonzero(rows[rank:, column])
        if not len(nonzero_rows):
            continue
        rows[[rank, nonzero_rows[0]]] = rows[[nonzero_rows[0], rank]]  # swap
        pivot, below = rows[rank], rows[rank + 1 :]
        rows[rank + 1 :] = (below * pivot[column] - below[:, column, None] * pivot) // last_pivot
        last_pivot, rank = pivot[column], rank + 1
    return rank


def regions(cone: Cone, num_facets: int) -> tuple[Vectors, list[Int[NumpyArray, " rays"]]]:
    """Return the domain's rays (rays, dims), and for each facet the indices of its region's rays.

    A facet is a sum such as 6F + 4B. Its region is the part of the domain in which it is the
    largest facet. The cone lies above the facets; its ray (0, .., 0, 1) is no ray of the domain.
    """
    is_above = cone.rays[:, :-1].any(axis=1)
    tight = cone.tight[is_above, len(cone.inequalities) - num_facets :]
    return cone.rays[is_above, :-1], [np.flatnonzero(column) for column in tight.T]


def cells(cone: Cone, num_facets: int) -> list[tuple[int, ...]]:
    """Divide the region of each facet into simplices; return (facet, ray, ray, ..) for each."""
    # A simplex is a cone with as many extreme rays as dimensions.
    rays, rays_by_facet = regions(cone, num_facets)
    is_above = cone.rays[:, :-1].any(axis=1)
    # A face is stored as the set of its rays, in bits: 0b1010 has rays 1 and 3. The border of an
    # inequality is a face.
    borders = {_bits(np.flatnonzero(column)) for column in cone.tight[is_above].T} - {0}

    @functools.cache
    def simplices(face: int, dims: int) -> list[tuple[int, ...]]:
        """Divide a face: join its first ray with the simplices of each wall without this ray."""
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
    # Python's numbers are added in float64, arrays of float32 in float32, as for makespans.
    shape = np.broadcast_shapes(*(np.shape(value) for value in values))
    if is_traced(*values) or math.prod(shape) * len(facets) >= MIN_COMPILED_PRODUCTS:
        from pipejax.analysis.formula import compiled_sums  # imports JAX, for many numbers only

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


FACETS_PER_ROUND = 8  # facets added at once; the first may make later ones redundant
MAX_OFFSET = 1 << 10  # largest offset d of a point from a ray
OFFSET_BITS = 20  # bits of the offset of a point that proves a facet
ATTEMPTS = 100  # trials to find a point that proves a facet
SEED = 0
RUNS_PER_CALL = 2048  # runs of a program at once, so that finish times stay in the cache

# (points, parameters) -> (points) makespans, (points, parameters) counts of a longest path
Solve = Callable[[Vectors], tuple[Whole, Vectors]]


@short_repr
class Envelope(NamedTuple):
    """Facets (linear forms) whose maximum is a makespan up to a gap, with the proof."""

    facets: Vectors  # (facets, parameters) counts
    points: Vectors  # (facets, parameters) point at which a longest path has the facet's counts
    # cone of all (theta.., z) above the facets; its inequalities are the domain's, then z >= 0,
    # then the facets in the order of `facets`
    cone: Cone
    lengths: dict[tuple[int, ...], int]  # {theta of a ray: makespan}
    gap: Fraction  # upper bound on 1 - facets / makespan
    evaluations: int  # points at which the program ran


def find_facets(solve: Solve, domain: Cone, num_parameters: int, max_facets: int) -> Envelope:
    """Find a makespan as the maximum of sums such as 6F + 4B (facets), with the proof."""
    # `domain` is the cone of (theta, z), theta in the box. With more than `max_facets` facets the
    # result has a gap above 0: the largest relative error of the maximum.
    # At a ray where all facets are below the makespan, the longest path is a new facet.
    search = _Search(solve, domain, num_parameters)
    while violations := search.rays_below_makespan():  # (gap, counts of a path), largest gap first
        if len(search.facets) >= max_facets and not search.drop_redundant():
            largest_gap, _ = violations[0]
            return search.envelope(largest_gap)
        search.add([counts for _, counts in violations], max_facets)
    return search.envelope(gap=Fraction(0))


class _Search:
    """State of the search: the present facets, and the makespans at the rays of their cone."""

    def __init__(self, solve: Solve, domain: Cone, num_parameters: int) -> None:
        self.solve, self.cone, self.num_parameters = solve, domain, num_parameters
        self.draw = np.random.default_rng(SEED)
        # counts of a facet -> a point at which a longest path has these counts
        self.facets: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.points: dict[tuple[int, ...], tuple[int, ...]] = {}  # counts of any path -> such point
        self.lengths: dict[tuple[int, ...], int] = {}  # theta -> makespan
        self.counts: dict[tuple[int, ...], tuple[int, ...]] = {}  # theta -> counts of a path
        # 2^shift is above every makespan of the offsets near rays
        largest_offsets = np.full((1, num_parameters), MAX_OFFSET, object)
        (length,), _ = solve(largest_offsets)
        self.max_offset_length = int(length)
        self.shift, self.evaluations = self.max_offset_length.bit_length() + 1, 1

    def rays_below_makespan(self) -> list[tuple[Fraction, tuple[int, ...]]]:
        """Return (relative gap, counts of a longest path) of rays, the largest gap first."""
        # At a ray (theta, z), the closed form has the value z, but a path may be longer.
        self._run([theta for theta in self._thetas() if any(theta)])
        gaps: dict[tuple[int, ...], Fraction] = {}
        for theta, z in zip(self._thetas(), self.cone.rays[:, -1].tolist(), strict=True):
            length = self.lengths.get(theta, 0)
            if length > z:
                gap = 1 - Fraction(z, length)
                counts = self.counts[theta]
                gaps[counts] = max(gap, gaps.get(counts, gap))
        return sorted(((gap, counts) for counts, gap in gaps.items()), reverse=True)

    def add(self, path_counts: list[tuple[int, ...]], max_facets: int) -> None:
        """Add a facet for each path's counts: cut the cone by `z >= counts . theta`."""
        # A ray of the cone is (theta, z): parameters, and a lower bound of the makespan at theta.
        for counts in path_counts[: min(FACETS_PER_ROUND, max_facets - len(self.facets))]:
            normal = np.zeros(self.cone.rays.shape[1], object)
            normal[: self.num_parameters], normal[-1] = [-count for count in counts], 1
            normal = exact_integers(normal, max(counts) * self.cone.largest_sum)
            if (self.cone.rays @ normal < 0).any():
                self.cone = self.cone.cut(normal)
                self.facets[counts] = self.points[counts]

    def _thetas(self) -> list[tuple[int, ...]]:
        return [*map(tuple, self.cone.rays[:, : self.num_parameters].tolist())]

    def _run(self, thetas: list[tuple[int, ...]]) -> None:
        """Set `lengths` and `counts` at new thetas: makespan and counts of a longest path."""
        # The program runs near theta, where the longest path is unique. With shift 10, theta (1, 2)
        # runs at (1024 + d1, 2048 + d2). If the makespan is 5000, that at theta is 5000 >> 10 = 4.
        new_thetas = [theta for theta in dict.fromkeys(thetas) if theta not in self.lengths]
        if not new_thetas:
            return
        offsets = self.draw.integers(1, MAX_OFFSET, (len(new_thetas), self.num_parameters))
        largest = max(map(max, new_thetas)) * self.max_offset_length << self.shift
        points = (exact_integers(np.array(new_thetas, object), largest) << self.shift) + offsets
        lengths, counts = (result.tolist() for result in self.solve(points))
        self.evaluations += len(new_thetas)
        for theta, length, path_counts, point in zip(
            new_thetas, lengths, map(tuple, counts), points.tolist(), strict=True
        ):
            self.lengths[theta] = length >> self.shift
            self.counts[theta] = path_counts
            self.points.setdefault(path_counts, tuple(point))

    def _facet_points(self, facets: Vectors) -> Vectors:
        """Find for each facet a point at which this facet is larger than all others."""
        # Two facets may tie at the first point: draw offsets until this facet is the larger one.
        starts = np.array([self.facets[counts] for counts in map(tuple, facets.tolist())], object)
        points, tied = starts.copy(), np.arange(len(starts))
        for _ in range(ATTEMPTS):
            offsets = self.draw.integers(1, 1 << OFFSET_BITS, (len(tied), self.num_parameters))
            points[tied] = (starts[tied] << OFFSET_BITS) + offsets
            self.evaluations += len(tied)
            _, counts = self.solve(points[tied])
            tied = tied[(counts != facets[tied]).any(axis=1)]
            if not len(tied):
                return points
        raise AssertionError(f"no point was found for {len(tied)} facets")  # chance below 2**-100

    def drop_redundant(self) -> bool:
        """Drop facets that are nowhere the largest; return whether there were any."""
        # the cone has the inequalities of the domain, then one for each sum in `self.facets`
        cone, num_sums = self.cone, len(self.facets)
        num_domain = len(cone.inequalities) - num_sums
        numbered = enumerate(self.facets, num_domain)
        order = sorted(((counts, k) for k, counts in numbered if cone.is_facet(k)), reverse=True)
        selected = [*range(num_domain), *(k for _, k in order)]
        self.cone = Cone(cone.rays, cone.inequalities[selected], cone.tight[:, selected])
        self.facets = {counts: self.facets[counts] for counts, _ in order}
        return len(order) < num_sums

    def envelope(self, gap: Fraction) -> Envelope:
        """Return the facets found so far, largest counts first, with the points that prove them."""
        self.drop_redundant()  # and sorts them
        if not self.facets:  # a run without any time is one facet of zeros
            self.facets = {(0,) * self.num_parameters: (1,) * self.num_parameters}
        counts = np.array([*self.facets], object)
        facets = exact_integers(counts, int(counts.max()))
        points = self._facet_points(facets)
        return Envelope(facets, points, self.cone, self.lengths, gap, self.evaluations)


def run_points(program: Program, weights: Vectors, points: Vectors) -> tuple[Whole, Vectors]:
    """Return the makespans (points), and a longest path's counts (points, parameters)."""
    runs = [
        run_many_on_host(program, weights @ points[k : k + RUNS_PER_CALL].T)
        for k in range(0, len(points), RUNS_PER_CALL)
    ]
    lengths, counts = zip(*runs, strict=True)
    cost_counts = np.concatenate(counts, axis=1).T  # (points, costs)
    largest = int(weights.max(initial=0)) * int(cost_counts.sum(axis=1).max())
    parameter_counts = exact_integers(cost_counts, largest) @ exact_integers(weights, largest)
    return np.concatenate(lengths), parameter_counts
