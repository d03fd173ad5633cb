"""Search for facets, the linear forms whose maximum is the makespan, with a proof.

The epigraph {(theta, z): z >= T(theta)} of the makespan T over a cone of parameters is a cone: T is
the largest of g . theta over all paths, g their counts. Some of its inequalities z >= g . theta
are known; what they cut out has extreme rays (theta, E(theta)). Where T = E on all of them, T <= E
everywhere, for T is convex: the form is exact. Where T is larger, the longest path there is an
inequality more. So the program runs at few points, and each is either a facet or part of the proof.

All numbers are whole. T runs near a ray, at 2^s theta + d with small random d > 0: there the
longest path is nearly always unique, so that its counts are a facet and no lower-dimensional face.
T(theta) follows: T(theta) <= T(theta + d / 2^s) < T(theta) + 1.

Batches that vary few costs, as sweeps over networks, use a closed form too: one parameter stands
for all constant costs, and one for each kind that varies.
"""

import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.cone import Cone, Vectors, Whole, exact_integers, largest_sum
from pipejax.analysis.formula.parameters import LinearCosts, linear_costs
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.engine.lowering.program import Program, run_many_on_host

FACETS_PER_ROUND = 8  # facets added at once; the first may make later ones redundant
MAX_OFFSET = 1 << 10  # of points near rays
OFFSET_BITS = 20  # of the second offset, of points that prove facets
ATTEMPTS = 100  # to find such points
SEED = 0
RUNS_PER_CALL = 2048  # of a program, so that its finish times stay in the cache
MAX_VARYING = 3  # kinds of costs that differ between configurations
MAX_FACETS = 64  # of the form of a batch
CHECKED = 32  # configurations of each batch that the recurrence runs too
ROUNDING = 32  # tolerated error of a makespan in units in the last place, times sqrt(nodes)
RANGE_STEPS = 1 << 12  # parts of a range to which its ends are rounded outwards
CONSTANT = "constant"

# (points, parameters) -> (points) makespans, (points, parameters) counts of a longest path
Solve = Callable[[Vectors], tuple[Whole, Vectors]]
Batch = Float[NumpyArray, " batch"]


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
    """Find at most `max_facets` facets of a makespan over a domain, with their proof."""
    # The makespan is the largest of sums such as 6F + 4B (facets), one for each path. Where the
    # facets so far are below the makespan, the longest path gives a further facet.
    search = _Search(solve, domain, num_parameters)
    while True:
        missing = search.rays_below_makespan()  # (gap, counts of a path), the largest gap first
        is_full = len(search.facets) >= max_facets
        if not missing:
            return search.envelope(gap=Fraction(0))
        if is_full and not search.drop_redundant():
            largest_gap, _ = missing[0]
            return search.envelope(largest_gap)
        search.add([counts for _, counts in missing], max_facets)


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
    """Return each point's makespan and a longest path's counts, (points, parameters)."""
    runs = [
        run_many_on_host(program, weights @ points[k : k + RUNS_PER_CALL].T)
        for k in range(0, len(points), RUNS_PER_CALL)
    ]
    lengths, counts = zip(*runs, strict=True)
    cost_counts = np.concatenate(counts, axis=1).T  # (points, costs)
    largest = int(weights.max(initial=0)) * int(cost_counts.sum(axis=1).max())
    parameter_counts = exact_integers(cost_counts, largest) @ exact_integers(weights, largest)
    return np.concatenate(lengths), parameter_counts


class _Varying(NamedTuple):
    """A group of costs that have one common value in each configuration of a batch."""

    values: Batch
    weights: dict[str, NumpyArray]  # by field, without the batch axis


