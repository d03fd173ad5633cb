"""Made-up results of the comparison with OptPipe, small enough to know by heart."""

import numpy as np
import xarray as xr

from sweeps.optpipe.cases import (
    METHODS,
    NO_LINK,
    OPTIMA,
    OPTIMUM_INTERLEAVED,
    OWN,
    SHARED,
    WHOLE,
    Pipe,
    Setting,
)
from sweeps.optpipe.grid import dataset, with_bounds
from sweeps.optpipe.published import rows
from sweeps.optpipe.quality import quality
from sweeps.optpipe.refinement import POLICIES, News, job_times

PIPES = (Pipe("1.5B", 4, 24), Pipe("14.6B", 16, 48))
LIMITS = (0.5, 1.0, 2.0)
LINKS = (NO_LINK, 1.0, 0.5)
NEEDS = {"1f1b": 1.0, "1f1b, interleaved": 1.5, "zb-1p": 1.0, "zb-2p": 2.0}  # peaks of 1F1B
NEEDS |= dict.fromkeys(("pipe-offload", WHOLE, "pipe-offload, interleaved", "ada-offload"), 0.5)
IDLE = {"1f1b": 1.0, "1f1b, interleaved": 0.5, "zb-1p": 0.6, "zb-2p": 0.45, "pipe-offload": 1.0}
IDLE |= {WHOLE: 1.2, "pipe-offload, interleaved": 0.9, "ada-offload": 0.5}  # in times of the work
LAST = 2.0  # s, until the best schedule is there


def record(setting, idle, needs):
    fits = needs <= setting.limit
    makespan = setting.work * (1 + idle) if fits else np.nan
    result = {"makespan": makespan, "out_of_memory": not fits, "offloaded": 0}
    return result | {"peak": needs * setting.pipe.workers}


def solved(setting, idle, bound):
    """A solve; its schedule fits. One second earlier there was one that takes twice as long."""
    result = record(setting, idle, setting.limit)
    return {
        **result,
        "status": "optimal" if idle <= bound else "feasible",
        "source": "search",
        "lower_bound": setting.work * (1 + bound),
        "seconds": 8.0,
        "news": [(LAST - 1, 2 * result["makespan"]), (LAST, result["makespan"])],
    }


def results(idle, bound):
    """All problems of the small grid; `idle` and `bound` give what a solve finds at a setting."""
    result = {}
    for pipe in PIPES:
        for limit in LIMITS:
            for link, sharing in [(link, OWN) for link in LINKS] + [(1.0, SHARED)]:
                if link == 0.5 and limit == 2.0:
                    continue  # not asked
                setting = Setting(pipe, 8, limit, link, sharing)
                records = {name: record(setting, IDLE[name], NEEDS[name]) for name in METHODS}
                optima = dict.fromkeys(OPTIMA, solved(setting, idle(setting), bound(setting)))
                if link == 0.5 or sharing == SHARED:
                    del optima[OPTIMUM_INTERLEAVED]
                result[setting] = records | optima
    return result


def grid(idle=lambda setting: 0.18 if setting.limit < 2 else 0.05, bound=lambda setting: 0.05):
    result = results(idle, bound)
    data = with_bounds(dataset(result))
    return data.assign(quality(result, data, 8.0)).assign_attrs({"effort of a solve": 8.0})


def published(better=0.0):
    asked = list(rows())
    ours = [row.published - better for row in asked]
    columns = {"published": [row.published for row in asked], "ours": ours}
    columns |= {"bound": np.zeros(len(asked)), "status": ["feasible"] * len(asked)}
    columns |= {"source": ["zb-1p"] * len(asked)}
    data = {name: ("row", values) for name, values in columns.items()}
    return xr.Dataset(data, coords={"row": [row.words for row in asked]})


NEWS = (
    News(0.1, 2.0, 1.0, "greedy"),
    News(1.0, 1.5, 1.0, "ada-offload"),
    News(4.0, 1.2, 1.0, "search"),
    News(9.0, 1.1, 1.0, "neighbourhoods"),
)


def refinement(news=(NEWS, NEWS[:2]), steps=(1, 10, 1000)):
    """Two cases: one that a search makes better, one that it does not."""
    times = [job_times(solutions, 20.0, steps) for solutions in news]
    flat = [solution for solutions in news for solution in solutions]
    cases = ["1.5B, P=8, M=16, limit 0.5, no host link", "6.2B, P=8, M=16, limit 1, offload in 2 F"]
    names = ("seconds", "makespan", "lower_bound", "source")
    values = {name: ("news", [getattr(solution, name) for solution in flat]) for name in names}
    values["of_case"] = ("news", [k for k, solutions in enumerate(news) for _ in solutions])
    by_case = {"ended": [20.0, 20.0], "bound": [1.0, 1.0], "work": [0.9, 0.9]}
    by_case |= {"status": ["feasible", "optimal"], "gap": [1 - 1 / 1.1, 0.0]}
    values |= {name: ("case", value) for name, value in by_case.items()}
    by_policy = [[solution[policy] for policy in POLICIES] for solution in times]
    values["time"] = (("case", "policy", "steps"), by_policy)
    return xr.Dataset(values, {"case": cases, "policy": list(POLICIES), "steps": list(steps)})
