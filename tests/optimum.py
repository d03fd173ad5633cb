"""The shortest schedule by trying every decision: an independent reference for tiny problems.

Plain Python, no solver, no table, no order assumed: time goes from event to event, and at each a
worker starts any op that is ready and has room, or waits; a host link does so with offloads and
loads. Backwards are split or whole, each as it pays, and microbatches overtake each other. In a
shortest schedule whose ops are moved as early as they can, each starts at time 0, where another op
ends or starts, or where a message arrives: no decision is left out. Only where one link carries
messages of several stages, first come first served, may a later start be better: there some
schedules are left out, and those that are found are schedules all the same.

A state is what the rest of the run depends on. One that was left without success at some time need
not be looked at again at that time or later, and one whose work cannot end in time is left at once.
"""

import operator
import sys
from dataclasses import dataclass
from itertools import permutations, product

NEXT = {"": "F", "F": "IBO", "FO": "L", "FOL": "IB", "FI": "W", "FOLI": "W"}
"""Ops that may follow those of one stage and microbatch; what is not here is over."""


@dataclass(frozen=True)
class Pipes:
    """A tiny problem, its times by stage, pipe and boundary; all numbers are exact.

    `weight_part` is what W needs of an activation; `times` has no O where nothing may leave.
    """

    placement: tuple
    microbatch_pipes: tuple
    times: dict
    lag: list
    transmit: list
    all_reduce: tuple
    update: tuple
    sizes: tuple
    weight_part: tuple
    limits: tuple
    host_links: tuple = ()


class TooManyStates(Exception):
    """The problem is not as tiny as was thought."""


