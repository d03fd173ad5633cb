"""An event loop for tables whose kinds have rules of their own, written for their tests alone.

Ops are (letters, stage or worker, microbatch); rules are functions, not texts of a grammar.
"""

import re

_OP = re.compile(r"(\d*)([A-Za-z]+)(\d+)")


def parsed(rows):
    """Ops of each worker from the texts of a table; what is of a worker has its number as stage."""
    found = []
    for worker, row in enumerate(rows):
        ops = [_OP.fullmatch(text).groups() for text in row]
        found.append([(x, int(s) if s else f"w{worker}", int(m)) for s, x, m in ops])
    return found


def texts(table):
    """Texts of the ops of each worker."""
    return [[str(op) for cell in row for op in cell] for row in table.rows()]


def run(rows, waits, lasts, hop=0.0, net=(), together=()):
    """Start and end of every op.

    Args:
      rows: ops by worker, in order.
      waits: of an op, those that it waits for, each with whether a message leads from there.
      lasts: seconds by letters.
      hop: seconds of a message between workers.
      net: letters that run beside compute, in their own order.
      together: letters that start on all workers at once.
    """
    home = {op: w for w, row in enumerate(rows) for op in row}
    queues = [[op for op in row if (op[0] in net) == beside] for row in rows for beside in (0, 1)]
    free, start, end = [0.0] * len(queues), {}, {}
    while any(queues):
        heads = {queue[0]: k for k, queue in enumerate(queues) if queue}
        ready = {}
        for op in heads:
            group = [o for o in home if o[::2] == op[::2]] if op[0] in together else [op]
            needs = [(o, *each) for o in group for each in waits(*o)]
            if all(o in heads for o in group) and all(other in end for _, other, _ in needs):
                times = [end[b] + hop * (sent and home[b] != home[o]) for o, b, sent in needs]
                ready[op] = max([free[heads[o]] for o in group] + times), group
        assert ready, f"deadlock at {sorted(map(str, heads))}"
        op = min(ready, key=lambda each: ready[each][0])
        for each in ready[op][1]:
            k = heads[each]
            start[each] = ready[op][0]
            end[each] = free[k] = start[each] + lasts[each[0]]
            queues[k].pop(0)
    return start, end


def agree(found, start):
    """Whether a run of the library has these starts."""
    rows = texts(found.table)
    for w, row in enumerate(rows):
        held = found.table.phase[w].nonzero()[0]
        for op, slot in zip(parsed([[]] * w + [row])[w], held, strict=True):
            assert abs(found.start[w, slot] - start[op]) < 1e-9, op
