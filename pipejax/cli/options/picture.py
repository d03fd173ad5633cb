"""Options of pictures: which part of the time axis is shown, on what paper, with what words."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pipejax as pj
from pipejax.base.checks import one_of
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.values import Text, parse_seconds

if TYPE_CHECKING:
    from pipejax.analysis.runs.timeline import Window
    from pipejax.plots.caption import TimeUnit
    from pipejax.plots.style import Paper

PLACES = ("under", "beside")  # of a caption
_OF_PAPER = ("size", "font", "font_size")


class PictureSettings(NamedTuple):
    """How a timeline is shown.

    Attributes:
      from_: without times in slots.
      to: the end of the longest run if not given.
      part: until all workers have begun a backward, while all have forwards left, or after that.
      unit: what suits the longest run if not given.
      size: of a drawing; 5in, 84mm and 240pt are widths too.
      font: of a drawing.
      font_size: of titles in a drawing; numbers have a point less.
      caption: in the picture or the terminal, or in a file of the picture's name that ends in .md.
      no_critical: as it is always marked else.
    """

    from_: Text = None
    to: Text = None
    part: Text = None
    unit: Text = None
    size: Text = None
    font: Text = None
    font_size: float | None = None
    caption: Text = None
    no_critical: bool = False

    def check(self, out: str | None) -> None:
        """Refuse what has no effect on a file of this suffix, or where none is written.

        Raises:
          ValueError: if there is such an option.
        """
        if self.caption is not None:
            one_of(self.caption, PLACES, "--caption")
        given = [name for name in _OF_PAPER if getattr(self, name) is not None]
        if self.caption == "beside":
            given.append("caption")
        if given and out in (None, ".html"):
            where = "without --out" if out is None else f"on a page ({out})"
            raise ValueError(f"{flag(given[0])} has no effect {where}: it goes with a drawing")

    def window(self, runs: "Sequence[pj.Evaluation]") -> "Window | None":
        """Return the part of the time axis that is asked for."""
        from pipejax.analysis.runs.timeline import window_of

        start = None if self.from_ is None else parse_seconds(self.from_, "--from")
        stop = None if self.to is None else parse_seconds(self.to, "--to")
        return window_of(runs, start, stop, self.part)

    def time_unit(self, runs: "Sequence[pj.Evaluation]", *, in_slots: bool) -> "TimeUnit":
        """Return the unit of the time axis.

        Raises:
          ValueError: if one is asked for where there are no times.
        """
        from pipejax.plots.caption import SLOTS, TIME_UNITS, unit_of

        if self.unit is None:
            return unit_of(runs, SLOTS if in_slots else None)
        if in_slots:
            raise ValueError(
                f"--unit {self.unit}: without times a timeline is in slots: give --stage-times, "
                "--worker-times, --costs or --model"
            )
        return unit_of(runs, one_of(self.unit, TIME_UNITS, "--unit"))

    def paper(self) -> "Paper":
        """Return what a drawing is made for."""
        from pipejax.plots import style  # matplotlib is an extra, slow to import

        size = style.FONT_SIZE if self.font_size is None else self.font_size
        return style.paper(self.size or "page", self.font, size)


def setting_of(pricing: Pricing | None) -> str:
    """Say where times come from, if that is a model on a system."""
    if pricing is None or pricing.workload is None or pricing.system is None:
        return ""
    work = pricing.workload
    return f"{work.model.name} on {pricing.system.name}, minibatch {work.minibatch}"


def caption_file(label: str, caption: str) -> str:
    """Return a caption as a page in Markdown, below its picture, as figures/ writes it."""
    return f"![{label}]({label})\n\n{caption}\n"


def by_name(runs: "Sequence[pj.Evaluation]") -> "Mapping[str, pj.Evaluation]":
    """Give every run a name of its own."""
    from pipejax.plots.caption import named

    return named((run.schedule, run) for run in runs)