class Search:
    """Looks for a schedule that ends before a given time."""

    def __init__(self, pipes, before, maximum=None):
        self.pipes, self.before, self.max_states = pipes, before, maximum
        self.stages, self.count = len(pipes.sizes), len(pipes.microbatch_pipes)
        self.workers = len(pipes.limits)
        self.ops = [(s, m) for s in range(self.stages) for m in range(self.count)]
        self.seen, self.states = {}, 0
        # machines: the workers, then the host links
        hosts = {w: (w,) for w in range(self.workers)}
        hosts |= {w: tuple(group) for group in pipes.host_links for w in group}
        groups = sorted(set(hosts.values())) if "O" in pipes.times else []
        self.hosts = {w: self.workers + groups.index(g) for w, g in hosts.items() if groups}
        self.machines = self.workers + len(groups)
        self.least_back = [min(pipes.times[x][s] for x in "IB") for s in range(self.stages)]
        halves = zip(pipes.times["I"], pipes.times["W"], pipes.times["B"], strict=True)
        self.gradient = [min(i + w, b) for i, w, b in halves]
        # sender and receiver of each boundary of a pipe, forth and back
        ends = [
            row[boundary : boundary + 2][:: 1 - 2 * direction]
            for row, direction in product(pipes.placement, (0, 1))
            for boundary in range(self.stages - 1)
        ]
        self.links = sorted(set(ends))

    def worker(self, stage, microbatch):
        return self.pipes.placement[self.pipes.microbatch_pipes[microbatch]][stage]

    def run(self):
        """The starts {(letter, stage, microbatch): time} of a schedule that ends before, or None."""
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)
        try:
            done = dict.fromkeys(self.ops, "")
            ends = dict.fromkeys(self.ops, 0)
            ready = {(0, m): 0 for m in range(self.count)}
            result = self.decide(0, 0, done, ends, ready, {}, (0,) * self.machines, {}, {})
        finally:
            sys.setrecursionlimit(limit)
        return result

    def decide(self, now, machine, done, ends, ready, back, free, links, starts):
        """Let the machines from `machine` on start something now or wait; then time goes on."""
        if machine == self.machines:
            return self.wait(now, done, ends, ready, back, free, links, starts)
        if free[machine] <= now:
            for letter, key in self.choices(now, machine, done, ends, ready, back, free):
                end = now + self.pipes.times[letter][key[0]]
                new_done, new_ends = done | {key: done[key] + letter}, ends | {key: end}
                new_ready, new_back, new_links = self.send(letter, key, end, ready, back, links)
                new_free = (*free[:machine], end, *free[machine + 1 :])
                # what takes no time may let others start at this moment
                again = 0 if end == now else machine + 1
                state = new_done, new_ends, new_ready, new_back, new_free, new_links
                result = self.decide(now, again, *state, starts | {(letter, *key): now})
                if result:
                    return result
        return self.decide(now, machine + 1, done, ends, ready, back, free, links, starts)

    def choices(self, now, machine, done, ends, ready, back, free):
        for key in self.ops:
            worker, stage = self.worker(*key), key[0]
            for letter in NEXT.get(done[key], "") if ends[key] <= now else "":
                if letter not in self.pipes.times:
                    continue
                if machine != (self.hosts[worker] if letter in "OL" else worker):
                    continue
                if letter == "F" and not self.may_begin(now, key, done, ready):
                    continue
                if letter in "IB" and back.get(key, now + 1) > now:
                    continue
                if letter in "FL" and not self.has_room(now, worker, stage, done, ends):
                    continue
                # W and O take no memory: they are no better later than they can be
                if letter not in "WO" or max(free[machine], ends[key]) == now:
                    yield letter, key

    def may_begin(self, now, key, done, ready):
        stage, microbatch = key
        stage_pipe = self.pipes.microbatch_pipes
        earlier = [m for m in range(microbatch) if stage_pipe[m] == stage_pipe[microbatch]]
        named = stage > 0 or not earlier or done[0, earlier[-1]] != ""
        return named and ready.get(key, now + 1) <= now

    def has_room(self, now, worker, stage, done, ends):
        """Return whether an activation more fits; at one moment releases come before takes."""
        held = self.pipes.sizes[stage]
        for key in self.ops:
            letters = done[key]
            if not letters or self.worker(*key) != worker:
                continue
            size, stored = self.pipes.sizes[key[0]], self.pipes.weight_part[key[0]]
            before = stored if letters[-1] == "W" else size
            after = {"F": size, "L": size, "O": 0, "B": 0, "I": stored, "W": 0}[letters[-1]]
            held += before if ends[key] > now else after
        return held <= self.pipes.limits[worker]

    def send(self, letter, key, end, ready, back, links):
        """Send the output of an op to the ops that need it: at once on the same worker."""
        stage, microbatch = key
        if letter == "F" and stage == self.stages - 1:
            return ready, back | {key: end}, links
        if letter not in "FIB" or (letter in "IB" and stage == 0):
            return ready, back, links
        pipe, direction = self.pipes.microbatch_pipes[microbatch], "FIB".index(letter) > 0
        boundary, other = (stage - 1, stage - 1) if direction else (stage, stage + 1)
        link = self.worker(*key), self.worker(other, microbatch)
        arrives = end
        if link[0] != link[1]:
            transmit = self.pipes.transmit[direction][pipe][boundary]
            if transmit:
                arrives = max(end, links.get(link, 0)) + transmit
                links = links | {link: arrives}
            arrives += self.pipes.lag[direction][pipe][boundary]
        if direction:
            return ready, back | {(other, microbatch): arrives}, links
        return ready | {(other, microbatch): arrives}, back, links

    def wait(self, now, done, ends, ready, back, free, links, starts):
        """Go on to the next event."""
        if all(letters[-1:] in ("W", "B") for letters in done.values()):
            return starts if self.end(ends) < self.before else None
        if not self.in_time(now, done, ends, ready, back, free):
            return None
        events = [*ends.values(), *ready.values(), *back.values(), *free]
        following = min((at for at in events if at > now), default=None)
        if following is None:
            return None

        state = done, ends, ready, back, free, links
        others, remaining = self.left_at(following, *state)
        if any(all(map(operator.le, other, remaining)) for other in others):
            return None
        result = self.decide(following, 0, *state, starts)
        if result is None:  # only now: to wait is to go on in a state that is no better
            others[:] = [o for o in others if not all(map(operator.le, remaining, o))]
            others.append(remaining)
            self.states += 1
            if self.max_states is not None and self.states > self.max_states:
                raise TooManyStates
        return result

    def left_at(self, now, done, ends, ready, back, free, links):
        """States that were left where the same was done, and this one: times, of which none helps."""
        # what follows the last gradients depends on when they ended, however long ago that was
        step_end = any(self.pipes.all_reduce) or any(self.pipes.update)
        oldest = 0 if step_end else now
        alike = []
        for m in range(self.count):
            keys = [(s, m) for s in range(self.stages)]
            letters = [done[key] for key in keys]
            times = [max(oldest, ends[key]) for key in keys]
            times += [max(now, at[key]) for at in (ready, back) for key in keys if key in at]
            alike.append((self.pipes.microbatch_pipes[m], letters, times))
        alike.sort()
        over = [max(now, at) for at in (*free, *(links.get(link, 0) for link in self.links))]
        remaining = now, *over, *(at for *_, times in alike for at in times)
        return self.seen.setdefault(tuple((p, *letters) for p, letters, _ in alike), []), remaining

    def in_time(self, now, done, ends, ready, back, free):
        """Return whether what is left can end in time: the work of each worker, the way of each op."""
        times, pipes, last = self.pipes.times, self.pipes, self.stages - 1
        earliest = [[] for _ in range(self.workers)]  # starts of what is left
        work = [0] * self.workers
        for microbatch in range(self.count):
            at, pipe = now, pipes.microbatch_pipes[microbatch]
            for stage in range(self.stages):
                key, worker = (stage, microbatch), self.worker(stage, microbatch)
                if not done[key]:
                    at = max(at, ready.get(key, 0))
                    earliest[worker].append(at)
                    work[worker] += times["F"][stage]
                    at += times["F"][stage]
                    if stage < last:
                        at += self.hop(0, pipe, stage)
            for stage in reversed(range(self.stages)):
                key, worker = (stage, microbatch), self.worker(stage, microbatch)
                letters = done[key]
                if not ("I" in letters or "B" in letters):
                    at = max(at, back.get(key, 0), ends[key])
                    earliest[worker].append(at)
                    if at + self.gradient[stage] >= self.before:
                        return False
                    work[worker] += self.gradient[stage]
                    at += self.least_back[stage] + (self.hop(1, pipe, stage - 1) if stage else 0)
                elif letters[-1] == "I":
                    earliest[worker].append(ends[key])
                    work[worker] += times["W"][stage]
        busy = ((max(now, free[w], min(at)), w) for w, at in enumerate(earliest) if at)
        return all(first + work[worker] < self.before for first, worker in busy)

    def hop(self, direction, pipe, boundary):
        ends = self.pipes.placement[pipe][boundary : boundary + 2]
        if ends[0] == ends[1]:
            return 0
        lag, transmit = self.pipes.lag[direction], self.pipes.transmit[direction]
        return lag[pipe][boundary] + transmit[pipe][boundary]

    def end(self, ends):
        """End of the step: all-reduces one at a time on a worker, in the best order; updates."""
        pipes, last = self.pipes, {}
        holders = [{row[s] for row in pipes.placement} for s in range(self.stages)]
        over = [max(ends[s, m] for m in range(self.count)) for s in range(self.stages)]
        for (stage, microbatch), end in ends.items():
            worker = self.worker(stage, microbatch)
            last[worker] = max(last.get(worker, 0), end)
        whole, update = range(self.stages), pipes.update
        work = [sum(update[s] for s in whole if w in holders[s]) for w in range(self.workers)]
        updates = max(last.get(w, 0) + seconds for w, seconds in enumerate(work))
        best = []
        for order in permutations(whole) if any(pipes.all_reduce) else [whole]:
            free, latest = [0] * self.workers, updates
            for stage in order:
                begins = max(over[stage], *(free[w] for w in holders[stage]))
                for w in holders[stage]:
                    free[w] = begins + pipes.all_reduce[stage]
                latest = max(latest, begins + pipes.all_reduce[stage] + pipes.update[stage])
            best.append(latest)
        return min(best)


def schedule_before(pipes, before, limit=None):
    """Starts {(letter, stage, microbatch): time} of a schedule that ends before, or None."""
    return Search(pipes, before, limit).run()


def get_end(pipes, starts):
    search, ends = Search(pipes, 0), {}
    for (letter, *key), at in starts.items():
        if letter not in "OL":
            ends[tuple(key)] = max(ends.get(tuple(key), 0), at + pipes.times[letter][key[0]])
    return search.end(ends)
