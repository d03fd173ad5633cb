// Draws what workers hold over time: the chosen worker as a curve, over the most that any holds.

import { GUTTER } from "./bars.js";
import { writeHeld } from "./format.js";
import { memorySteps } from "./memory.js";

const HEIGHT = 84;
const TOP = 14;

export class Curves {
  constructor(canvas, schedule, palette) {
    Object.assign(this, { canvas, schedule, palette });
    this.context = canvas.getContext("2d", { alpha: false });
  }

  resize(width) {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this, { width, ratio });
    this.canvas.style.height = `${HEIGHT}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
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
    const { context, palette, ratio, width } = this;
    const steps = this.steps(unit);
    const fullest = steps.reduce((best, each, k) => (each.peak > steps[best].peak ? k : best), 0);
    const chosen = worker >= 0 ? worker : fullest;
    const limit = this.limit(unit, chosen);
    const most = Math.max(...steps.map((each) => each.peak), limit ?? 0) || 1;
    const axis = view.over(GUTTER, width - GUTTER);
    const y = (held) => HEIGHT - 1 - (held / most) * (HEIGHT - TOP - 4);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = palette.paper;
    context.fillRect(0, 0, width, HEIGHT);
    context.fillStyle = palette.row;
    context.fillRect(GUTTER, TOP, width - GUTTER, HEIGHT - TOP);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, HEIGHT);
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
    for (let x = 0; x < columns; x++) {
      if (most[x] > 0) context.fillRect(axis.left + x, y(most[x]), 1, y(0) - y(most[x]));
    }
  }

  /** One worker: as steps, or where these are narrower than a pixel from the least to the most. */
  drawCurve(axis, { time, held }, y) {
    const { context, palette } = this;
    context.strokeStyle = palette.held;
    context.lineWidth = 1.5;
    context.beginPath();
    let k = Math.max(0, firstAfter(time, axis.from) - 1);
    let x = axis.x(time[k] ?? 0);
    let level = 0;
    context.moveTo(Math.max(x, axis.left), y(k > 0 ? held[k] : 0));
    for (; k < time.length && time[k] <= axis.to; k++) {
      const next = axis.x(time[k]);
      if (next - x >= 0.5 || k === 0) {
        context.lineTo(next, y(level));
        x = next;
      }
      level = held[k];
      context.lineTo(x, y(level));
    }
    context.lineTo(axis.x(Math.min(axis.to, this.schedule.makespan)), y(level));
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
    const { context, palette, schedule } = this;
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
      context.fillText("too much", GUTTER + width + 8, 10);
    }
    context.fillStyle = palette.quiet;
    context.textAlign = "right";
    context.fillText(writeHeld(most, sized), GUTTER - 8, TOP + 10);
    context.fillText("0", GUTTER - 8, HEIGHT - 2);
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
