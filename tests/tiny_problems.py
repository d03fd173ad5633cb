"""Random tiny problems for the optimiser, and the same ones for the search of every decision."""

from fractions import Fraction

import numpy as np
import optimum

import pipejax as pj

KINDS = (
    *(3 * [("1f1b", 2, 2, {})]),
    *(8 * [("1f1b", 2, 3, {})]),
    *(3 * [("1f1b", 3, 2, {})]),
    ("1f1b", 1, 3, {}),
    ("hanayo", 2, 2, {}),
    ("interleaved-1f1b", 2, 2, {"stages_per_worker": 2}),
    ("chimera", 2, 2, {}),
)
EIGHTHS = 8


def random_problem(rng):
    """Return a table, costs, and options of `optimize`."""
    kind, workers, microbatches, options = KINDS[rng.integers(len(KINDS))]
    table = pj.schedules.build(kind, num_workers=workers, num_microbatches=microbatches, **options)
    stages = table.num_stages

    def times(low=4, high=60):
        numbers = rng.integers(low, high, stages) if rng.random() < 0.7 else rng.integers(low, high)
        return np.broadcast_to(numbers, stages) / EIGHTHS

    costs = {"forward": times(), "input_grad": times(), "weight_grad": times()}
    # a whole backward takes longer than both halves, as long, less, or less than one of them
    both = costs["input_grad"] + costs["weight_grad"]
    share = rng.choice([1.25, 1.0, 0.75, 0.5, 0.25], stages if rng.random() < 0.5 else None)
    costs["backward"] = np.round(both * share * EIGHTHS) / EIGHTHS
    if rng.random() < 0.3:
        costs |= {"update": times(0, 16), "all_reduce": times(0, 30)}
    offload = bool(rng.random() < 0.4)
    if offload:
        costs |= {"offload": times(2, 30), "load": times(2, 30)}
    back_and_forth = rng.integers(0, 16, 2) / EIGHTHS
    name = "transmit" if rng.random() < 0.7 else "latency"
    costs[name] = back_and_forth.reshape(2, 1, 1)
    sizes = rng.choice([1.0, 1.5, 2.0], stages if rng.random() < 0.4 else None)
    sizes = np.broadcast_to(sizes, stages)
    need = np.zeros((table.num_pipes, workers))
    held = (np.arange(table.num_pipes)[:, None], table.placement)
    (np.maximum if offload else np.add).at(need, held, sizes)
    limits = need.max(axis=0) * rng.choice([1.0, 4 / 3, 1.5, 2.0, 7 / 3, 3.0], workers)
    share = float(rng.choice([0.0, 1 / 3, 0.5, 1.0]))
    shared = offload and workers > 1 and rng.random() < 0.3
    links = pj.Links(str(rng.choice(["delay", "queued"])), host_links=((0, 1),) if shared else ())
    memory = {"memory_limit": limits, "sizes": sizes, "weight_share": share}
    return table, pj.Costs(**costs), memory | {"offload": offload, "link": links}


def exact(number):
    """The fraction that a float stands for."""
    return Fraction(float(number)).limit_denominator(48)


def get_pipes(table, costs, options):
    """The same problem for `optimum`."""
    stages, pipes = table.num_stages, table.num_pipes
    entries = lambda values, *shape: np.broadcast_to(np.asarray(values), shape)  # noqa: E731
    by_stage = lambda values: tuple(map(exact, entries(values, stages)))  # noqa: E731

    def by_boundary(values):
        whole = entries(values, 2, pipes, stages - 1)
        return [[[exact(x) for x in row] for row in pipe] for pipe in whole]

    letters = {"F": "forward", "I": "input_grad", "W": "weight_grad", "B": "backward"}
    letters |= {"O": "offload", "L": "load"} if options["offload"] else {}
    lag, transmit = by_boundary(costs.latency), by_boundary(costs.transmit)
    if options["link"].model == "delay":
        lag = by_boundary(np.asarray(costs.latency) + np.asarray(costs.transmit))
        transmit = by_boundary(0.0)
    sizes = by_stage(options["sizes"])
    return optimum.Pipes(
        placement=tuple(map(tuple, table.placement.tolist())),
        microbatch_pipes=tuple(table.pipe_of_microbatch.tolist()),
        times={letter: by_stage(getattr(costs, name)) for letter, name in letters.items()},
        lag=lag,
        transmit=transmit,
        all_reduce=by_stage(costs.all_reduce),
        update=by_stage(costs.update),
        sizes=sizes,
        weight_part=tuple(size * exact(options["weight_share"]) for size in sizes),
        limits=tuple(map(exact, options["memory_limit"])),
        host_links=options["link"].host_links,
    )
