"""Labels of slices: label grammars of frameworks, and the ops that a label names."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipejax.traces.readers.parts import phase_name
from pipejax.traces.record import NONE, OPS

PYTORCH = "PP:"
ONLY_STAGE = -2  # stage of a label that needs none, as its worker has one stage


class LabelOp(NamedTuple):
    """Op that a label names; numbers that the label lacks are NONE."""

    phase: str
    stage: int = NONE
    microbatch: int = NONE
    chunk: int = NONE  # number of the stage on its worker


Cell = tuple[LabelOp, ...]  # the op of a label, or both ops of a fused pair
Cells = Sequence[Cell]  # by number of the label

_CELL = r"(?P<stage>\d{1,9})(?P<phase>[A-Z](?:[A-Z_]*[A-Z])?)(?P<microbatch>\d{0,9})"
_CHUNK = r"chunk (?P<microbatch>\d{1,9}) \(phase(?P<chunk>[01])\)"

_RANK = r"(?:rank[ =]\d+[;:]? *(?:pp=\d+/\d+[;:]? *)?)?"  # before a label of any framework
_STAGE = r"[ _.:#,-]*(?:stage|s)[ _=]*(?P<stage>\d{1,9})"
_NUMBERED = r"[ _.:#,-]*(?:mb|microbatch|micro_batch|m)?[ _.:#=-]*(?P<microbatch>\d{1,9})"
_NUMBER = rf"(?:{_NUMBERED})?"


def _second(pattern: str) -> str:
    """Return a pattern with its groups renamed for the second op of a fused pair."""
    return pattern.replace(">", "2>")


# Frameworks, and patterns of labels whose groups have the names of a `LabelOp`. Seen in PyTorch
# 00722e64 (torch/distributed/pipelining/schedules.py), PithTrain 23db1829 and 33fcb7f3
# (dualpipev.py, whose "phase" is the direction of the pipe), and Megatron-LM d98e8a64 (functions
# and timers; --nvtx-ranges puts the module before a function).
GRAMMARS = (
    ("PyTorch", rf"(?:PP:)?{_CELL}"),
    ("PyTorch", rf"(?:PP:)?\({_CELL};{_second(_CELL)}\)\s*OVERLAP_F_B"),
    ("PyTorch", r"(?P<phase>Forward|Backward) (?P<microbatch>\d{1,9})"),
    ("PithTrain", rf"(?P<phase>forward|backward) {_CHUNK}"),
    (
        "PithTrain",
        rf"(?:overlapped )?(?P<phase>forward) {_CHUNK} "
        + _second(rf"(?P<phase>backward) {_CHUNK}"),
    ),
    ("PithTrain", r"(?P<phase>weight) chunk"),
    ("Megatron-LM", rf"(?:\w+\.)*_*(?P<phase>[A-Za-z]+(?:[_-][A-Za-z]+)+?){_NUMBER}"),
    ("other programs", rf"(?P<phase>[A-Za-z]+){_NUMBER}"),
    ("other programs", rf"(?P<phase>[A-Za-z]+(?:[_-][A-Za-z]+)+?){_NUMBERED}"),
    ("other programs", rf"(?P<phase>[A-Za-z]+){_STAGE}{_NUMBER}"),
    ("other programs", rf"(?P<phase>[A-Za-z]+){_NUMBERED}{_STAGE}"),
    ("other programs", rf"{_STAGE}[ _.:#,-]*(?P<phase>[A-Za-z]+?){_NUMBER}"),
)
FRAMEWORKS = tuple(dict.fromkeys(framework for framework, _ in GRAMMARS))


@functools.lru_cache(maxsize=2**16)
def parse_label(label: str, framework: str = "PyTorch") -> Cell:
    """Return the ops that a framework's label names; an empty tuple for any other text.

    Example:
      >>> [tuple(op) for op in parse_label("PP:(2F1;3B0)OVERLAP_F_B")]
      [('F', 2, 1, -1), ('B', 3, 0, -1)]
      >>> parse_label("0UNSHARD")[0].phase, parse_label("aten::mm")
      ('UNSHARD', ())
      >>> parse_label("megatron.core.pipeline_parallel.schedules.forward_step", "Megatron-LM")
      (LabelOp(phase='F', stage=-1, microbatch=-1, chunk=-1),)
    """
    is_pytorch = framework == "PyTorch"  # its labels without a stage are of a single stage
    patterns = (pattern for name, pattern in GRAMMARS if name == framework)
    match = next(filter(None, (re.fullmatch(_RANK + pattern, label) for pattern in patterns)), None)
    if match is None:
        return ()
    groups, ops = match.groupdict(), []
    suffixes = ("", "2") if "phase2" in groups else ("",)  # "2": second op of a fused pair
    for suffix in suffixes:
        numbers = {"stage": ONLY_STAGE} if is_pytorch else {}
        for name in ("stage", "microbatch", "chunk"):
            if digits := groups.get(name + suffix):
                numbers[name] = int(digits)
        ops.append(LabelOp(phase_name(groups["phase" + suffix]), **numbers))
    # words of other frameworks are labels only if they are phases
    return tuple(ops) if is_pytorch or ops[0].phase in OPS else ()


@functools.lru_cache(maxsize=2**16)
def is_label(text: str) -> bool:
    """Return whether a text is an op label of any known framework."""
    return any(parse_label(text, framework) for framework in FRAMEWORKS)


# {launcher: pattern of its labels}; other labels are of several launchers
_LAUNCHERS = {
    "DeepSpeed": re.compile(r"_exec_(?:forward|backward)_pass"),
    "Megatron-LM": re.compile(r"(?:\w+\.)*(?:forward|backward)[_-](?:step|compute)"),
}


def label_launcher(labels: Mapping[str, Cell]) -> str:
    """Return the launcher whose labels these are; "" if there is none."""
    names = (name for name, form in _LAUNCHERS.items() if any(map(form.fullmatch, labels)))
    return next(names, "")


# labels that mark a step; a mark without a number is numbered by its position in its rank
STEP = re.compile(
    r"(?:ProfilerStep#|(?:train(?:ing)?[ _])?(?:iteration|iter|step)[ _:#=]*)(?P<number>\d{1,9})"
    r"|train(?:ing)?[ _](?:step|iteration|batch)|train|iteration",
    re.IGNORECASE,
)


def number_marks(marks: Iterable[tuple[str, float, float]]) -> list[tuple[int, float, float]]:
    """Return sorted (number, start, end) of step marks; all numbers are NONE if one is missing."""
    matches = ((STEP.fullmatch(label), start, end) for label, start, end in marks)
    steps = [(match["number"], start, end) for match, start, end in matches if match]
    steps.sort(key=lambda mark: mark[1:])
    numbered = [(int(number), start, end) for number, start, end in steps if number]
    return numbered or [(NONE, start, end) for _, start, end in steps]


def parse_labels(labels: Iterable[str]) -> dict[str, Cell]:
    """Return the ops of labels by the first framework that finds forwards, else empty tuples."""
    labels = sorted({*labels})
    for framework in FRAMEWORKS:
        cells = {label: parse_label(label, framework) for label in labels}
        if any(op.phase == "F" for cell in cells.values() for op in cell):
            return {label: cell for label, cell in cells.items() if cell}
    return {}
