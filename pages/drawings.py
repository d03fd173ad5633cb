"""Drawings that pages show and that no schedule of the gallery is: link models side by side."""

import io

import pipejax as pj
from pages.gallery import EMPTY_PICTURE
from pipejax.schedules.table.links import LINKS

WORKERS, MICROBATCHES = 2, 4
COSTS = pj.Costs(forward=1.0, backward=1.0, latency=0.25, transmit=1.5)


def drawings(*, draw: bool) -> dict[str, str | bytes]:
    """Return all drawings by path."""
    return {"drawn/link_models.svg": _link_models() if draw else EMPTY_PICTURE}


def runs() -> dict[str, pj.Evaluation]:
    """The run of the page on link models under each of them."""
    table = pj.schedules.build("gpipe", num_workers=WORKERS, num_microbatches=MICROBATCHES)
    return {model: pj.evaluate(table, COSTS, link=model) for model in LINKS}


def _link_models() -> bytes:
    """Draw the runs under one time axis."""
    picture = io.BytesIO()
    figure = pj.plot(runs(), messages=True)
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()
