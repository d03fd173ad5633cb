// A recorded run beside its replay: how much later than in the replay each op started.

import { numCodes } from "./palette.js";

const ROUNDING = 1e-9; // of the makespan: less is none

/** What a page shows of its schedules: above a replay, its ops as they were recorded. */
export function withRecorded(schedules) {
  return schedules.flatMap(({ recorded, ...schedule }) =>
    (recorded ? [{ ...schedule, ...recorded, forms: {} }, schedule] : [schedule]));
}

export class Residuals {
  /** Find the recorded runs among schedules; each stands before its replay. */
  static join(schedules, scene) {
    schedules.forEach((schedule, k) => {
      if (schedule.starts) new Residuals(schedule, schedules[k + 1], scene);
    });
  }

  constructor(ran, again, { phases, seconds }) {
    const ops = ran.ops.phase.length;
    Object.assign(this, {
      runs: [ran, again],
      late: new Float64Array(ops),
      // as colours of phases: steps of the scale, which stand behind the phases, and how far in it
      isByPhase: false,
      code: new Int16Array(ops),
      depth: new Float64Array(ops),
      firstStep: numCodes(phases),
      steps: seconds.length - 1,
    });
    this.withCode = this.code;
    this.withDepth = this.depth;
    ran.residuals = again.residuals = this;
  }

  /** Whether both have run: under another link model the replay may not. */
  get isThere() {
    return !this.runs[1].error;
  }

  /** Compare both as they are now, and lay the scale from the least, 0 at most, to the largest. */
  compare() {
    if (!this.isThere) return;
    const [ran, again] = this.runs;
    const none = ROUNDING * ran.makespan;
    [this.low, this.high] = [0, 0];
    for (let op = 0; op < this.late.length; op++) {
      const late = ran.start(op) - again.start(op); // NaN of what does not run
      this.late[op] = Math.abs(late) < none ? 0 : late;
      if (this.late[op] < this.low) this.low = this.late[op];
      if (this.late[op] > this.high) this.high = this.late[op];
    }
    const scale = this.steps / (this.high - this.low || 1);
    for (let op = 0; op < this.late.length; op++) {
      const place = (this.late[op] - this.low) * scale || 0;
      const step = Math.min(this.steps - 1, Math.floor(place));
      this.code[op] = this.firstStep + step;
      this.depth[op] = place - step;
    }
  }
}
