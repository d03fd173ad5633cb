"""Palette: the one record of colours, for the terminal, figures and pages. Needs no matplotlib.

Lines have the colours of Okabe and Ito, which colour-blind readers tell apart; in grey their
markers do that. Phases touch each other and have no markers: their colours are a ladder of
lightness. What tells the pipes of a bidirectional schedule apart is no colour: ops of the second
pipe are hatched, so forward and backward stay as far apart in grey as they are in the first pipe.
Where no strokes can be drawn, as in a terminal, the second pipe has a darker shade. Stages of one
worker go from dark to light: the first has a deeper colour of the phase, the last the phase's own.
In grey both fit between the phases of schedules that have forwards and one kind of backward, or
backwards that are split. Kinds of ops that a table defines without a colour come from one scale,
in lightness as far as can be from each other and from all that is drawn beside them.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipejax.schedules.cells.ops import KINDS, MICROBATCH, AnyPhase, OpKind, Phase

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
HELD, LIMIT = SKY, VERMILION


class Look(NamedTuple):
    """Colours and name of the ops of a phase."""

    name: str  # of the phase, in a legend
    fill: str  # colour
    shade: str  # colour in the second pipe, where no strokes can be drawn
    deep: str = ""  # colour of a worker's first stage, where it has several; as `fill` if ""

    @property
    def ink(self) -> str:
        """Colour of text and strokes on it."""
        return ink(self.fill)

    def deepened(self, share: float) -> "Look":
        """Return the look of a stage: 1 is the first of its worker, 0 the last."""
        if not (self.deep and share):
            return self
        return self._replace(fill=_mixed(self.fill, self.deep, share))


def _mixed(start: str, end: str, share: float) -> str:
    ends = ([int(text[k : k + 2], 16) for k in (1, 3, 5)] for text in (start, end))
    mixed = (round(near + share * (far - near)) for near, far in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)


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
NO_PIPE = tuple(phase for phase in PHASES if KINDS[Phase[phase]].scope != MICROBATCH)


# what costs nothing unless times are given is grey
USUAL = {phase.name: PHASES.get(phase.name, Look(phase.name, GREY, GREY)) for phase in KINDS}
_SHADE = 0.33  # of the way to black, where a kind has no colour for the second pipe
_CORNERS = ("#F3E58F", "#C9D665", "#8CC665", "#4DB07A", "#2F8A93", "#3C6098", "#4B3A86", "#3B0F57")
SCALE = tuple(  # from light to dark, for kinds of ops that a table defines
    _mixed(light, dark, k / 32) for light, dark in itertools.pairwise(_CORNERS) for k in range(32)
)


def phase_looks(phases: Iterable[AnyPhase]) -> Mapping[str, Look]:
    """Return the looks of phases in one picture, by their letters."""
    by_name = {phase.name: phase for phase in phases}
    kinds = {name: phase.kind for name, phase in by_name.items()}
    usual = {name: USUAL[name] for name, phase in by_name.items() if isinstance(phase, Phase)}
    looks = {
        name: usual.get(name) or _look_of_kind(kind, *(kind.look or ()))
        for name, kind in kinds.items()
        if name in usual or kind.look
    }
    free = [name for name in kinds if name not in looks]
    colours = _apart([look.fill for look in looks.values()], len(free))
    return looks | {
        name: _look_of_kind(kinds[name], colours[k % len(colours)]) for k, name in enumerate(free)
    }


def _look_of_kind(kind: OpKind, fill: str, *more: str) -> Look:
    return Look(kind.name, fill, *(more or (_mixed(fill, BLACK, _SHADE),)))


def _apart(used_colours: Sequence[str], count: int) -> list[str]:
    """So many colours, as far in lightness as can be from each other and from others."""
    others = [*map(_perceived, used_colours)]
    lightness: dict[str, float] = {}  # their lightness
    for distance in range(100, -1, -1):
        lightness = {}
        for colour in SCALE:
            candidate = _perceived(colour)
            if all(abs(candidate - other) >= distance for other in (*others, *lightness.values())):
                lightness[colour] = candidate
        if len(lightness) >= count:
            break
    return list(lightness)[:count]


def _perceived(colour: str) -> float:
    """Lightness as an eye has it: CIE L*, from 0 to 100."""
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    luminance = sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * max(luminance, 0.0) ** (1 / 3) - 16
