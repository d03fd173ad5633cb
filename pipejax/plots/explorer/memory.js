// What workers hold over time, from the changes that Python's memory ledger lists.

const UNCOUNTED = new Set(["O", "L"]); // activations in flight stay in flight on the host

/**
 * Steps of every worker at the times of a run: {time, held, peak, peakAt} each.
 * `unit` is "flight" for activations in flight, or "memory".
 */
export function memorySteps(schedule, unit) {
  const { moment, place, change, worker, size } = schedule.held;
  const steps = [];
  for (let begin = 0; begin < moment.length || steps.length < schedule.workers; ) {
    const own = steps.length;
    let end = begin;
    while (end < moment.length && worker[end] === own) end++;
    steps.push(stepsOf(schedule, moment, place, change, size, begin, end, unit));
    begin = end;
  }
  return steps;
}

function stepsOf(schedule, moment, place, change, size, begin, end, unit) {
  const changes = [];
  let inOrder = true;
  for (let k = begin; k < end; k++) {
    const op = moment[k] >> 1; // the lowest bit says which end of it
    if (unit === "flight" && UNCOUNTED.has(schedule.letter(op))) continue;
    const at = moment[k] & 1 ? schedule.finish(op) : schedule.start(op);
    const by = unit === "flight" ? change[k] : change[k] * size[place[k]];
    if (changes.length && at < changes[changes.length - 2]) inOrder = false;
    changes.push(at, by);
  }
  return levels(inOrder ? changes : sorted(changes));
}

function sorted(changes) {
  const order = Array.from({ length: changes.length / 2 }, (_, k) => k);
  order.sort((one, other) => changes[2 * one] - changes[2 * other]);
  return order.flatMap((k) => [changes[2 * k], changes[2 * k + 1]]);
}

/** Sum up changes; at one moment releases come before takes, so only the last level counts. */
function levels(changes) {
  const time = [];
  const held = [];
  let level = 0;
  let peak = 0;
  let peakAt = 0;
  for (let k = 0; k < changes.length; k += 2) {
    level += changes[k + 1];
    if (k + 2 < changes.length && changes[k + 2] === changes[k]) continue;
    time.push(changes[k]);
    held.push(level);
    if (level > peak * (1 + 1e-12)) {
      peak = level;
      peakAt = changes[k];
    }
  }
  return { time: Float64Array.from(time), held: Float64Array.from(held), peak, peakAt };
}
