"""Of the second checker: closed forms, as docs/certificates.md has them."""

import math
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

from second_checker_run import Run, check_shape, depth, read_links, shape_of
from second_checker_table import TIMED, Table, demand, hold, is_time, is_whole


def check_formula(data, report):
    costs, claim, proof = data["costs"], data["claim"], data["proof"]
    table = Table(data["table"])
    links = read_links(costs["links"], table)
    demand(links["eager_below"] == 0, "eager_below in a closed form")
    parameters = read_parameters(costs["parameters"], table)
    units = [each["unit"] for each in parameters]
    weights = read_weights(parameters, table)
    domain = read_box(costs["box"], parameters)
    size, dims = len(parameters), len(domain[0])
    check_rows(claim["facets"], size, "facets")
    check_rows(proof["points"], size, "points")
    check_rows(proof["rays"], dims, "rays")
    check_rows(proof["cells"], dims + 1, "cells")
    check_shape(claim["gap"], (2,), is_whole, "gap")
    demand(claim["gap"][0] < claim["gap"][1], "gap")
    demand(len(proof["points"]) == len(claim["facets"]), "points")
    check_report(report, parameters, units, claim)
    runs = Runs(table, links, weights)
    check_facets(claim["facets"], proof["points"], runs)
    check_cover(proof["rays"], proof["cells"], domain, len(claim["facets"]))
    check_gap(claim, proof, runs, size)


def read_parameters(parameters, table):
    demand(isinstance(parameters, list) and parameters, "parameters")
    for each in parameters:
        demand(isinstance(each, dict) and set(each) == {"name", "unit", "weights"}, "a parameter")
        demand(isinstance(each["name"], str) and is_whole(each["unit"], 1), "a parameter")
        demand(isinstance(each["weights"], dict), "weights")
        known = {*TIMED, *table.own.kinds, "pair", "latency", "transmit"}
        demand(set(each["weights"]) <= known, "weights")
    demand(len({each["name"] for each in parameters}) == len(parameters), "names of parameters")
    return parameters


def read_weights(parameters, table):
    """Weights of each parameter, 0 where they are not listed."""
    keys = [*TIMED, *table.own.kinds, "latency", "transmit"]
    given = [each["weights"] for each in parameters]
    if any("pair" in weights for weights in given):
        keys.append("pair")
    shapes = {key: shape_of(key, table) for key in keys}
    for key, shape in shapes.items():
        differs = any(depth(weights.get(key)) > len(shape) for weights in given)
        if differs and key != "A" and table.own.of(key) != "stage":
            shapes[key] = *shape, len(table.pipe_of)
    for weights in given:
        for key, value in weights.items():
            check_shape(value, shapes[key], is_whole, key)
    return [{k: w.get(k, zeros(shape)) for k, shape in shapes.items()} for w in given]


def zeros(shape):
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def read_box(box, parameters):
    """Rows of which the product with x is at least 0 in the domain."""
    names = [each["name"] for each in parameters]
    demand(isinstance(box, dict) and set(box) <= set(names), "box")
    for bounds in box.values():
        demand(isinstance(bounds, list) and len(bounds) == 2, "box")
        demand(all(bound is None or is_time(bound) for bound in bounds), "box")
    equal = [names.index(name) for name, (low, high) in box.items() if low == high and low]
    dims = len(names) + bool(box and not equal)
    rows = [[int(k == j) for j in range(dims)] for k in range(dims)]
    for name, bounds in box.items():
        k = names.index(name)
        for bound, sign in zip(bounds, (1, -1), strict=True):
            if bound is None or (equal and k == min(equal)):
                continue
            own = [Fraction(0)] * dims
            own[k] = Fraction(sign * parameters[k]["unit"])
            scale = min(equal) if equal else dims - 1
            times = parameters[scale]["unit"] / Fraction(repr(box[names[scale]][0])) if equal else 1
            own[scale] -= sign * Fraction(repr(bound)) * times
            whole = math.lcm(*(each.denominator for each in own))
            rows.append([int(each * whole) for each in own])
    return rows


def check_rows(rows, width, what):
    demand(isinstance(rows, list), what)
    check_shape(rows, (len(rows), width), is_whole, what)


def check_report(report, parameters, units, claim):
    part, whole = claim["gap"]
    derived = {
        "parameters": [each["name"] for each in parameters],
        "facets": [[c / u for c, u in zip(f, units, strict=True)] for f in claim["facets"]],
        "exact": part == 0,
        "gap": part / whole,
    }
    for key, value in derived.items():
        hold(key not in report or report[key] == value, f"{key} of the report")


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def combined(parts, factors):
    """Sum of nested lists, each times its factor."""
    if isinstance(parts[0], list):
        return [combined(entries, factors) for entries in zip(*parts, strict=True)]
    return dot(parts, factors)


