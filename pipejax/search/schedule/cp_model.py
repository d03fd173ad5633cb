"""Constraint model: starts of all ops, their order on workers and links, and offloads.

Microbatches of a pipe are interchangeable. So without offloads, F and I run in microbatch order on
every stage, and so does W of split backwards. With offloads, only F of the first stage does.

Memory is a cumulative resource of each worker. An activation occupies it from the start of F to the
end of I; if it is offloaded, from F to O, and from L to I. A share for W stays until the end of W.

CP-SAT runs in its own thread, and reports plans and bounds on the way. A lower bound for one stage
alone, with its messages and memory, is valid for the complete problem, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from pipejax.base.progress import merge_progress
from pipejax.schedules.cells.ops import Phase
from pipejax.search.schedule.bounds import memory_order, paths
from pipejax.search.schedule.effort import SOLVER, Budget
from pipejax.search.schedule.plan import NEVER, Plan
from pipejax.search.schedule.problem import HOST_TIMES, OP_TIMES, STEP_END_TIMES, Problem

Variable = cp_model.IntVar
Interval = cp_model.IntervalVar
Key = tuple[int, int]  # stage, microbatch


class ScheduleModel:
    """Constraint model of one problem, with its variables."""

    # Some constraints follow from other constraints, but help the search: earliest times of ops, a
    # worker's first start plus all its work, gradients that free memory for a forward, and the path
    # of an input gradient to the first stage.

    def __init__(self, problem: Problem, horizon: int) -> None:
        self.problem, self.horizon = problem, int(horizon)
        self.model = cp_model.CpModel()
        self.has_microbatch_order = problem.offload is None
        # variables by (stage, microbatch); a full backward B starts at the start of I
        self.start: dict[str, dict[Key, Variable]] = {letter: {} for letter in "FIWOL"}
        self.is_unsplit: dict[Key, cp_model.BoolVarT] = {}  # whether the backward is a full B
        self.is_offloaded: dict[Key, cp_model.BoolVarT] = {}  # whether the activation is offloaded
        self._input_end: dict[Key, Variable] = {}  # end of I, or of B
        self._gradient_end: dict[Key, Variable] = {}  # end of W, or of B
        self._on_worker: list[list[Interval]] = [[] for _ in range(problem.num_workers)]
        self._on_host: dict[tuple[int, ...], list[Interval]] = {}  # {workers of a host link: O, L}
        self._on_link: dict[tuple[int, int], list[Interval]] = {}  # {(sender, receiver): messages}
        # for each worker: intervals in which it holds activations, and their sizes
        self._held: list[list[tuple[Interval, int]]] = [[] for _ in range(problem.num_workers)]
        self.objective = self._time("objective")  # `_time` makes a variable
        self._paths = paths(problem)
        for stage, microbatch in self._ops():
            self._add_ops(stage, microbatch)
            self._add_memory(stage, microbatch)
        for stage, microbatch in self._ops():
            self._add_waits(stage, microbatch)
        self._add_resources()
        self._add_order()
        self._add_objective()
        self.model.minimize(self.objective)

    @property
    def num_ops(self) -> int:
        """Return the number of F, I and W ops."""
        return 3 * self.problem.worker.size

    def _ops(self) -> Iterator[Key]:
        yield from np.ndindex(self.problem.num_stages, self.problem.num_microbatches)

    def _pipe(self, microbatch: int) -> int:
        return int(self.problem.microbatch_pipes[microbatch])

    def _worker(self, stage: int, microbatch: int) -> int:
        return int(self.problem.placement[self._pipe(microbatch), stage])

    def _time(self, name: str, earliest: int = 0) -> Variable:
        return self.model.new_int_var(earliest, self.horizon, name)

    def _add_ops(self, stage: int, microbatch: int) -> None:
        """Add start and end variables of F, I and W, or of B, with their durations and order."""
        problem, model, key = self.problem, self.model, (stage, microbatch)
        pipe, worker = self._pipe(microbatch), self._worker(stage, microbatch)
        # durations [units] of F, I, W and B
        forward, split, weight, whole = (int(getattr(problem, name)[stage]) for name in OP_TIMES)
        forward_start = int(self._paths.head[pipe, stage])
        input_start = forward_start + forward + int(self._paths.trip[pipe, stage])
        earliest = {"F": forward_start, "I": input_start, "W": input_start + min(split, whole)}
        starts = {p: self._time(f"{stage}{p}{microbatch}", low) for p, low in earliest.items()}
        for letter, variable in starts.items():
            self.start[letter][key] = variable
        row = self._on_worker[worker]  # intervals that may not overlap
        row.append(model.new_fixed_size_interval_var(starts["F"], forward, ""))
        self._input_end[key], self._gradient_end[key] = self._time(""), self._time("")
        # If B is no shorter than I and W, it is never better, because I and W can run without a
        # gap. Otherwise the solver may choose B: then I has the length of B, and W has length 0 at
        # the end of B. So ops that wait for I or W need no case of their own.
        if whole >= split + weight:
            row.append(model.new_fixed_size_interval_var(starts["I"], split, ""))
            row.append(model.new_fixed_size_interval_var(starts["W"], weight, ""))
            model.add(self._input_end[key] == starts["I"] + split)
            model.add(self._gradient_end[key] == starts["W"] + weight)
        else:
            is_whole = self.is_unsplit[key] = model.new_bool_var(f"{stage}B{microbatch}")
            duration = split + (whole - split) * is_whole
            size = model.new_int_var(min(split, whole), max(split, whole), "")
            model.add(size == duration)
            row.append(model.new_interval_var(starts["I"], size, self._input_end[key], ""))
            new_optional = model.new_optional_fixed_size_interval_var
            row.append(new_optional(starts["W"], weight, ~is_whole, ""))
            model.add(self._gradient_end[key] == starts["W"] + weight).only_enforce_if(~is_whole)
            model.add(self._gradient_end[key] == starts["W"]).only_enforce_if(is_whole)
            model.add(starts["W"] == self._input_end[key]).only_enforce_if(is_whole)
        model.add(starts["W"] >= self._input_end[key])

    def _add_memory(self, stage: int, microbatch: int) -> None:
        """Add the intervals in which the worker holds an activation."""
        problem, model, key = self.problem, self.model, (stage, microbatch)
        size, weight_size = int(problem.sizes[stage]), int(problem.weight_sizes[stage])
        held = self._held[self._worker(stage, microbatch)]
        since = self.start["F"][stage, microbatch]
        if problem.offload is not None and problem.load is not None:
            since = self._add_offload(key, int(problem.offload[stage]), int(problem.load[stage]))
        # two intervals from one start: the part that I frees, and the part that stays for W
        ends = self._input_end[key], self._gradient_end[key]
        for end, parts in zip(ends, (size - weight_size, weight_size), strict=True):
            if parts:
                held.append((model.new_interval_var(since, self._time(""), end, ""), parts))

    def _add_offload(self, key: Key, offload: int, load: int) -> Variable:
        """Let the solver offload an activation; return the time since which I's worker holds it."""
        # The worker holds an activation from F on. If `is_out`, it holds the activation from F to
        # the end of O, and from L on.
        (stage, _), model, worker = key, self.model, self._worker(*key)
        forward = self.start["F"][key]
        forward_end = forward + int(self.problem.forward[stage])
        is_out = self.is_offloaded[key] = model.new_bool_var("out {},{}".format(*key))
        offload_start, load_start, since = (self._time("") for _ in range(3))
        self.start["O"][key], self.start["L"][key] = offload_start, load_start
        group = next((g for g in self.problem.host_links if worker in g), (worker,))
        link = self._on_host.setdefault(group, [])
        link.append(model.new_optional_fixed_size_interval_var(offload_start, offload, is_out, ""))
        link.append(model.new_optional_fixed_size_interval_var(load_start, load, is_out, ""))
        model.add(offload_start >= forward_end).only_enforce_if(is_out)
        model.add(load_start >= offload_start + offload).only_enforce_if(is_out)
        model.add(self.start["I"][key] >= load_start + load).only_enforce_if(is_out)
        model.add(since == load_start).only_enforce_if(is_out)
        model.add(since == forward).only_enforce_if(~is_out)
        # unused starts are fixed, so that the solver does not try other values
        model.add(offload_start == forward).only_enforce_if(~is_out)
        model.add(load_start == forward).only_enforce_if(~is_out)
        end = offload_start + offload
        until_out = model.new_optional_interval_var(forward, self._time(""), end, is_out, "")
        self._held[worker].append((until_out, int(self.problem.sizes[stage])))
        return since

    def _add_waits(self, stage: int, microbatch: int) -> None:
        """Make the next ops of a microbatch wait for F and I on this stage."""
        key, start = (stage, microbatch), self.start
        forward_end = start["F"][key] + int(self.problem.forward[stage])
        if stage < self.problem.num_stages - 1:
            self._send(0, key, forward_end, start["F"][stage + 1, microbatch])
        else:
            self.model.add(start["I"][key] >= forward_end)
        if stage > 0:
            previous = stage - 1, microbatch
            self._send(1, previous, self._input_end[key], start["I"][previous])

    def _send(self, direction: int, key: Key, ready: cp_model.LinearExprT, use: Variable) -> None:
        """Add a message between two stages, as a delay or as an interval on a link."""
        # `direction` 0 leads from the stage of `key` to the next, 1 back. The message may start at
        # `ready`; the op that starts at `use` waits for it.
        boundary, microbatch = key
        pipe = self._pipe(microbatch)
        index = direction, pipe, boundary
        lag, transmit = int(self.problem.lag[index]), int(self.problem.transmit[index])
        if not transmit:
            self.model.add(use >= ready + lag)
            return
        workers = [int(self.problem.placement[pipe, boundary + k]) for k in (0, 1)]
        sender, receiver = workers if direction == 0 else workers[::-1]
        send_start = self._time("")
        interval = self.model.new_fixed_size_interval_var(send_start, transmit, "")
        self._on_link.setdefault((sender, receiver), []).append(interval)
        self.model.add(send_start >= ready)
        self.model.add(use >= send_start + transmit + lag)

    def _add_resources(self) -> None:
        """Add capacities: one op at a time on workers and links, and the memory limits."""
        for intervals in (*self._on_worker, *self._on_host.values(), *self._on_link.values()):
            self.model.add_no_overlap(intervals)
        for held, limit in zip(self._held, self.problem.limits.tolist(), strict=True):
            self.model.add_cumulative([i for i, _ in held], [parts for _, parts in held], limit)

    def _add_order(self) -> None:
        """Require microbatch order of F and I on each stage; with offloads, only of first F."""
        problem = self.problem
        for pipe, stage in np.ndindex(problem.placement.shape):
            microbatches = np.flatnonzero(problem.microbatch_pipes == pipe).tolist()
            ordered_phases = "F" if stage == 0 else ""
            for letter in "FI" if self.has_microbatch_order else ordered_phases:
                for first, second in itertools.pairwise(microbatches):
                    first_end = self.end(letter, (stage, first))
                    self.model.add(self.start[letter][stage, second] >= first_end)
            if self.has_microbatch_order:
                self._add_order_of_weight_grads(stage, microbatches)
                # The cumulative resource implies the next constraints, but propagates them only
                # when starts are fixed. As an order of ops, they move bounds at once.
                worker = int(problem.placement[pipe, stage])
                order = memory_order(problem, stage, worker, len(microbatches))
                for microbatch, (num_inputs, _) in zip(microbatches, order, strict=True):
                    if num_inputs:
                        gradient_end = self._input_end[stage, microbatches[num_inputs - 1]]
                        self.model.add(self.start["F"][stage, microbatch] >= gradient_end)

    def _add_order_of_weight_grads(self, stage: int, microbatches: list[int]) -> None:
        """Require W of split backwards to run in microbatch order, after all earlier gradients."""
        # `last_end` is not before the end of any earlier W or B.
        last_end: cp_model.LinearExprT = 0
        for microbatch in microbatches:
            key = stage, microbatch
            gradient_end, is_after = self._gradient_end[key], self.start["W"][key] >= last_end
            if key not in self.is_unsplit:
                self.model.add(is_after)
                last_end = gradient_end
                continue
            self.model.add(is_after).only_enforce_if(~self.is_unsplit[key])
            new_last_end = self._time("")
            self.model.add(new_last_end >= gradient_end)
            self.model.add(new_last_end >= last_end)
            last_end = new_last_end

    def _add_objective(self) -> None:
        """Bound the objective from below by the work, the last ops and the tails of all workers."""
        problem, model, total = self.problem, self.model, self.objective
        work = problem.forward + problem.gradient
        # microbatches that may be the first on a worker; in microbatch order, the first of a pipe
        first_microbatches = [*range(problem.num_microbatches)]
        if self.has_microbatch_order:
            first_microbatches = np.unique(problem.microbatch_pipes, return_index=True)[1].tolist()
        for worker in range(problem.num_workers):
            worker_ops = [(s, m) for s, m in self._ops() if self._worker(s, m) == worker]
            first_starts = [self.start["F"][s, m] for s, m in worker_ops if m in first_microbatches]
            last_ops = (op for op in worker_ops if self._may_be_last(*op))
            last_gradients = [(op[0], self._gradient_end[op]) for op in last_ops]
            busy = int(sum(work[s] for s, _ in worker_ops))
            if problem.objective == "span":
                begin = self._time("")
                model.add_min_equality(begin, first_starts)
                for _, end in last_gradients:
                    model.add(total >= end - begin)
                model.add(total >= busy)
                continue
            updates = int(problem.update[sorted({s for s, _ in worker_ops})].sum())
            for stage, end in last_gradients:
                model.add(total >= end + max(int(problem.step_end[stage]), updates))
            if len(first_starts) == 1:
                model.add(total >= first_starts[0] + busy + updates)
        if problem.objective == "makespan" and problem.all_reduce.any():
            self._add_all_reduces()
        if problem.objective == "makespan":
            for stage, microbatch in self._ops():
                tail = int(self._paths.tail[self._pipe(microbatch), stage])
                model.add(total >= self._input_end[stage, microbatch] + tail)

    def _may_be_last(self, stage: int, microbatch: int) -> bool:
        """Return whether the gradient of a microbatch may be the last of its stage and pipe."""
        if not self.has_microbatch_order or self.is_unsplit:
            return True
        later_pipes = self.problem.microbatch_pipes[microbatch + 1 :]
        return bool((later_pipes != self._pipe(microbatch)).all())

    def _add_all_reduces(self) -> None:
        """Add an all-reduce after all gradients of each stage; a worker runs one at a time."""
        problem, model = self.problem, self.model
        intervals_by_worker: dict[int, list[Interval]] = {}
        for stage, duration in enumerate(problem.all_reduce.tolist()):
            begin = self._time("")
            for microbatch in range(problem.num_microbatches):
                model.add(begin >= self._gradient_end[stage, microbatch])
            interval = model.new_fixed_size_interval_var(begin, duration, "")
            for worker in np.unique(problem.placement[:, stage]).tolist():
                intervals_by_worker.setdefault(worker, []).append(interval)
            model.add(self.objective >= begin + duration + int(problem.update[stage]))
        for intervals in intervals_by_worker.values():
            model.add_no_overlap(intervals)

    def hint(self, plan: Plan, model: cp_model.CpModel | None = None) -> None:
        """Add a plan as a hint for the solver, to this model or to `model`, a copy of it."""
        model = model or self.model
        for letter, variables in self.start.items():
            starts = plan.starts[letter]
            for key, variable in variables.items():
                start = plan.forward[key] if starts[key] == NEVER else starts[key]
                model.add_hint(variable, int(start))
        for key, is_out in self.is_offloaded.items():
            model.add_hint(is_out, bool(plan.offload[key] != NEVER))
        for key, is_whole in self.is_unsplit.items():
            model.add_hint(is_whole, bool(plan.whole[key]))

    def end(self, letter: str, key: Key) -> cp_model.LinearExprT:
        """Return the end of an op; the end of B counts as that of I."""
        ends = {"I": self._input_end, "W": self._gradient_end}
        if letter in ends:
            return ends[letter][key]
        return self.start[letter][key] + int(self.problem.times[Phase[letter]][key[0]])

    def plan(self, solution: "cp_model.CpSolver | cp_model.CpSolverSolutionCallback") -> Plan:
        """Return a solution of the solver as a plan."""
        shape = self.problem.num_stages, self.problem.num_microbatches
        starts = {letter: np.full(shape, NEVER, np.int64) for letter in "FIWOL"}
        whole = np.zeros(shape, bool)
        for key, is_whole in self.is_unsplit.items():
            whole[key] = solution.boolean_value(is_whole)
        for letter, variables in self.start.items():
            for key, variable in variables.items():
                if letter not in "OL" or solution.boolean_value(self.is_offloaded[key]):
                    starts[letter][key] = solution.value(variable)
        return Plan.from_starts(starts, whole)


