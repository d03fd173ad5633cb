// A recorded run beside its replay: by how much each op started later than in the replay.

import { numCodes } from "./palette.js";

const ROUNDING = 1e-9; // of the makespan: smaller differences count as 0

/** Insert the recorded run of each replay before it. */
export function withRecorded(schedules) {
  return schedules.flatMap(({ recorded, ...schedule }) =>
    (recorded ? [{ ...schedule, ...recorded, forms: {} }, schedule] : [schedule]));
}

export class Residuals {
  constructor(ran, again, { phases, seconds }) {
    const ops = ran.ops.phase.length;
    Object.assign(this, {
      runs: [ran, again],
      late: new Float64Array(ops), // residual of each op [s]
      // codes of colours as of phases: the step of the scale, after all phases, and the place in it
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

  /** Whether both have run: the replay may not run under another link model. */
  get isThere() {
    return !this.runs[1].error;
  }

  /** Compute the residuals, and a scale from the least (at most 0) to the largest (at least 0). */
  compare() {
    if (!this.isThere) return;
    const [ran, again] = this.runs;
    const rounding = ROUNDING * ran.makespan;
    [this.low, this.high] = [0, 0];
    for (let op = 0; op < this.late.length; op++) {
      const late = ran.opStart[op] - again.opStart[op]; // NaN if the op does not run
      this.late[op] = Math.abs(late) < rounding ? 0 : late;
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
