"""What is left of exchanges that run beside compute: closed forms of small max-plus pipelines.

Links and compute are two resources that work at once, each one piece at a time and in order. The
longest path through equal pieces runs along one resource for all of them, or switches at its ends:
it is linear in where it switches, so that a few paths suffice. All arguments may be batched.
"""

from pipejax.costs import array_functions as xp
from pipejax.costs.precision import as_float
from pipejax.costs.system import Number


def exposed_buckets(
    exchange: Number, compute: Number, layers: Number, before: Number = 0.0
) -> Number:
    """Seconds by which exchanges of equal layers lengthen their compute.

    Every layer's weights are gathered before its compute (`before`), the next layer's during this
    one's; its gradients are exchanged after it (`exchange`). With g, c and a the seconds of one of
    L layers, links do g1 g2 a1 g3 a2 .. gL a(L-1) aL and compute does c1 .. cL, where c_l waits for
    g_l, and a_l for c_l. The longest path is one of

        g + L c + a                                     compute is never short of weights
        L (g + a) + [c - a if above 0] + [c - g if above 0]           links never rest

    The brackets replace a1 beside c1 by c1 itself, and g2 likewise at the other end. What ends
    after L c is exposed: a + max(0, (L - 1)(a - c)) with g = 0, as behind the last backward; the
    same in g with a = 0, as in FSDP's forward or a distributed optimizer's first forward.

    Seconds of all layers together.
    """
    exchange, compute, layers, before = map(as_float, (exchange, compute, layers, before))
    after, own, first = (seconds / layers for seconds in (exchange, compute, before))
    ends = xp.maximum(own - after, 0.0) + xp.maximum(own - first, 0.0)
    busy_links = xp.where(layers > 1, exchange + before + ends - compute, 0.0)
    return xp.maximum(first + after, busy_links)


def exposed_ring(exchange: Number, compute: Number, steps: Number) -> Number:
    """Seconds by which a ring exchange lengthens the compute on what it brings.

    Ring attention: in each of c steps an accelerator works on one part of the keys and values,
    and passes it on. Step k + 1 waits for step k and for the transfer that began with it, and
    transfers follow one another. The longest path has k transfers and c - k steps of compute: none
    or c - 1 of them.

    `exchange` is the seconds of the c - 1 transfers, `compute` those of all c steps.
    """
    exchange, compute, steps = map(as_float, (exchange, compute, steps))
    return xp.maximum(exchange - (steps - 1) / steps * compute, 0.0)