# (better plan, or None if only the bound is new; lower bound [units])
PlanAndBound = tuple[Plan | None, int]


class _Listener(cp_model.CpSolverSolutionCallback):
    def __init__(
        self,
        model: ScheduleModel,
        tell: Callable[[PlanAndBound], None],
        progress: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._model, self._tell, self._progress = model, tell, progress

    def on_solution_callback(self) -> None:
        self._progress(self.deterministic_time)
        self._tell((self._model.plan(self), round_up(self.best_objective_bound)))


def round_up(bound: float) -> int:
    """Round a bound up to an integer, because plans have integer lengths."""
    return math.ceil(bound - 1e-6)


def search(
    model: ScheduleModel, budget: Budget, num_threads: int
) -> Generator[PlanAndBound, None, None]:
    """Solve a model, and yield new plans and bounds; stop if the iterator is closed."""
    solver = budget.new_solver(num_threads)

    def progress(work_done: float) -> None:
        budget.meter.under_way = SOLVER * work_done / num_threads

    def solve(tell: Callable[[PlanAndBound], None]) -> None:
        solver.best_bound_callback = lambda bound: tell((None, round_up(bound)))
        listener = _Listener(model, tell, progress)
        status = budget.solve(solver, model.model, model.num_ops, listener=listener)
        has_bound = status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN)
        bound = round_up(solver.best_objective_bound) if has_bound else 0
        tell((None, bound))

    return merge_progress([solve], solver.stop_search)


