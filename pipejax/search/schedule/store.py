"""The store of solved problems: a folder with a JSON file for each, whole at any moment.

What is better than a new entry stays: between reading it and writing the new one, a process holds
the folder's lock.

What one problem implies for another of the same shape: a plan of one is an order of ops, which also
runs at the other's times. If all times are s times as long, so is every schedule, so of what is
compared are proportions: where no time of a problem is above s times that of another, and every set
of activations that fits there fits here, no schedule here need take longer than s times the one
there.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pipejax.base.files import CACHE, cache_folder, write_file
from pipejax.base.progress import Notice
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.plan import reached_by
from pipejax.search.schedule.problem import HOST_TIMES, TIMES, Problem
from pipejax.search.schedule.store_entry import (
    Entry,
    Record,
    check_plan,
    from_text,
    prover,
    to_text,
)

Found = TypeVar("Found")
MOST_READ = 500  # problems of one shape that are looked at, the newest first
MOST_STARTS = 3  # of them to begin with, of those that are sure to fit and of those that are near


class StoreWarning(Notice):
    """A file of the store was skipped, or could not be written."""


class Neighbours(NamedTuple):
    """What solved problems imply for another one.

    Attributes:
      starts: entries of other problems whose plans are worth a try, best guess first.
      bound: units that no schedule of the problem goes below; 0 if nothing is known.
    """

    starts: list[Entry]
    bound: int


class SolvedProblems:
    """A folder of solved problems, created by the first write."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Choose the folder: `default_folder()` if None."""
        self.path = default_folder() if path is None else Path(path)
        self._told: set[Path] = set()

    def get(self, problem: Problem) -> Entry | None:
        """Return the checked entry of a problem; None, with a warning, if it is invalid."""
        path = self._file(problem)
        return self._checked(self._record(path), path)

    def put(
        self, problem: Problem, table: ScheduleTable, bound: int, *, seconds: float, source: str
    ) -> None:
        """Store a solution where it is better than the stored one.

        What cannot be written is a `StoreWarning`: the answer does not depend on it.

        `bound` is what no schedule goes below [units], `seconds` what was spent since this problem
        was last put, `source` what made the schedule.

        Raises:
          ValueError: if the schedule does not solve the problem, or goes below the bound.
        """
        check_plan(problem, table)
        objective = reached_by(problem, table)
        if bound > objective:
            raise ValueError(f"bound {bound} is above the objective, {objective}")
        problem = dataclasses.replace(problem, unit=1.0, exact=True)
        new = Entry(problem, table, objective, bound, prover(), seconds, source)
        from pipejax.base.files import locked  # filelock is an extra

        try:
            with locked(self.path, wait=True):
                old = self.get(problem)
                if old is None or objective < old.objective or bound > old.proven_bound:
                    best = new if old is None else _better(new, old)
                    write_file(self._file(problem), to_text(best), is_locked=True)
        except OSError as error:
            self._warn(self.path, error)

    def nearest(self, problem: Problem) -> Neighbours:
        """Return starts and a bound from solved problems of the same shape.

        First come plans that are sure to keep the limits, those that end soonest: a plan for
        less memory or longer times is among them. Then those of the most similar problems.
        """
        others = self._others(problem)
        ends = {n: reach(problem, other.problem, other.objective) for n, other in others.items()}
        sure = sorted((end, n) for n, end in ends.items() if end is not None)
        near = sorted((distance(problem, other.problem), n) for n, other in others.items())
        bounds = sorted(
            ((bound_from(other.problem, other.bound, problem), n) for n, other in others.items()),
            reverse=True,
        )
        chosen = [n for order in (sure, near) for _, n in order[:MOST_STARTS]]
        right = (self._checked(others[n], n) for n in dict.fromkeys(chosen))
        bound = next((bound for bound, n in bounds if bound and self._checked(others[n], n)), 0)
        return Neighbours([entry for entry in right if entry is not None], bound)

    def _file(self, problem: Problem) -> Path:
        return self.path / f"{problem.key}.json"

    def _others(self, problem: Problem) -> dict[Path, Record]:
        own = self._file(problem)
        paths = [path for path in self.path.glob(f"{problem.shape}-*.json") if path != own]
        newest = sorted(paths, key=lambda path: (_time(path), path.name), reverse=True)
        records = {path: self._record(path) for path in newest[:MOST_READ]}
        return {path: record for path, record in records.items() if record is not None}

    def _record(self, path: Path) -> Record | None:
        return self._tried(path, lambda: _read_record(path))

    def _checked(self, record: Record | None, path: Path) -> Entry | None:
        return None if record is None else self._tried(path, record.entry)

    def _tried(self, path: Path, read: Callable[[], Found]) -> Found | None:
        """Read a file or run its schedule; an invalid one is skipped with a warning."""
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError):  # `put` says the latter of the folder
            return None
        except (OSError, ValueError, OverflowError) as error:
            self._warn(path, error)
            return None

    def _warn(self, path: Path, error: Exception) -> None:
        """Warn about a file or the folder, once."""
        why = error.strerror if isinstance(error, OSError) else str(error)
        line = (why or str(error)).splitlines()[0]
        if path not in self._told:
            warnings.warn(f"store: {path} is not used: {line}", StoreWarning, stacklevel=3)
        self._told.add(path)


