"""Rows of a table as reports, logs and terminals print them, including old PyTorch letters.

`FORMS` lists the printed forms. The reader converts them to the rows of a CSV.
"""

import itertools
import re

from pipejax.schedules.cells.ops import ScheduleError

FORMS = (
    "; rows are read as CSV, as lists in brackets, behind 'Rank 0:', as steps under 'Rank 0  Rank "
    "1', and with bars, semicolons, tabs or blanks between cells; None, . and - are idle"
)
_IDLE = {"", ".", "-", "--", "_", "none", "null", "nan", "idle"}
_RANK = "(?:pp)?[ _-]*(?:rank|worker|device|gpu|stage)[ _#-]*"
_STEP = "(?:time[ _-]*)?(?:step|slot|time|tick|clock|t)[ _#-]*"
_LABEL = re.compile(
    rf"^\s*(?:({_RANK})|({_STEP})|#)?(\d+)(?: *[:=]+(?: *\|)?| *[|,;\t]|\s+|$)", re.I
)
_OP = re.compile(r"\b\d+[A-Z_]+\d*\b")
# a letter of a lane (@net), a dot of a slice (2F0.1) and a semicolon of a pair belong to a CSV
_PASTED = re.compile(
    r"[\[\]{}:|\t'`=-]|(?<![@a-z])[a-z]|(?<!\d)\.|\.(?!\d)|\w +[\w(]|;(?![^()]*\))|^ *\d+ *,", re.M
)
_RULE = re.compile(r"\s*|(?=.*[|+:=-]{2})[\s|+:=-]*")  # |---|---| of a grid; - - - are idle cells
# a line of heads, as "# step  rank 0  rank 1", and a label, as "#0", are no comments
_COMMENT = re.compile(
    r"^[ \t]*(?:#|//)(?!.*(?:rank|worker|device|gpu|stage|step|slot|time))(?!\s*\d).*\n?"
    r"|(?<=\S)[ \t]+(?:#|//)(?!\s*\d).*$",
    re.M | re.I,
)
_ARROW = re.compile("[ \t]*(?:[-=]+>|[\N{RIGHTWARDS ARROW}\N{RIGHTWARDS DOUBLE ARROW}])[ \t]*")
_OUTSIDE_PAIR = r"(?![^()]*\))"
_BACKWARD = re.compile(r"(?<![A-Z_\d])(\d+)(BW|B|I|W)(?=(\d+))")
_TODAY = {"B": "I", "BW": "B", "W": "W"}  # letters of 2024, in today's


def without_comments(text: str) -> str:
    """Remove comments, and arrows between cells."""
    return _ARROW.sub(" ", _COMMENT.sub("", text))


def is_pasted(text: str) -> bool:
    """Return whether a text contains ops but is not a plain CSV."""
    return bool(_OP.search(text) and _PASTED.search(text))


def is_rank_dict(text: str) -> bool:
    """Return whether a text is a Python dict of lists, with ranks as keys."""
    return bool(re.match(rf"\s*{{\s*[\"']?(?:{_RANK})?\d+[\"']?\s*:\s*\[", text, re.I))


def split_rows(text: str) -> tuple[list[list[str]], str]:
    """Return each worker's cells, and a note if the lines were read as steps."""
    text = re.sub(r"\[([\w ]*\d)\](?=\s*[:=])", r"\1", re.sub("[\"'`]", "", text))  # [rank0]: ..
    lines = _list_lines(text) if "[" in text else text.split("\n")
    lines = [re.sub(r"^\s*\|", "", line) for line in lines if not _RULE.fullmatch(line)]
    first = next((index for index, line in enumerate(lines) if _OP.search(line)), 0)
    head = lines[first - 1] if first else ""  # a caption may stand above the head
    lines = lines[first:]
    labels = [_LABEL.match(line) for line in lines]
    for line, label in zip(lines, labels, strict=True):
        if not (label or _OP.search(line)):
            raise ScheduleError(f"{line.strip()[:40]!r} holds no op{FORMS}")
    is_steps = _has_rank_columns(head) or any(label and label[2] for label in labels)
    numbers = [int(label[3]) for label in labels if label] or [*range(len(lines))]
    order = _sorted_indices(numbers, len(lines), "steps" if is_steps else "ranks")
    # blanks replace labels, so that cells stay under their heads
    lines = [_LABEL.sub(lambda label: " " * label.end(), line, count=1) for line in lines]
    bodies = [re.sub(r"\|\s*$", "", line) for line in lines]
    separator = _find_separator(bodies)
    if is_steps and not separator:
        rows = _under_heads(bodies, head)
    else:
        pattern = (f"[{separator}]" if separator else r"\s+") + _OUTSIDE_PAIR
        rows = [[cell.strip() for cell in re.split(pattern, line.strip(" "))] for line in bodies]
    rows = [["" if cell.lower() in _IDLE else cell for cell in rows[line]] for line in order]
    if not is_steps:
        return rows, ""
    # other separators lose cells at the end of a line
    if separator in ("", "|") and len({len(row) for row in rows}) > 1:
        raise ScheduleError(f"steps must have a cell for each rank: write . for idle{FORMS}")
    columns = [*itertools.zip_longest(*rows, fillvalue="")]
    ranks = [int(number) for number in re.findall(r"\d+", head)] or [*range(len(columns))]
    note = f"its {len(rows)} lines are read as steps, its {len(columns)} columns as ranks"
    return [[*columns[rank]] for rank in _sorted_indices(ranks, len(columns), "ranks")], note


