// Ways from one op of a schedule to another: each gives an op, or -1 where there is none.

/** What an op waited for, or what waited for it. */
export function along(schedule, op, direction) {
  if (op < 0) return -1;
  if (direction > 0) return schedule.awaiting(op);
  return schedule.waits(op).find((wait) => wait.isLast && wait.op >= 0)?.op ?? -1;
}

/** The op before or behind in the row; from nothing the first of all. */
export function inRow(schedule, op, direction) {
  const worker = op < 0 ? 0 : schedule.ops.worker[op];
  if (worker < 0) return -1;
  const lane = schedule.lanes[worker][op >= 0 && schedule.isBeside(op) ? "beside" : "compute"];
  return lane[op < 0 ? 0 : lane.indexOf(op) + direction] ?? -1;
}

/** The next op in time that was found, or of the critical path where nothing is looked for. */
export function found(schedule, op, direction) {
  const { op: nodeOf } = schedule.program;
  const isWanted = (each) =>
    nodeOf[each] > 0 && (schedule.found ? schedule.found[each] : schedule.isCritical[nodeOf[each]]);
  const wanted = [...schedule.ops.phase.keys()].filter(isWanted);
  wanted.sort((one, other) => schedule.start(one) - schedule.start(other) || one - other);
  if (wanted.length === 0) return -1;
  const place = wanted.indexOf(op);
  if (place < 0) return wanted.at(direction > 0 ? 0 : -1);
  return wanted.at((place + direction) % wanted.length);
}