def _read_record(path: Path) -> Record:
    record = from_text(path.read_bytes().decode())
    if record.problem.key != path.stem:
        raise ValueError("it is about another problem than its name says")
    return record


def _better(new: Entry, old: Entry) -> Entry:
    """The shorter schedule and the higher bound of the two, and the time of both."""
    shorter = new if new.objective < old.objective else old
    bound = max(new.bound, old.proven_bound)
    return dataclasses.replace(
        shorter,
        bound=min(bound, shorter.objective),
        prover=new.prover,
        seconds=new.seconds + old.seconds,
    )


def _time(path: Path) -> float:
    """Modification time of a file [s]; a deleted one counts as the oldest."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def default_folder() -> Path:
    """Return the folder of the user's store."""
    own = os.environ.get(CACHE)
    return Path(own) if own else cache_folder("optimize")


def stretch(problem: Problem, other: Problem) -> Fraction | None:
    """Return by how much the other problem's times are longer, at most."""
    names = (*TIMES, *(HOST_TIMES if _both_offload(problem, other) else ()))
    here = np.concatenate([np.ravel(getattr(problem, name)) for name in names])
    there = np.concatenate([np.ravel(getattr(other, name)) for name in names])
    if (there[here == 0] > 0).any():
        return None
    takes = here > 0
    pairs = zip(there[takes].tolist(), here[takes].tolist(), strict=True)
    return max((Fraction(t, h) for t, h in pairs), default=Fraction(1))


def _both_offload(problem: Problem, other: Problem) -> bool:
    return problem.offload is not None and other.offload is not None


def fits_in(problem: Problem, other: Problem) -> bool:
    """Return whether every set of activations that fits one problem's memory fits another's."""
    stage = np.broadcast_to(np.arange(problem.num_stages), problem.placement.shape)
    here, there = problem.limits[problem.placement], other.limits[problem.placement]
    return all(
        bool((theirs[stage] * here <= ours[stage] * there).all())
        for ours, theirs in ((problem.sizes, other.sizes), (problem.kept, other.kept))
    )


def rows_keep_limits(plan_of: Problem, problem: Problem) -> bool:
    """Return whether rows made for one problem keep the limits of another for any times."""
    hosts = plan_of.offload is None or (
        problem.offload is not None and plan_of.host_links == problem.host_links
    )
    return hosts and fits_in(plan_of, problem)


def bound_from(easier: Problem, bound: int, problem: Problem) -> int:
    """Transfer a bound from a problem that is nowhere harder, up to a factor of all times."""
    may_offload = easier.offload is not None or problem.offload is None
    if not (may_offload and fits_in(problem, easier) and _shares_less(easier, problem)):
        return 0
    longer = stretch(problem, easier)  # easier <= longer * problem
    if not longer:
        return 0
    return -int(-(bound / longer) // 1)


def _shares_less(easier: Problem, problem: Problem) -> bool:
    """Whether workers that share a host link in the easier problem do so in the other."""
    return problem.offload is None or all(
        any({*group} <= {*other} for other in problem.host_links) for group in easier.host_links
    )


def reach(problem: Problem, plan_of: Problem, objective: int) -> Fraction | None:
    """Return a guaranteed upper bound for a plan of another problem here, or None."""
    longer = stretch(plan_of, problem)
    return longer * objective if longer is not None and rows_keep_limits(plan_of, problem) else None


def distance(problem: Problem, other: Problem) -> float:
    """Return how different the proportions of two problems of one shape are."""
    return float(np.abs(_proportions(problem) - _proportions(other)).sum())


def _proportions(problem: Problem) -> np.ndarray:
    work = float((problem.forward + problem.gradient).sum()) or 1.0
    given = [getattr(problem, name) for name in (*TIMES, *HOST_TIMES)]
    times = [np.ravel(np.zeros(problem.num_stages) if t is None else t) / work for t in given]
    limits = problem.limits[problem.placement]
    return np.concatenate(
        [*times, *(np.ravel(part / limits) for part in (problem.sizes, problem.kept))]
    )
