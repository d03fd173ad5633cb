"""Palette: the one record of colours, for the terminal, figures and pages. Needs no matplotlib.

Lines have the colours of Okabe and Ito, which colour-blind readers tell apart; in grey their
markers do that. Phases touch each other and have no markers: their colours are a ladder of
lightness. What tells the pipes of a bidirectional schedule apart is no colour: ops of the second
pipe are hatched, so forward and backward stay as far apart in grey as they are in the first pipe.
Where no strokes can be drawn, as in a terminal, the second pipe has a darker shade. Stages of one
worker go from dark to light: the first has a deeper colour of the phase, the last the phase's own.
In grey both fit between the phases of schedules that have forwards and one kind of backward, or
backwards that are split.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pipejax.schedules.cells.ops import KINDS, MICROBATCH, Phase

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#999999", "#000000"
SILVER, VIOLET, WHITE = "#CCCCCC", "#5B2A86", "#FFFFFF"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)  # for what has no order
# for what has an order, from light to dark: lines, marks and areas
ORDERED = ("#6CCD5A", "#1F9E89", "#2C728E", "#414487", "#440154", "#000000")

# seconds, from few to many, between these step by step; on a dark ground the other way round
SECONDS = ("#FEE838", "#D6C35D", "#AEA371", "#888578", "#666970", "#424E6C", "#083370")

# what lines mean
MESSAGE, CRITICAL, IDLE = PURPLE, BLACK, GREY
HELD, HELD_LINE, LIMIT = SKY, BLUE, VERMILION


class Look(NamedTuple):
    """What an op of a phase looks like.

    Attributes:
      name: of the phase, in a legend.
      fill: colour.
      shade: colour in the second pipe, where no strokes can be drawn.
      deep: colour of a worker's first stage, where it has several; as `fill` if "".
    """

    name: str
    fill: str
    shade: str
    deep: str = ""

    @property
    def ink(self) -> str:
        """Colour of text and strokes on it."""
        return ink(self.fill)

    def deepened(self, share: float) -> "Look":
        """Return the look of a stage: 1 is the first of its worker, 0 the last."""
        if not (self.deep and share):
            return self
        ends = ([int(text[k : k + 2], 16) for k in (1, 3, 5)] for text in (self.fill, self.deep))
        mixed = (round(own + share * (deep - own)) for own, deep in zip(*ends, strict=True))
        return self._replace(fill="#" + "".join(f"{part:02X}" for part in mixed))


def lightness(colour: str) -> float:
    """Return how light a colour is in grey, from 0 to 1."""
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def ink(background: str) -> str:
    """Return the colour in which text is read best on a background: black or white."""
    return BLACK if lightness(background) > 0.45 else WHITE


_LOOKS = {phase: Look(kind.name, *kind.look) for phase, kind in KINDS.items() if kind.look}
PHASES: Mapping[str, Look] = {  # from light to dark, also for a colour-blind reader
    phase.name: look
    for phase, look in sorted(_LOOKS.items(), key=lambda entry: -lightness(entry[1].fill))
}
NO_PIPE = tuple(phase for phase in PHASES if KINDS[Phase[phase]].of != MICROBATCH)


def look(phase: str) -> Look:
    """Return what a phase looks like; what costs nothing unless times are given is grey."""
    return PHASES.get(phase, Look(phase, GREY, GREY))
