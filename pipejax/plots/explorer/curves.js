// Draws what workers hold over time: the chosen worker as a curve, over the most that any holds.

import { GUTTER } from "./bars.js";
import { writeHeld } from "./format.js";
import { memorySteps } from "./memory.js";

const TOP = 14;

export class Curves {
  constructor(canvas, schedule, palette) {
    Object.assign(this, { canvas, schedule, palette });
    this.context = canvas.getContext("2d", { alpha: false });
  }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this, { width, height, ratio });
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
  }

  /** Steps of all workers, of the run that is shown. */
  steps(unit) {
    const { schedule } = this;
    if (schedule.curves?.unit !== unit) {
      schedule.curves = { unit, steps: memorySteps(schedule, unit) };
    }
    return schedule.curves.steps;
  }

  draw(view, { unit, worker }) {
    const { context, palette, ratio, width, height } = this;
    const steps = this.steps(unit);
    const fullest = steps.reduce((best, each, k) => (each.peak > steps[best].peak ? k : best), 0);
    const chosen = worker >= 0 ? worker : fullest;
    const limit = this.limit(unit, chosen);
    const most = Math.max(...steps.map((each) => each.peak), limit ?? 0) || 1;
    const axis = view.over(GUTTER, width - GUTTER);
    const y = (held) => height - 1 - (held / most) * (height - TOP - 4);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = palette.paper;
    context.fillRect(0, 0, width, height);
    context.fillStyle = palette.row;
    context.fillRect(GUTTER, TOP, width - GUTTER, height - TOP);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    this.drawEnvelope(axis, steps, y);
    this.drawCurve(axis, steps[chosen], y);
    if (limit !== null) this.drawLimit(limit, y);
    context.restore();
    this.drawText(unit, chosen, steps[chosen], most, limit);
  }

  limit(unit, worker) {
    const { limits } = this.schedule.memory;
    return unit === "flight" || !limits ? null : limits[worker];
  }

  /** The most that any worker holds, by pixel. */
  drawEnvelope(axis, steps, y) {
    const { context, palette } = this;
    const columns = Math.ceil(axis.width);
    const most = new Float64Array(columns);
    for (const { time, held } of steps) {
      for (let k = firstAfter(time, axis.from) - 1; k < time.length && time[k] <= axis.to; k++) {
        if (k < 0) continue;
        const end = k + 1 < time.length ? time[k + 1] : axis.to;
        const last = Math.min(columns - 1, Math.floor((end - axis.from) * axis.scale));
        const first = Math.max(0, Math.floor((time[k] - axis.from) * axis.scale));
        for (let x = first; x <= last; x++) if (held[k] > most[x]) most[x] = held[k];
      }
    }
    context.fillStyle = palette.envelope;
    for (let x = 0, first = 0; x < columns; x++) {
      if (most[x] === most[x + 1]) continue; // one rectangle for all columns of one height
      if (most[x] > 0) context.fillRect(axis.left + first, y(most[x]), x + 1 - first, y(0) - y(most[x]));
      first = x + 1;
    }
  }

  /** One worker: as steps, or where these are narrower than a pixel from the least to the most. */
  drawCurve(axis, { time, held }, y) {
    const { context, palette } = this;
    const end = Math.min(axis.to, this.schedule.makespan);
    context.strokeStyle = palette.held;
    context.lineWidth = 1.5;
    context.beginPath();
    let k = firstAfter(time, axis.from) - 1;
    let level = k >= 0 ? held[k] : 0;
    context.moveTo(axis.left, y(level));
    for (k++; k < time.length && time[k] <= end; k++) {
      const x = axis.x(time[k]);
      context.lineTo(x, y(level));
      let [least, most] = [level, level];
      for (; ; k++) {
        level = held[k];
        if (level < least) least = level;
        if (level > most) most = level;
        if (k + 1 >= time.length || axis.x(time[k + 1]) - x >= 1) break;
      }
      if (least < level) context.lineTo(x, y(least));
      if (most > level) context.lineTo(x, y(most));
      context.lineTo(x, y(level));
    }
    context.lineTo(axis.x(end), y(level));
    context.stroke();
  }

  drawLimit(limit, y) {
    const { context, palette, width } = this;
    context.strokeStyle = palette.limit;
    context.lineWidth = 1;
    context.setLineDash([5, 3]);
    context.beginPath();
    context.moveTo(GUTTER, y(limit));
    context.lineTo(width, y(limit));
    context.stroke();
    context.setLineDash([]);
  }

  drawText(unit, worker, { peak }, most, limit) {
    const { context, palette, schedule, height } = this;
    const sized = unit === "flight" ? "activations" : schedule.memory.unit;
    const what = unit === "flight" ? "in flight" : sized === "bytes" ? "activation memory" : "held";
    context.font = `11px ${palette.font}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillStyle = palette.quiet;
    const parts = [`${what}, worker ${worker}: peak ${writeHeld(peak, sized)}`];
    if (limit !== null) parts.push(`limit ${writeHeld(limit, sized)}`);
    context.fillText(parts.join(", "), GUTTER, 10);
    if (limit !== null && peak > limit) {
      const { width } = context.measureText(parts.join(", "));
      context.fillStyle = palette.limit;
      context.fillText("over the limit", GUTTER + width + 8, 10);
    }
    context.fillStyle = palette.quiet;
    context.textAlign = "right";
    context.fillText(writeHeld(most, sized), GUTTER - 8, TOP + 10);
    context.fillText("0", GUTTER - 8, height - 2);
  }
}

/** Place of the first time after one. */
function firstAfter(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}