def makespans_by_form(program: Program, costs: Costs) -> Batch | None:
    """Compute makespans (batch) [s] by finding and evaluating their closed form."""
    # Costs need a batch axis. None if they vary in too many ways, or for too many facets. A sample
    # runs through the recurrence too; an AssertionError says that it differs.
    leaves = {name: np.asarray(leaf) for name, leaf in vars(costs).items() if leaf is not None}
    constant, varying = _split(leaves)
    if not 0 < len(varying) <= MAX_VARYING:
        return None
    directions = {CONSTANT: unchecked_costs(constant)}
    directions |= {
        f"varying {k}": unchecked_costs({**{name: np.zeros(1) for name in leaves}, **kind.weights})
        for k, kind in enumerate(varying)
    }
    linear = linear_costs(program, directions)
    envelope = find_facets(
        functools.partial(solve, linear.program, linear.weights),
        _domain(linear, varying),
        len(directions),
        MAX_FACETS,
    )
    if envelope.gap != 0:
        return None
    units = linear.units.tolist()
    facets = tuple(
        tuple(float(Fraction(count, unit)) for count, unit in zip(facet, units, strict=True))
        for facet in envelope.facets.tolist()
    )
    dtype = varying[0].values.dtype
    values = np.asarray(
        largest_sum(facets, [np.ones(1, dtype), *(kind.values for kind in varying)])
    )
    _check(program, costs, values)
    return values


def _split(leaves: Mapping[str, NumpyArray]) -> tuple[dict[str, NumpyArray], list[_Varying]]:
    """Return constant costs by field, and varying costs in groups of equal values."""
    # Leaves have shape (batch, ..), or () if they are one number for all.
    constant: dict[str, NumpyArray] = {}
    varying: list[_Varying] = []
    for name, leaf in leaves.items():
        if leaf.ndim == 0:
            constant[name] = leaf.astype(float)
            continue
        columns = leaf.reshape(len(leaf), -1)
        is_constant = (columns == columns[:1]).all(axis=0)
        constant[name] = np.where(is_constant, columns[0], 0).reshape(leaf.shape[1:]).astype(float)
        for column in np.flatnonzero(~is_constant).tolist():
            values = columns[:, column]
            kind = next((kind for kind in varying if np.array_equal(kind.values, values)), None)
            if kind is None:
                if len(varying) > MAX_VARYING:  # too many: the caller gives up
                    return constant, varying
                kind = _Varying(values, {})
                varying.append(kind)
            weights = kind.weights.setdefault(name, np.zeros(leaf.shape[1:]))
            weights.reshape(-1)[column] = 1.0
    return constant, varying


def _domain(linear: LinearCosts, varying: list[_Varying]) -> Cone:
    """Return a cone of (constant, varying.., z) that contains the batch with some margin."""
    cone, (unit, *units) = Cone.orthant(len(varying) + 2), linear.units.tolist()
    for k, (kind, kind_unit) in enumerate(zip(varying, units, strict=True), 1):
        low, high = (Fraction(float(end)) for end in (kind.values.min(), kind.values.max()))
        margin = (high - low) / RANGE_STEPS
        # a power of 2 below the margin keeps the whole numbers small
        step = Fraction(2) ** (margin.numerator.bit_length() - margin.denominator.bit_length() - 1)
        ends = (low // step * step, 1), ((high // step + 1) * step, -1)
        for end, sign in ends:
            row = np.zeros(len(varying) + 2, object)
            # kind_unit * kind >= end * (unit * constant), in both units, times the denominator
            row[k], row[0] = sign * kind_unit * end.denominator, -sign * unit * end.numerator
            cone = cone.cut(row) if end > 0 or sign < 0 else cone
    return cone


def _check(program: Program, costs: Costs, values: Batch) -> None:
    """Check a sample of the makespans against the recurrence."""
    from pipejax.engine.batched.makespans import makespans  # forms are found without JAX

    count = len(values)
    rows = np.random.default_rng(0).choice(count, min(CHECKED, count), replace=False)
    rows = np.union1d(rows, [values.argmin(), values.argmax()])
    sample: Any = {
        name: np.asarray(leaf)[rows] if np.ndim(leaf) else leaf
        for name, leaf in vars(costs).items()
        if leaf is not None
    }
    expected = np.asarray(makespans(program, unchecked_costs(sample), batch_size=len(rows)))
    tolerance = ROUNDING * np.finfo(values.dtype).eps * np.sqrt(program.num_nodes)
    # the relative error, or the value itself where 0 is expected
    error = np.abs(values[rows] / np.where(expected, expected, 1) - (expected != 0)).max()
    if error > tolerance:
        raise AssertionError(f"the closed form of {program.name} is off by {error:g} of a makespan")
