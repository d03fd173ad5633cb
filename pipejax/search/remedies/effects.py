"""Effects of a cause: its part of the step, the time saved without it, and by its remedy."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from pipejax.analysis.scenario import Scenario
from pipejax.analysis.step.faults import WHY, Fault
from pipejax.base.display import short_repr
from pipejax.search.remedies.candidates import Candidate

# remedies that undo a cause, by kind of cause and of remedy
TREATMENTS: Mapping[str, Mapping[str, str]] = {
    "imbalance": {"layers": "moving layers", "repair": "the repair"},
    "link": {"repair": "the repair"},
    "blocking": {"messages": "another order of messages"},
    "uneven microbatches": {"order": "another order of microbatches"},
}
PARTS = {"link": "messages"}  # part of the step of a cause, if it has another name
MIN_DIFFERENCE = 0.05  # of the larger time, from which two effects are unequal


@short_repr
class Effect(NamedTuple):
    """Time of a cause, or saved by its removal, and the part of the step that makes it unequal.

    Attributes:
      what: "part", "cause", or the remedy in a few words.
      seconds: time [s].
      part: part of the step that changes too, or that of the cause if some of it stays; empty if
        the time is that of the part.
      grows: time by which it grows, or that stays of the cause [s]; below 0 if it shrinks.
      without: time that the remedy saves if the part that grows is removed too [s]; None if it
        cannot be.
    """

    what: str
    seconds: float
    part: str = ""
    grows: float = 0.0
    without: float | None = None


def cause_effects(
    begin: Candidate, fault: Fault, remedy: str, scenario: Scenario
) -> tuple[Effect, ...]:
    """List the effects of a cause and of the remedy that undoes it; none if they are equal."""
    name = PARTS.get(fault.kind, fault.kind)
    effects = [Effect("part", begin.parts[name])]
    if fault.rules:
        effects.append(_effect("cause", begin, begin.scaled("", [fault.rules], ""), name))
    effects.append(_effect(remedy, begin, Candidate(scenario), name))
    seconds = [effect.seconds for effect in effects]
    is_unequal = max(seconds) - min(seconds) > MIN_DIFFERENCE * max(map(abs, seconds))
    return tuple(effects) if is_unequal else ()


def _effect(what: str, begin: Candidate, changed: Candidate, name: str) -> Effect:
    """Compare the parts of two runs: their differences sum to the time saved."""
    seconds, parts = begin.step_time - changed.step_time, changed.parts
    differences = {part: parts[part] - before for part, before in begin.parts.items()}
    differences[name] = parts[name]  # what stays of it
    missing = begin.parts[name] - seconds
    if abs(missing) <= MIN_DIFFERENCE * max(abs(seconds), begin.parts[name]):
        return Effect(what, seconds)
    sign = math.copysign(1.0, missing)
    part = max(differences, key=lambda part: sign * differences[part])
    grows = differences[part]
    can_be_removed = part in WHY and part != name and grows > 0
    return Effect(what, seconds, part, grows, seconds + parts[part] if can_be_removed else None)