class Runs:
    """Runs in whole numbers; what waits for what is that of all weights together."""

    def __init__(self, table, links, weights):
        ones = [1] * len(weights)
        every = {key: combined([w[key] for w in weights], ones) for key in weights[0]}
        whole = Run(table, links, every)
        alone = [Run(table, links, of_one) for of_one in weights]
        self.nothing = [0] * len(weights)
        self.order = [*whole.end]
        # without any A or U of its own, a run has no such events
        self.lasts = {e: [int(run.lasts.get(e, 0)) for run in alone] for e in self.order}
        self.waits = {e: [] for e in self.order}
        for event, waits in whole.waits.items():
            for other, _ in waits:
                message = whole.messages.get(other)
                is_sent_on = message and event in whole.arrives_at[other]
                lag = [int(run.messages[other].later) for run in alone] if is_sent_on else None
                self.waits[event].append((other, lag or self.nothing))

    def ends(self, point):
        end = {}
        for event in self.order:
            arrivals = [end[other] + dot(lag, point) for other, lag in self.waits[event]]
            end[event] = max(arrivals, default=0) + dot(self.lasts[event], point)
        return end

    def path(self, point):
        """Counts of a longest path."""
        end = self.ends(point)
        event = max(end, key=end.get)
        counts = self.lasts[event]
        while self.waits[event]:
            event, lag = max(self.waits[event], key=lambda wait: end[wait[0]] + dot(wait[1], point))
            more = zip(counts, lag, self.lasts[event], strict=True)
            counts = [sum(each) for each in more]
        return counts


def check_facets(facets, points, runs):
    hold(len({*map(tuple, facets)}) == len(facets), "a facet stands twice")
    for facet, point in zip(facets, points, strict=True):
        hold(runs.path(point) == facet, f"{facet} is no longest path at {point}")


def check_cover(rays, cells, domain, num_facets):
    """The cells cover the domain."""
    products = [[dot(row, ray) for row in domain] for ray in rays]
    hold(all(min(each) >= 0 for each in products), "a ray out of the domain")
    hold(cells, "no cell")
    sides = defaultdict(list)  # of each wall: on which side of it its cells lie
    for facet, *corners in cells:
        hold(facet < num_facets and corners[-1] < len(rays), "a cell of no facet or ray")
        hold(all(a < b for a, b in pairwise(corners)), "rays not in order")
        sign = sign_of_determinant([rays[k] for k in corners])
        hold(sign, "a flat cell")
        for place in range(len(corners)):
            wall = (*corners[:place], *corners[place + 1 :])
            sides[wall].append(sign * (-1) ** place)
    for wall, found in sides.items():
        is_border = not wall or any(
            all(products[ray][row] == 0 for ray in wall) for row in range(len(domain))
        )
        hold((len(found) == 1 and is_border) or sorted(found) == [-1, 1], f"wall {wall}")


def sign_of_determinant(matrix):
    """By elimination in fractions."""
    rows, sign = [[Fraction(value) for value in row] for row in matrix], 1
    for k in range(len(rows)):
        pivot = next((r for r in range(k, len(rows)) if rows[r][k]), None)
        if pivot is None:
            return 0
        if pivot != k:
            rows[k], rows[pivot], sign = rows[pivot], rows[k], -sign
        sign = sign if rows[k][k] > 0 else -sign
        for row in rows[k + 1 :]:
            factor = row[k] / rows[k][k]
            row[:] = [a - factor * b for a, b in zip(row, rows[k], strict=True)]
    return sign


def check_gap(claim, proof, runs, size):
    """On each cell its facet is the largest, and no run is longer by more than the gap."""
    facets, thetas = claim["facets"], [ray[:size] for ray in proof["rays"]]
    forms = [[dot(facet, theta) for facet in facets] for theta in thetas]
    for facet, *corners in proof["cells"]:
        hold(all(forms[k][facet] == max(forms[k]) for k in corners), "another facet is larger")
    hold({cell[0] for cell in proof["cells"]} == set(range(len(facets))), "a facet without a cell")
    part, whole = claim["gap"]
    for theta, form in zip(thetas, forms, strict=True):
        length = max(runs.ends(theta).values())
        hold(length * (whole - part) <= max(form) * whole, f"a longer run at {theta}")
