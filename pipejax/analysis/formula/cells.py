"""Simplicial cells of a closed form: what its proof is checked on.

On the region of the domain where a facet is the largest, the form is linear. Each region is a cone;
it is cut into simplices, as many rays as dimensions, on which a convex function that is right at
the rays is nowhere too small. Faces that two regions share are cut alike: always from the first of
their rays (a pulling triangulation), so that cells meet wall to wall.
"""

from functools import reduce
from operator import or_

import numpy as np

from pipejax.analysis.formula.cone import Cone, Vectors
from pipejax.base.array_types import Int, NumpyArray


def regions(cone: Cone, num_facets: int) -> tuple[Vectors, list[Int[NumpyArray, " rays"]]]:
    """Return rays (rays, dims) of the domain, and which of them span the region of each facet.

    The cone is that above the facets; its ray that points upwards alone is left out.
    """
    is_above = cone.rays[:, :-1].any(axis=1)
    tight = cone.tight[is_above, len(cone.inequalities) - num_facets :]
    return cone.rays[is_above, :-1], [np.flatnonzero(column) for column in tight.T]


def cells(cone: Cone, num_facets: int) -> list[tuple[int, ...]]:
    """Cut the region of each facet into simplices: (facet, ray, ray, ...) each."""
    rays, of_facet = regions(cone, num_facets)
    is_above = cone.rays[:, :-1].any(axis=1)
    # faces are sets of rays, as bits of a whole number; those of inequalities hold all others
    borders = {_bits(np.flatnonzero(column)) for column in cone.tight[is_above].T} - {0}
    known: dict[int, list[tuple[int, ...]]] = {}

    def cut(face: int, dims: int) -> list[tuple[int, ...]]:
        if dims == 1:
            return [(face.bit_length() - 1,)]
        if face not in known:
            first = face & -face
            smaller = {face & border for border in borders} - {face, 0}
            walls = [s for s in smaller if not any(s != t and s & t == s for t in smaller)]
            known[face] = [
                (first.bit_length() - 1, *rest)
                for wall in walls
                if not wall & first
                for rest in cut(wall, dims - 1)
            ]
        return known[face]

    return [
        (facet, *cell)
        for facet, span in enumerate(of_facet)
        for cell in cut(_bits(span), rays.shape[1])
    ]


def _bits(members: Int[NumpyArray, " members"]) -> int:
    return reduce(or_, (1 << member for member in members.tolist()), 0)
