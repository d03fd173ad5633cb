"""Step time against memory: all plans on one network, and those that no other plan beats."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.kit.cases import LOOK, network_label, plain_numbers
from figures.kit.rules import describe
from pipejax.plots import palette, style
from pipejax.typing import Bool, Float, NumpyArray

BANDWIDTH, LATENCY = 50e9, 20e-6  # the nearest point of the grid is drawn [B/s], [s]
# how markers are filled, by recomputation
FILL: Mapping[str, Any] = {"none": "full", "selective": "left", "full": "none"}
PLAN = ("schedule", "microbatch_size", "recompute")


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw every plan, the front and the capacity of an accelerator."""
    at = data.sel({"network.bandwidth": BANDWIDTH, "network.latency": LATENCY}, method="nearest")
    plans = at[["step_time", "memory_bytes"]].stack(plan=PLAN).dropna("plan")
    time, memory = plans.step_time.values, plans.memory_bytes.values / 1e9
    is_best = front(time, memory)
    figure, axes = plt.subplots(figsize=(style.PAGE, 3.8))
    order = np.flatnonzero(is_best)[np.argsort(memory[is_best])]
    axes.step(
        memory[order], time[order], where="post", color=palette.BLACK, linewidth=0.8, zorder=1
    )
    for k, (name, size, recompute) in enumerate(plans.plan.values):
        look = LOOK[name]
        axes.plot(
            memory[k],
            time[k],
            marker=look["marker"],
            color=look["color"],
            linestyle="",
            fillstyle=FILL[recompute],
            markersize=7 if is_best[k] else 3.5,
        )
        if is_best[k]:
            axes.annotate(
                f"{size}",
                (memory[k], time[k]),
                xytext=(4, 4),
                fontsize=style.LEAST_FONT,
                textcoords="offset points",
            )
    capacity = float(data["memory.capacity"]) / 1e9
    axes.axvline(capacity, color=palette.VERMILION, linestyle="--", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="memory of the fullest accelerator [GB]",
        ylabel="step time [s]",
    )
    plain_numbers(axes.xaxis, (1, 2, 5))
    plain_numbers(axes.yaxis)
    figure.legend(handles=_entries(at, capacity), loc="outside lower center", ncols=4)
    return {"pareto": describe(figure, _caption(at, capacity, len(time), len(order)))}


def front(
    time: Float[NumpyArray, " plans"], memory: Float[NumpyArray, " plans"]
) -> Bool[NumpyArray, " plans"]:
    """Tell which plans no other plan beats: none is as good in both and better in one.

    Args:
      time: (plans) step time.
      memory: (plans) need of the fullest accelerator.

    Returns:
      (plans) whether a plan is on the front; of equal plans all are.
    """
    faster, smaller = time[:, None] < time, memory[:, None] < memory
    is_beaten = (faster & ~smaller.T) | (smaller & ~faster.T)
    return np.logical_not(is_beaten.any(axis=0))


def _caption(at: xr.Dataset, capacity: float, plans: int, best: int) -> str:
    return (
        f"Step time against memory of {plans} plans of {at.title}, minibatch "
        f"{int(at.minibatch)}, on a network of {network_label(at)}. No plan beats the {best} on "
        "the front (large marks, numbers: microbatch size) in both. What is to the right of the "
        f"dashed line does not fit into {capacity:g} GB."
    )


def _entries(at: xr.Dataset, capacity: float) -> list[Line2D]:
    schedules = [Line2D([], [], **{**LOOK[name], "linestyle": ""}) for name in at.schedule.values]
    recompute = [
        Line2D(
            [],
            [],
            color=palette.BLACK,
            marker="o",
            linestyle="",
            fillstyle=FILL[kind],
            label=f"recompute: {kind}",
        )
        for kind in at.recompute.values
    ]
    lines = [
        Line2D([], [], color=palette.BLACK, linewidth=0.8, label="front, with microbatch sizes"),
        Line2D(
            [],
            [],
            color=palette.VERMILION,
            linestyle="--",
            linewidth=0.8,
            label=f"capacity, {capacity:g} GB",
        ),
    ]
    return [*schedules, *recompute, *lines]
