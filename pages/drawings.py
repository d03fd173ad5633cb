"""Drawings that pages show and that no schedule of the gallery is: link models side by side."""

import io

import pipejax as pj
from pages.gallery import EMPTY_PICTURE

WORKERS, MICROBATCHES = 2, 4
COSTS = pj.Costs(forward=1.0, backward=1.0, latency=0.25, transmit=1.5)
MODELS = ("delay", "queued", "blocking", "rendezvous")
PANEL = 0.95  # height [inch]


def drawings(*, draw: bool) -> dict[str, str | bytes]:
    """Return all drawings by path."""
    return {"drawn/link_models.svg": _link_models() if draw else EMPTY_PICTURE}


def runs() -> dict[str, pj.Evaluation]:
    """The run of the page on link models under each of them."""
    table = pj.schedules.build("gpipe", num_workers=WORKERS, num_microbatches=MICROBATCHES)
    return {model: pj.evaluate(table, COSTS, link=model) for model in MODELS}


def _link_models() -> bytes:
    """Draw the runs under one time axis."""
    # matplotlib takes a second to import
    import matplotlib.pyplot as plt

    from pipejax.plots import style
    from pipejax.plots.timeline import draw_on, legend_entries

    style.use()
    found = runs()
    figure, panels = plt.subplots(
        len(found), figsize=(style.PAGE, PANEL * len(found) + 0.5), sharex=True
    )
    for axes, run in zip(panels, found.values(), strict=True):
        draw_on(axes, run, messages=True)
        axes.set_xlabel("")
        axes.set_title(f"{run.links.model}: {run.makespan:g} s", loc="left")
    panels[-1].set_xlim(0, max(run.makespan for run in found.values()))
    panels[-1].set_xlabel("time [s]")
    entries = legend_entries(run, messages=True)
    figure.legend(handles=entries, loc="outside lower right", ncols=len(entries))
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    plt.close(figure)
    return picture.getvalue()
