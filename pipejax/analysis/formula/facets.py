"""Search for facets, the linear forms whose maximum is the makespan, with a proof.

The epigraph {(theta, z): z >= T(theta)} of the makespan T over a cone of parameters is a cone: T is
the largest of g . theta over all paths, g their counts. Some of its inequalities z >= g . theta
are known; what they cut out has extreme rays (theta, E(theta)). Where T = E on all of them, T <= E
everywhere, for T is convex: the form is exact. Where T is larger, the longest path there is an
inequality more. So the program runs at few points, and each is either a facet or part of the proof.

All numbers are whole. T runs near a ray, at 2^s theta + d with small random d > 0: there the
longest path is nearly always unique, so that its counts are a facet and no lower-dimensional face.
T(theta) follows: T(theta) <= T(theta + d / 2^s) < T(theta) + 1.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipejax.analysis.formula.cone import Cone, Vectors, Whole, exact_integers
from pipejax.base.display import short_repr
from pipejax.engine.lowering.program import Program, run_many_on_host

FACETS_PER_ROUND = 8  # facets added at once; the first may make later ones redundant
MAX_OFFSET = 1 << 10  # of points near rays
OFFSET_BITS = 20  # of the second offset, of points that prove facets
ATTEMPTS = 100  # to find such points
SEED = 0
RUNS_PER_CALL = 2048  # of a program, so that its finish times stay in the cache

# (points, parameters) -> (points) makespans, (points, parameters) counts of a longest path
Solve = Callable[[Vectors], tuple[Whole, Vectors]]


@short_repr
class Envelope(NamedTuple):
    """Facets (linear forms) whose maximum is a makespan, with the proof; some may be left out."""

    facets: Vectors  # (facets, parameters) counts
    points: Vectors  # (facets, parameters) where each is the count of a longest path
    # of all (theta.., z) above the facets; its inequalities are those of the domain, z >= 0,
    # and the facets in their order
    cone: Cone
    lengths: dict[tuple[int, ...], int]  # makespan at each ray's theta, by its entries
    gap: Fraction  # 1 - facets / makespan at most
    evaluations: int  # points at which the program ran


def find_facets(solve: Solve, domain: Cone, num_parameters: int, max_facets: int) -> Envelope:
    """Find a makespan as the maximum of sums such as 6F + 4B (facets), with the proof.

    `domain` is the cone of the parameters' values. If more than `max_facets` facets are needed,
    the result has a gap above 0: the largest relative error of the maximum.
    """
    # Each path has a sum. Where all facets are below the makespan, the longest path gives another.
    search = _Search(solve, domain, num_parameters)
    while violations := search.rays_below_makespan():  # (gap, counts of a path), largest gap first
        if len(search.facets) >= max_facets and not search.drop_redundant():
            largest_gap, _ = violations[0]
            return search.envelope(largest_gap)
        search.add([counts for _, counts in violations], max_facets)
    return search.envelope(gap=Fraction(0))


class _Search:
    """State of the search for facets: facets so far, and makespans at the cone's rays."""

    def __init__(self, solve: Solve, domain: Cone, num_parameters: int) -> None:
        self.solve, self.cone, self.num_parameters = solve, domain, num_parameters
        self.draw = np.random.default_rng(SEED)
        # counts of a facet -> a point where they are those of a longest path
        self.facets: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.points: dict[tuple[int, ...], tuple[int, ...]] = {}  # the same for all paths so far
        self.lengths: dict[tuple[int, ...], int] = {}  # theta -> makespan
        self.counts: dict[tuple[int, ...], tuple[int, ...]] = {}  # theta -> counts of a path
        # 2^shift is above every makespan of the offsets near rays
        largest_offsets = np.full((1, num_parameters), MAX_OFFSET, object)
        (length,), _ = solve(largest_offsets)
        self.max_offset_length = int(length)
        self.shift, self.evaluations = self.max_offset_length.bit_length() + 1, 1

    def rays_below_makespan(self) -> list[tuple[Fraction, tuple[int, ...]]]:
        """List (gap, longest path's counts) at rays where facets miss the makespan, by falling gap.

        The cone's rays are (theta, z): z is the largest facet at the parameter values theta.
        """
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
        # A ray of the cone is (theta, z): values of the parameters and a bound of the makespan.
        for counts in path_counts[: min(FACETS_PER_ROUND, max_facets - len(self.facets))]:
            normal = np.zeros(self.cone.rays.shape[1], object)
            normal[: self.num_parameters], normal[-1] = [-count for count in counts], 1
            normal = exact_integers(normal, max(counts) * self.cone.largest_sum)
            if (self.cone.rays @ normal < 0).any():
                self.cone = self.cone.cut(normal)
                self.facets[counts] = self.points[counts]

    def _thetas(self) -> list[tuple[int, ...]]:
        """Return the parameter values of each ray of the cone."""
        return [*map(tuple, self.cone.rays[:, : self.num_parameters].tolist())]

    def _run(self, thetas: list[tuple[int, ...]]) -> None:
        """Compute the makespan and a longest path's counts at all new parameter values."""
        # It runs near them, where the longest path is unique: theta (1, 2) with shift 10 runs at
        # (1024 + d1, 2048 + d2); the makespan 5000 there, shifted back, is 4 at theta.
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
        """Find for each facet a point at which only this facet's path is longest."""
        # Two longest paths may tie at a facet's point: random offsets are drawn until one falls on
        # the side of the facet.
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
        """Drop redundant facets and sort the other facets; return whether any were dropped."""
        # the cone's inequalities are those of the domain, then one for each sum in `self.facets`
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


def solve(program: Program, weights: Vectors, points: Vectors) -> tuple[Whole, Vectors]:
    """Return each point's makespan, and how often a longest path has each parameter."""
    runs = [
        run_many_on_host(program, weights @ points[k : k + RUNS_PER_CALL].T)
        for k in range(0, len(points), RUNS_PER_CALL)
    ]
    lengths, counts = zip(*runs, strict=True)
    cost_counts = np.concatenate(counts, axis=1).T  # (points, costs)
    largest = int(weights.max(initial=0)) * int(cost_counts.sum(axis=1).max())
    parameter_counts = exact_integers(cost_counts, largest) @ exact_integers(weights, largest)
    return np.concatenate(lengths), parameter_counts