def _find_separator(lines: list[str]) -> str:
    """Return the mark between cells: a bar, comma, semicolon or tab; empty for blanks."""
    text = "\n".join(lines)
    marks = (mark for mark in "|,;\t" if re.search(f"[{mark}]{_OUTSIDE_PAIR}", text))
    return next(marks, "")


def _list_lines(text: str) -> list[str]:
    """Return each bracketed list as a line, after the number that precedes the list, if any."""
    lists = [*re.finditer(r"(?P<head>[^\[\]]*)\[(?P<cells>[^\[\]]*)\]", text)]
    outside = [*(part["head"] for part in lists), text[lists[-1].end() if lists else 0 :]]
    if op_texts := [part.strip("()]}, \n") for part in outside if _OP.search(part)]:
        raise ScheduleError(f"{op_texts[0][:40]!r} is in no list{FORMS}")
    heads = [re.search(r"(\d+)\W*$", part["head"]) for part in lists]
    rows = [" ".join(part["cells"].split()) for part in lists]
    return [f"{head[1]}: {row}" if head else row for head, row in zip(heads, rows, strict=True)]


def _has_rank_columns(head: str) -> bool:
    """Return whether a head line names ranks as columns, or begins with "Step"."""
    ranks = re.findall(rf"{_RANK}\d", head, re.I)
    is_named = bool(ranks) and len(ranks) == len(re.findall(r"\d+", head))
    return is_named or bool(re.match(rf"\W*{_STEP}(?![\w ])", head, re.I))


def _sorted_indices(numbers: list[int], count: int, what: str) -> list[int]:
    """Return the indices that sort step or rank numbers; refuse gaps and repetitions."""
    if sorted(numbers) != [*range(count)]:
        raise ScheduleError(f"{what} must be numbered 0 to {count - 1}, got {numbers}{FORMS}")
    return sorted(range(count), key=numbers.__getitem__)


def _under_heads(lines: list[str], head: str) -> list[list[str]]:
    """Return each line's cells by rank, from their columns below a head "Rank 0  Rank 1"."""
    rows = [{cell.start(): cell[0] for cell in re.finditer(r"\S+", line)} for line in lines]
    heads = re.finditer(rf"{_RANK}\d+", head.lstrip(), re.I)
    rank_columns = [name.end() - len(name[0].strip()) for name in heads]
    if len({len(rank_columns), *map(len, rows)}) == 1 or not rank_columns:
        return [[*row.values()] for row in rows]  # a cell for each rank
    # cells start below the heads, after the head's indent; pasting may have cut the indent off
    for indent in (len(head) - len(head.lstrip()), min(itertools.chain(*rows))):
        columns = [column + indent for column in rank_columns]
        if all(row.keys() <= {*columns} for row in rows):
            return [[row.get(column, "") for column in columns] for row in rows]
    raise ScheduleError(f"a cell stands under no rank: write . for idle cells{FORMS}")


def with_todays_letters(rows: list[list[str]]) -> tuple[list[list[str]], str]:
    """Return rows with today's PyTorch letters, and a note if they had the letters of 2024."""
    # Only letters of 2024 have BW, or B and W of one microbatch on a stage without I.
    ops: dict[str, set[str]] = {letter: set() for letter in ("I", *_TODAY)}
    for stage, letter, microbatch in _BACKWARD.findall("\n".join(map(",".join, rows))):
        ops[letter].add(f"{stage} {microbatch}")
    if not ops["BW"] and (ops["I"] or ops["B"].isdisjoint(ops["W"])):
        return rows, ""
    letters = "2024: B is I, BW is B; today: I input gradient, W weight gradient, B both"
    if ops["I"]:
        raise ScheduleError(f"BW and I do not go together ({letters}): write I, W and B")
    if without_w := sorted(ops["B"] - ops["W"]):
        op = without_w[0].replace(" ", "B")
        raise ScheduleError(f"{op} has no W, other B have ({letters}): write {op} as BW, or B as I")
    rows = [[_BACKWARD.sub(lambda op: op[1] + _TODAY[op[2]], cell) for cell in row] for row in rows]
    return rows, "its letters are PyTorch's of 2024: B is read as I, BW as B"
