"""Runs under one time axis, for reports that compare them."""

from collections.abc import Mapping
from typing import Any

import pipejax as pj
from pipejax.cli.output.files import Output


def draw_runs(runs: "Mapping[str, pj.Evaluation]", figure: Output, **how: Any) -> None:
    """Draw runs by name to a file, if one is asked for."""
    if figure.path is None:
        return
    from pipejax.plots.timeline import save  # matplotlib is an extra, slow to import

    picture = pj.plot(runs, **how)
    figure.save(lambda draft: save(picture, draft))
