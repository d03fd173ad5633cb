"""The shortest schedule by trying every order: an independent reference for tiny problems.

Plain Python: for each worker all orders of F, I and W in which microbatches keep their order and
an op comes after those of its own microbatch that it needs; each combination is run op by op, and
those that exceed a memory limit are left out.
"""

from fractions import Fraction
from itertools import product


def orders(microbatches):
    """All orders of one worker: each kind in the order of microbatches, F before I before W."""
    found = []

    def extend(row, counts):
        if len(row) == 3 * microbatches:
            found.append(tuple(row))
        for k, letter in enumerate("FIW"):
            if counts[k] < (counts[k - 1] if k else microbatches):
                more = list(counts)
                more[k] += 1
                extend([*row, (letter, counts[k])], more)

    extend([], [0, 0, 0])
    return found


def level(row, share):
    """Most activations that a row holds at once; an op frees at its end."""
    held = most = Fraction(0)
    for letter, _ in row:
        if letter == "F":
            held += 1
            most = max(most, held)
        else:
            held -= 1 - share if letter == "I" else share
    return most


def run(rows, times, message):
    """End of the last op, or None where the rows block each other."""
    end, free, at = {}, [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for s, row in enumerate(rows):
            while at[s] < len(row):
                letter, m = row[at[s]]
                ready = free[s]
                if letter == "F" and s:
                    needs, lag = ("F", s - 1, m), message
                elif letter == "I" and s < len(rows) - 1:
                    needs, lag = ("I", s + 1, m), message
                elif letter == "F":
                    needs, lag = None, 0
                else:
                    needs, lag = ({"I": "F", "W": "I"}[letter], s, m), 0
                if needs is not None:
                    if needs not in end:
                        break
                    ready = max(ready, end[needs] + lag)
                free[s] = end[letter, s, m] = ready + times[letter][s]
                at[s] += 1
                moved = True
    done = all(k == len(row) for k, row in zip(at, rows, strict=True))
    return max(free) if done else None


def shortest(workers, microbatches, times, message, limits, share):
    """The least makespan over all orders that keep the limits."""
    choices = [
        [row for row in orders(microbatches) if level(row, share) <= limit] for limit in limits
    ]
    ends = (run(rows, times, message) for rows in product(*choices))
    return min((end for end in ends if end is not None), default=None)
