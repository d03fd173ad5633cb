"""Labels of slices: grammars of frameworks, one a row, and the ops that a label names."""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from pipejax.traces.readers.parts import phase_name
from pipejax.traces.record import NONE, OPS

PYTORCH = "PP:"
ONLY_STAGE = -2  # stage of a label by a framework with one stage on each worker


class LabelOp(NamedTuple):
    """Op that a label names; NONE for a number that the label does not state."""

    phase: str
    stage: int = NONE
    microbatch: int = NONE
    chunk: int = NONE  # number of the stage on its worker


Cell = tuple[LabelOp, ...]  # two of a fused pair


class _Grammar(NamedTuple):
    """Labels of a framework, by a pattern with groups that have the names of `LabelOp`.

    The second op of a fused pair has groups with names that end in 2.
    """

    framework: str
    pattern: str
    default: LabelOp = LabelOp("")


_CELL = r"(?P<stage>\d{1,9})(?P<phase>[A-Z](?:[A-Z_]*[A-Z])?)(?P<microbatch>\d{0,9})"
_CHUNK = r"chunk (?P<microbatch>\d{1,9}) \(phase(?P<chunk>[01])\)"


def _second(pattern: str) -> str:
    return re.sub(r"\(\?P<(\w+)>", r"(?P<\g<1>2>", pattern)


# Seen in PyTorch 00722e64 (torch/distributed/pipelining/schedules.py), PithTrain 23db1829 and
# 33fcb7f3 (dualpipev.py; its "phase" is the direction of the pipe) and Megatron-LM d98e8a64 (names
# of functions and timers; --nvtx-ranges puts the module before a function). Labels of a run are of
# the first framework that names forwards.
_GRAMMARS = (
    _Grammar("PyTorch", rf"(?:PP:)?{_CELL}"),
    _Grammar("PyTorch", rf"(?:PP:)?\({_CELL};{_second(_CELL)}\)\s*OVERLAP_F_B"),
    _Grammar(
        "PyTorch",
        r"(?P<phase>Forward|Backward) (?P<microbatch>\d{1,9})",
        LabelOp("", stage=ONLY_STAGE),
    ),
    _Grammar("PithTrain", rf"(?:rank \d+ )?(?P<phase>forward|backward) {_CHUNK}"),
    _Grammar(
        "PithTrain",
        rf"(?:rank \d+ )?(?:overlapped )?(?P<phase>forward) {_CHUNK} "
        + _second(rf"(?P<phase>backward) {_CHUNK}"),
    ),
    _Grammar("PithTrain", r"(?:rank \d+ )?(?P<phase>weight) chunk"),
    _Grammar(
        "Megatron-LM",
        r"(?:\w+\.)*(?P<phase>[A-Za-z]+(?:[_-][A-Za-z]+)*?)"
        r"(?:[ _.:#-]*(?:mb|microbatch|micro_batch)?[ _.:#=-]*(?P<microbatch>\d{1,9}))?",
    ),
)
_PATTERNS = [(grammar, re.compile(grammar.pattern)) for grammar in _GRAMMARS]
_WORDS = {"Forward": "F", "Backward": "B", "weight": "W"}
FRAMEWORKS = tuple(dict.fromkeys(grammar.framework for grammar in _GRAMMARS))


@functools.lru_cache(maxsize=2**16)
def parse_label(label: str, framework: str = FRAMEWORKS[0]) -> Cell:
    """Return the ops of a label of a framework; an empty tuple for any other text.

    Example:
      >>> [tuple(op) for op in parse_label("PP:(2F1;3B0)OVERLAP_F_B")]
      [('F', 2, 1, -1), ('B', 3, 0, -1)]
      >>> parse_label("0UNSHARD")[0].phase, parse_label("aten::mm")
      ('UNSHARD', ())
      >>> parse_label("megatron.core.pipeline_parallel.schedules.forward_step", "Megatron-LM")
      (LabelOp(phase='F', stage=-1, microbatch=-1, chunk=-1),)
    """
    for grammar, pattern in _PATTERNS:
        match = pattern.fullmatch(label) if grammar.framework == framework else None
        if match is not None:
            groups = match.groupdict()
            ops = tuple(
                _make_op(groups, suffix, grammar.default)
                for suffix in ("", "2")
                if f"phase{suffix}" in groups
            )
            return ops if framework == FRAMEWORKS[0] or ops[0].phase in OPS else ()
    return ()


def _make_op(groups: dict[str, str | None], suffix: str, default: LabelOp) -> LabelOp:
    numbers = {
        name: int(text)
        for name in ("stage", "microbatch", "chunk")
        if (text := groups.get(name + suffix))
    }
    text = groups["phase" + suffix] or ""
    return default._replace(phase=_WORDS.get(text) or phase_name(text), **numbers)


def parse_labels(labels: Iterable[str]) -> dict[str, Cell]:
    """Return the labels of ops, by the first framework whose grammar names forwards in them."""
    labels = sorted({*labels})
    for framework in FRAMEWORKS:
        cells = {label: parse_label(label, framework) for label in labels}
        if any(op.phase == "F" for cell in cells.values() for op in cell):
            return {label: cell for label, cell in cells.items() if cell}
    return {}
