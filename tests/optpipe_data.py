"""Made-up results of the comparison with OptPipe, small enough to know by heart."""

import numpy as np
import xarray as xr

from sweeps.optpipe_cases import METHODS, NO_LINK, OPTIMUM, Pipe, Setting
from sweeps.optpipe_grid import _dataset, _known
from sweeps.optpipe_published import rows
from sweeps.optpipe_refinement import POLICIES, News, job_times

PIPES = (Pipe("1.5B", 4, 24), Pipe("14.6B", 16, 48))
LIMITS = (0.5, 1.0, 2.0)
LINKS = (NO_LINK, 1.0, 0.5)
WORK = 10.0  # s, on every worker
NEEDS = {"1f1b": 1.0, "zb-1p": 1.0, "zb-2p": 2.0, "pipe-offload": 0.5, "ada-offload": 0.5}
IDLE = {"1f1b": 0.5, "zb-1p": 0.4, "zb-2p": 0.3, "pipe-offload": 0.5, "ada-offload": 0.3}


def record(setting, name, idle, needs):
    fits = needs <= setting.limit
    return {
        "makespan": setting.work / (1 - idle) if fits else np.nan,
        "out_of_memory": not fits,
        "peak": needs * setting.pipe.workers,
        "offloaded": 0,
    }


def solved(setting, idle, bound=0.05, status="feasible"):
    """A solve; its schedule fits."""
    return {
        **record(setting, OPTIMUM, idle, setting.limit),
        "status": status,
        "source": "search",
        "lower_bound": setting.work / (1 - bound),
        "seconds": 8.0,
        "best_seconds": 2.0,
    }


def results(idle, bound=None):
    """All problems of the small grid; `idle` and `bound` give what a solve finds at a setting."""
    found = {}
    for pipe in PIPES:
        for limit in LIMITS:
            for link in LINKS:
                if link == 0.5 and limit == 2.0:
                    continue  # not asked
                setting = Setting(pipe, 8, limit, link)
                least = 0.05 if bound is None else bound(setting)
                closed = idle(setting) <= least
                found[setting] = {
                    **{name: record(setting, name, IDLE[name], NEEDS[name]) for name in METHODS},
                    OPTIMUM: solved(
                        setting, idle(setting), least, "optimal" if closed else "feasible"
                    ),
                }
    return found


def grid(idle=lambda setting: 0.15 if setting.limit < 2 else 0.05, bound=None):
    return _known(_dataset(results(idle, bound))).assign_attrs({"seconds of a solve": 8.0})


def published(better=0.0):
    """All printed figures, reached or missed by a difference."""
    asked = list(rows())
    ours = [row.published - better for row in asked]
    return xr.Dataset(
        {
            "published": ("row", [row.published for row in asked]),
            "ours": ("row", ours),
            "bound": ("row", np.zeros(len(asked))),
            "status": ("row", ["feasible"] * len(asked)),
            "source": ("row", ["zb-1p"] * len(asked)),
        },
        coords={"row": [row.words for row in asked]},
    )


NEWS = (
    News(0.1, 2.0, 1.0, "greedy"),
    News(1.0, 1.5, 1.0, "ada-offload"),
    News(4.0, 1.2, 1.0, "search"),
    News(9.0, 1.1, 1.0, "period of 1"),
)


def refinement(news=(NEWS, NEWS[:2]), steps=(1, 10, 1000)):
    """Two cases: one that a search makes better, one that it does not."""
    times = [job_times(each, 20.0, steps) for each in news]
    flat = [one for each in news for one in each]
    cases = ["1.5B, P=8, M=16, limit 0.5, no host link", "6.2B, P=8, M=16, limit 1, offload in 2 F"]
    return xr.Dataset(
        {
            **{
                name: ("news", [getattr(one, name) for one in flat])
                for name in ("seconds", "makespan", "lower_bound", "source")
            },
            "of_case": ("news", [k for k, each in enumerate(news) for _ in each]),
            "ended": ("case", [20.0, 20.0]),
            "bound": ("case", [1.0, 1.0]),
            "work": ("case", [0.9, 0.9]),
            "status": ("case", ["feasible", "optimal"]),
            "gap": ("case", [1 - 1 / 1.1, 0.0]),
            "time": (("case", "policy", "steps"), [[one[p] for p in POLICIES] for one in times]),
        },
        coords={"case": cases, "policy": list(POLICIES), "steps": list(steps)},
    )
