"""The colours of terminal, figures and pages; this file needs no matplotlib.

Lines have the colours of Okabe and Ito, which colour-blind readers distinguish; in grey print,
markers distinguish lines. Bars of phases touch each other and have no markers, so phases differ in
lightness. Ops of the second pipe are hatched; in a terminal they are darker. If a worker has
several stages, ops of its first stage are darker than those of its last. If a table defines op
kinds without colours, their colours differ in lightness as much as possible from all others in a
picture.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipejax.schedules.cells.ops import KINDS, AnyPhase, OpKind, Phase

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#999999", "#000000"
SILVER, VIOLET, WHITE = "#CCCCCC", "#5B2A86", "#FFFFFF"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)  # for items without an order
# for items with an order, from light to dark
ORDERED = ("#6CCD5A", "#1F9E89", "#2C728E", "#414487", "#440154", "#000000")

# colours of short to long times; reversed on a dark background
SECONDS = ("#FEE838", "#D6C35D", "#AEA371", "#888578", "#666970", "#424E6C", "#083370")

MESSAGE, CRITICAL, IDLE = PURPLE, BLACK, GREY  # colours of lines
HELD = SKY


class Look(NamedTuple):
    """Name and colours with which a phase is drawn."""

    name: str  # name of the phase in a legend
    fill: str  # colour of ops
    shade: str  # colour of ops of the second pipe, if hatching is impossible
    deep: str = ""  # colour for the first of several stages of a worker; `fill` if ""

    @property
    def ink(self) -> str:
        """Colour of text and hatching on the phase's fill colour."""
        return ink(self.fill)

    def deepened(self, share: float) -> "Look":
        """Return a look with a colour between `fill` (share 0) and `deep` (share 1)."""
        if not (self.deep and share):
            return self
        return self._replace(fill=_mix(self.fill, self.deep, share))


def _mix(start: str, end: str, share: float) -> str:
    """Mix two colours; share 0 gives `start`, share 1 gives `end`."""
    channels = ((int(start[k : k + 2], 16), int(end[k : k + 2], 16)) for k in (1, 3, 5))
    return "#" + "".join(f"{round(low + share * (high - low)):02X}" for low, high in channels)


def lightness(colour: str) -> float:
    """Return the lightness of a colour in grey print, from 0 to 1."""
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def ink(background: str) -> str:
    """Return black or white: the colour that is readable on a background colour."""
    return BLACK if lightness(background) > 0.45 else WHITE


_LOOKS = {phase: Look(kind.name, *kind.look) for phase, kind in KINDS.items() if kind.look}
PHASES: Mapping[str, Look] = {  # from light to dark
    phase.name: look
    for phase, look in sorted(_LOOKS.items(), key=lambda entry: -lightness(entry[1].fill))
}
# phases without a colour, whose default cost is 0, are grey
USUAL = {phase.name: PHASES.get(phase.name, Look(phase.name, GREY, GREY)) for phase in KINDS}
_SHADE = 0.33  # share of black in the colour of the second pipe, if an op kind has no such colour
_CORNERS = ("#F3E58F", "#C9D665", "#8CC665", "#4DB07A", "#2F8A93", "#3C6098", "#4B3A86", "#3B0F57")
SCALE = tuple(  # from light to dark, for kinds of ops that a table defines
    _mix(light, dark, k / 32) for light, dark in itertools.pairwise(_CORNERS) for k in range(32)
)


def phase_looks(phases: Iterable[AnyPhase]) -> Mapping[str, Look]:
    """Return {letter: look} of phases; phases without a colour get distinct colours."""
    looks: dict[str, Look] = {}
    uncoloured: dict[str, OpKind] = {}
    for name, phase in {phase.name: phase for phase in phases}.items():
        if isinstance(phase, Phase):
            looks[name] = USUAL[name]
        elif phase.kind.look:
            looks[name] = _kind_look(phase.kind, *phase.kind.look)
        else:
            uncoloured[name] = phase.kind
    used_colours = [look.fill for look in looks.values()]
    colours = itertools.cycle(_distinct_colours(used_colours, len(uncoloured)))
    return looks | {name: _kind_look(kind, next(colours)) for name, kind in uncoloured.items()}


def _kind_look(kind: OpKind, fill: str, *shades: str) -> Look:
    return Look(kind.name, fill, *(shades or (_mix(fill, BLACK, _SHADE),)))


def _distinct_colours(used_colours: Sequence[str], count: int) -> list[str]:
    """Choose up to `count` colours of the scale, far in lightness from all used colours."""
    colours: list[str] = []
    for min_distance in range(100, -1, -1):
        colours, used_lightness = [], [*map(_perceived_lightness, used_colours)]
        for colour in SCALE:
            lightness = _perceived_lightness(colour)
            if all(abs(lightness - other) >= min_distance for other in used_lightness):
                colours.append(colour)
                used_lightness.append(lightness)
        if len(colours) >= count:
            break
    return colours[:count]


def _perceived_lightness(colour: str) -> float:
    """Return the CIE lightness L* of a colour, from 0 to 100."""
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * max(luminance, 0.0) ** (1 / 3) - 16