def single_stage(problem: Problem, pipe: int, stage: int) -> Problem:
    """Reduce a problem to one stage; delays replace the stages before and after this stage."""
    # The new problem has three stages: an empty stage, this stage, and an empty stage.
    count = int((problem.microbatch_pipes == pipe).sum())
    head, trip, tail = (int(times[pipe, stage]) for times in paths(problem))
    if problem.objective == "span":  # the span of this stage's worker alone
        head = tail = 0
    stage_fields: dict[str, Any] = {}
    for name in (*OP_TIMES, *HOST_TIMES, *STEP_END_TIMES, "sizes", "weight_sizes"):
        values = getattr(problem, name)
        stage_fields[name] = None if values is None else np.array([0, int(values[stage]), 0])
    lag = np.array([[[head, trip]], [[tail, 0]]])  # trip: to the last stage and back
    return dataclasses.replace(
        problem,
        placement=np.arange(3)[None],
        microbatch_pipes=np.zeros(count, np.int64),
        **stage_fields,
        lag=lag,
        transmit=np.zeros_like(lag),
        host_links=(),
        limits=np.array([1, int(problem.limits[problem.placement[pipe, stage]]), 1]),
    )


def relaxed_bound(
    problem: Problem, stage: int, horizon: int, budget: Budget, num_threads: int
) -> int:
    """Return a lower bound on the objective from a search of one stage alone [units]."""
    model = ScheduleModel(single_stage(problem, pipe=0, stage=stage), horizon)
    return max((bound for _, bound in search(model, budget, num_threads)), default=0)
