"""Tornado charts: which parameter moves the step time how far, the largest swing on top."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pipejax.plots import palette, style

COLOURS = (palette.BLUE, palette.ORANGE)
LEAST = 1e-2  # relative swing below which a parameter is left out
NAMES: Mapping[str, str] = {
    "compute.peak": "peak FLOP/s",
    "compute.latency": "latency of an op",
    "memory.bandwidth": "memory bandwidth",
    "memory.latency": "memory latency",
    "node.bandwidth": "bandwidth in a node",
    "node.latency": "latency in a node",
    "network.bandwidth": "network bandwidth",
    "network.latency": "network latency",
    "model.layers": "layers",
    "model.hidden": "hidden size",
    "model.heads": "heads",
    "model.kv_heads": "heads of keys and values",
    "model.ffn_hidden": "width of the MLP",
    "model.vocabulary": "vocabulary",
    "model.sequence": "sequence length",
    "model.element_bytes": "bytes of a number",
    "model.optimizer_bytes": "optimizer bytes",
    "microbatch_size": "microbatch size",
}


def draw_tornado(axes: Axes, step_time: float, swings: Mapping[str, tuple[float, float]]) -> None:
    """Draw one bar per parameter from the step time with less of it to that with more."""

    def width(name: str) -> float:
        return max(abs(value / step_time - 1) for value in swings[name])

    shown = sorted((name for name in swings if width(name) >= LEAST), key=width)
    changes = [[100 * (swings[name][k] / step_time - 1) for name in shown] for k in range(2)]
    for values, others, colour in zip(changes, changes[::-1], COLOURS, strict=True):
        axes.barh(range(len(shown)), values, height=0.7, color=colour)
        for row, (value, other) in enumerate(zip(values, others, strict=True)):
            is_hidden = value * other > 0 and abs(value) <= abs(other)  # behind a longer bar
            if abs(value) >= 1 and not is_hidden:
                axes.annotate(
                    f"{value:+.0f}",
                    (value, row),
                    xytext=(3 if value > 0 else -3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=style.LEAST_FONT,
                    ha="left" if value > 0 else "right",
                )
    axes.axvline(0, color="black", linewidth=0.6)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(shown)), [NAMES.get(name, name) for name in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("change of the step time [%]")


def legend_entries(factors: tuple[float, float]) -> list[Patch]:
    """Return what the two colours mean."""
    return [
        Patch(color=colour, label=f"parameter x {factor:g}")
        for colour, factor in zip(COLOURS, factors, strict=True)
    ]
