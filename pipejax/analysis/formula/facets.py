"""Search of facets: the makespan as the upper envelope of path counts, with a proof.

The epigraph {(theta, z): z >= T(theta)} of the makespan T over a cone of parameters is a cone: T is
the largest of g . theta over all paths, g their counts. Some of its inequalities z >= g . theta
are known; what they cut out has extreme rays (theta, E(theta)). Where T = E on all of them, T <= E
everywhere, for T is convex: the form is exact. Where T is larger, the longest path there is an
inequality more. So the program runs at few points, and each is either a facet or part of the proof.

All numbers are whole. T runs beside a ray, at 2^s theta + d with small random d > 0: there the
longest path is nearly always unique, so that its counts are a facet and no lower-dimensional face.
T(theta) follows: T(theta) <= T(theta + d / 2^s) < T(theta) + 1.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipejax.analysis.formula.cone import Cone, Vectors, Whole, fitting
from pipejax.base.display import short_repr

PER_ROUND = 8  # facets that are added at once: later ones of a round may be cut off by the first
SPREAD = 1 << 10  # of the steps beside rays
FINE = 20  # bits by which the points that prove facets lie beside those steps
ATTEMPTS = 100
SEED = 0

# (points, parameters) -> (points) makespans, (points, parameters) counts of a longest path
Solve = Callable[[Vectors], tuple[Whole, Vectors]]


@short_repr
class Envelope(NamedTuple):
    """Facets of a makespan, all of them or the most prominent.

    Attributes:
      facets: (facets, parameters) counts.
      points: (facets, parameters) where each is the count of a longest path.
      cone: of all (theta.., z) above the facets; its inequalities are those of the domain, z >= 0,
        and the facets in their order.
      lengths: makespan at each ray's theta, by its entries.
      gap: how far the makespan lies above the facets at most, relative to them.
      evaluations: points at which the program ran.
    """

    facets: Vectors
    points: Vectors
    cone: Cone
    lengths: dict[tuple[int, ...], int]
    gap: Fraction | float
    evaluations: int


def find_facets(solve: Solve, domain: Cone, num_parameters: int, most: int) -> Envelope:
    """Find the facets of a makespan over a domain.

    Args:
      solve: runs the program.
      domain: the cone of all (theta.., z >= 0); it may have coordinates between theta and z.
      num_parameters: length of theta.
      most: facets at which the search ends.
    """
    search = _Search(solve, domain, num_parameters)
    while True:
        above = search.rays_below_makespan()
        if not above or (len(search.found) >= most and not search.drop_redundant()):
            gap = above[0][0] if above else Fraction(0)
            return search.envelope(gap)
        search.add([counts for _, counts in above], most)


class _Search:
    """Facets so far, and what is known of the rays above them."""

    def __init__(self, solve: Solve, domain: Cone, num_parameters: int) -> None:
        self.solve, self.cone, self.num_parameters = solve, domain, num_parameters
        self.draw = np.random.default_rng(SEED)
        self.found: dict[tuple[int, ...], tuple[int, ...]] = {}  # counts -> where they were found
        self.lengths: dict[tuple[int, ...], int] = {}
        self.counts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.points: dict[tuple[int, ...], tuple[int, ...]] = {}
        # 2^shift is above every makespan of the steps beside rays, which are shorter than SPREAD
        ones = np.full((1, num_parameters), SPREAD, object)
        self.most = int(solve(ones)[0][0])
        self.shift, self.evaluations = self.most.bit_length() + 1, 1

    def rays_below_makespan(self) -> list[tuple[Fraction | float, tuple[int, ...]]]:
        """Rays whose z is below the makespan: by how much of it, most first, and the counts."""
        self._run([theta for theta in self._thetas() if any(theta)])
        found: dict[tuple[int, ...], Fraction | float] = {}
        for theta, z in zip(self._thetas(), self.cone.rays[:, -1].tolist(), strict=True):
            length = self.lengths.get(theta, 0)
            if length > z:
                gap = Fraction(length - z, z) if z else np.inf
                counts = self.counts[theta]
                found[counts] = max(gap, found.get(counts, 0))
        return sorted(((gap, counts) for counts, gap in found.items()), reverse=True)

    def add(self, above: list[tuple[int, ...]], most: int) -> None:
        """Add the first inequalities, as far as those before leave them something to cut."""
        for counts in above[: min(PER_ROUND, most - len(self.found))]:
            normal = np.zeros(self.cone.rays.shape[1], object)
            normal[: self.num_parameters], normal[-1] = [-count for count in counts], 1
            normal = fitting(normal, max(counts) * self.cone.largest_sum)
            if (self.cone.rays @ normal < 0).any():
                self.cone = self.cone.cut(normal)
                self.found[counts] = self.points[counts]

    def _thetas(self) -> list[tuple[int, ...]]:
        return [*map(tuple, self.cone.rays[:, : self.num_parameters].tolist())]

    def _run(self, thetas: list[tuple[int, ...]]) -> None:
        """Run the program beside the rays that are new."""
        new = [theta for theta in dict.fromkeys(thetas) if theta not in self.lengths]
        if not new:
            return
        beside = self.draw.integers(1, SPREAD, (len(new), self.num_parameters))
        largest = max(map(max, new)) * self.most << self.shift
        points = (fitting(np.array(new, object), largest) << self.shift) + beside
        lengths, counts = self.solve(points)
        self.evaluations += len(new)
        for theta, length, count, point in zip(
            new, lengths.tolist(), map(tuple, counts.tolist()), points.tolist(), strict=True
        ):
            self.lengths[theta] = length >> self.shift
            self.counts[theta] = count
            self.points.setdefault(count, tuple(point))

    def _points_of(self, facets: Vectors) -> Vectors:
        """Points (facets, parameters) where no other counts than those of the facet are longest.

        Where they were found, two longest paths may tie: a second step to the side tells them
        apart, as soon as it falls on the side of the facet.
        """
        found = np.array([self.found[counts] for counts in map(tuple, facets.tolist())], object)
        points, left = found.copy(), np.arange(len(found))
        for _ in range(ATTEMPTS):
            beside = self.draw.integers(1, 1 << FINE, (len(left), self.num_parameters))
            points[left] = (found[left] << FINE) + beside
            self.evaluations += len(left)
            left = left[(self.solve(points[left])[1] != facets[left]).any(axis=1)]
            if not len(left):
                return points
        raise AssertionError(f"no point was found for {len(left)} facets")  # chance below 2**-100

    def drop_redundant(self) -> bool:
        """Drop sums that later ones made redundant, order the others; whether there were any."""
        first, count = len(self.cone.inequalities) - len(self.found), len(self.found)
        order = sorted(
            ((counts, k) for k, counts in enumerate(self.found, first) if self.cone.is_facet(k)),
            reverse=True,
        )
        columns = [*range(first), *(k for _, k in order)]
        self.cone = Cone(
            self.cone.rays, self.cone.inequalities[columns], self.cone.tight[:, columns]
        )
        self.found = {counts: self.found[counts] for counts, _ in order}
        return len(order) < count

    def envelope(self, gap: Fraction | float) -> Envelope:
        """The facets that bound the cone, in falling order of their counts."""
        self.drop_redundant()
        counts = np.array([*self.found], object)
        facets = fitting(counts, int(counts.max()))
        points = self._points_of(facets)
        return Envelope(facets, points, self.cone, self.lengths, gap, self.evaluations)
