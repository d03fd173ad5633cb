// Drawings beside the rows: memory over time, and the time axis above all schedules.

import { Drawing, GUTTER } from "./bars.js";
import { tickLabels, ticks, writeHeld, writeTime } from "./text.js";

const TOP = 14; // height of the text [pixels]
const NEAR = 2; // limit over peak up to which a limit is drawn

/** Memory over time: the chosen worker as a curve, over the maximum of all workers. */
export class Curves extends Drawing {
  draw(view, { unit, worker }) {
    const { context, palette, width, height } = this;
    const steps = this.schedule.memorySteps(unit);
    const fullest = steps.reduce((best, curve, k) => (curve.peak > steps[best].peak ? k : best), 0);
    const chosen = worker >= 0 ? worker : fullest;
    const { limits } = this.schedule.memory;
    const limit = unit === "flight" || !limits ? null : limits[chosen];
    const peak = Math.max(...steps.map((curve) => curve.peak)) || 1;
    // a limit far above the peak would flatten the curve: it is written, not drawn
    const isNear = limit !== null && limit <= NEAR * peak;
    const top = isNear ? Math.max(peak, limit) : peak;
    const axis = this.begin(view, palette.paper);
    const y = (held) => height - 1 - (held / top) * (height - TOP - 4);
    context.fillStyle = palette.row;
    context.fillRect(GUTTER, TOP, width - GUTTER, height - TOP);
    this.clip();
    this.drawEnvelope(axis, steps, y);
    this.drawCurve(axis, steps[chosen], y);
    if (isNear) this.drawLimit(limit, y);
    context.restore();
    this.drawText(unit, chosen, steps[chosen], top, limit, isNear);
  }

  /** Draw the maximum of all workers, by pixel. */
  drawEnvelope(axis, steps, y) {
    const { context, palette } = this;
    const columns = Math.ceil(axis.width);
    const maxima = new Float64Array(columns);
    for (const { time, held } of steps) {
      for (let k = firstAfter(time, axis.from) - 1; k < time.length && time[k] <= axis.to; k++) {
        if (k < 0) continue;
        const end = k + 1 < time.length ? time[k + 1] : axis.to;
        const last = Math.min(columns - 1, Math.floor((end - axis.from) * axis.scale));
        const first = Math.max(0, Math.floor((time[k] - axis.from) * axis.scale));
        for (let x = first; x <= last; x++) if (held[k] > maxima[x]) maxima[x] = held[k];
      }
    }
    context.fillStyle = palette.envelope;
    for (let x = 0, first = 0; x < columns; x++) {
      if (maxima[x] === maxima[x + 1]) continue; // one rectangle for all columns of one height
      if (maxima[x] > 0) context.fillRect(axis.left + first, y(maxima[x]), x + 1 - first, y(0) - y(maxima[x]));
      first = x + 1;
    }
  }

  /** Draw one worker as steps; steps within one pixel become a line from the least to the most. */
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
      let [low, high] = [level, level];
      for (; ; k++) {
        level = held[k];
        if (level < low) low = level;
        if (level > high) high = level;
        if (k + 1 >= time.length || axis.x(time[k + 1]) - x >= 1) break;
      }
      if (low < level) context.lineTo(x, y(low));
      if (high > level) context.lineTo(x, y(high));
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

  drawText(unit, worker, { peak }, top, limit, isNear) {
    const { context, palette, schedule, height } = this;
    const heldUnit = unit === "flight" ? "activations" : schedule.memory.unit;
    const title = unit === "flight" ? "in flight" : heldUnit === "bytes" ? "activation memory" : "held";
    context.font = `11px ${palette.font}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillStyle = palette.quiet;
    const parts = [`${title}, worker ${worker}: peak ${writeHeld(peak, heldUnit)}`];
    if (limit !== null) parts.push(`limit ${writeHeld(limit, heldUnit)}${isNear ? "" : ", far above"}`);
    let label = parts.join(", ");
    if (context.measureText(label).width > this.width - GUTTER) {
      const of = limit === null ? "" : ` of ${writeHeld(limit, heldUnit)}`;
      label = `worker ${worker}: ${writeHeld(peak, heldUnit)}${of}`; // in a narrow window
    }
    context.fillText(label, GUTTER, 10);
    if (limit !== null && peak > limit) {
      const { width } = context.measureText(label);
      context.fillStyle = palette.limit;
      context.fillText("over the limit", GUTTER + width + 8, 10);
    }
    context.fillStyle = palette.quiet;
    context.textAlign = "right";
    context.fillText(writeHeld(top, heldUnit), GUTTER - 8, TOP + 10);
    context.fillText("0", GUTTER - 8, height - 2);
  }
}

/** Index of the first time after a time. */
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

const HEIGHT = 34;
export const TRACK = 7; // height of the scroll bar

/** The time axis above all schedules: marks, the place of the pointer, and a scroll bar. */
export class Axis extends Drawing {
  marked = null; // [start, end] in pixels while a range is marked

  resize(width) {
    super.resize(width, HEIGHT);
  }

  draw(view, palette, pointer) {
    const { context, width } = this;
    const axis = this.begin(view, palette.paper);
    this.drawTrack(view, palette);
    if (this.marked) {
      const [start, end] = this.marked;
      context.fillStyle = palette.accent;
      context.globalAlpha = 0.35;
      context.fillRect(Math.min(start, end), TRACK, Math.abs(end - start), HEIGHT - TRACK);
      context.globalAlpha = 1;
    }
    const marks = ticks(axis.from, axis.to, Math.max(2, axis.width / 90));
    const { labels, name } = tickLabels(marks, axis.to, this.unit);
    context.font = `11px ${palette.font}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    context.fillStyle = context.strokeStyle = palette.quiet;
    marks.times.forEach((time, k) => {
      const x = Math.round(axis.x(time)) + 0.5;
      if (x + 18 > width) return; // its label would be cut
      context.fillRect(x - 0.5, HEIGHT - 5, 1, 5);
      context.fillText(labels[k], x, HEIGHT - 9);
    });
    context.textAlign = "right";
    context.fillText(name, GUTTER - 26, HEIGHT - 9); // beside the first label
    if (pointer !== null) this.drawPointer(axis, palette, pointer);
  }

  drawTrack(view, palette) {
    const { context, width } = this;
    const scale = (width - GUTTER) / (view.whole * 1.01);
    context.fillStyle = palette.row;
    context.fillRect(GUTTER, 0, width - GUTTER, TRACK - 2);
    if (!view.range) return;
    context.fillStyle = palette.thumb;
    const from = GUTTER + view.from * scale;
    context.fillRect(from, 0, Math.max(6, (view.to - view.from) * scale), TRACK - 2);
  }

  drawPointer(axis, palette, time) {
    const { context } = this;
    const x = axis.x(time);
    if (x < GUTTER || x > this.width) return;
    const text = writeTime(time, this.unit);
    const half = context.measureText(text).width / 2 + 5;
    const middle = Math.min(Math.max(x, GUTTER + half), this.width - half);
    context.fillStyle = palette.ink;
    context.fillRect(middle - half, HEIGHT - 22, 2 * half, 17);
    context.fillStyle = palette.paper;
    context.textAlign = "center";
    context.fillText(text, middle, HEIGHT - 9);
    context.fillStyle = palette.ink;
    context.fillRect(x - 0.5, HEIGHT - 5, 1, 5);
  }

  /** Time at a place of the scroll bar. */
  trackTime(view, x) {
    return ((x - GUTTER) / (this.width - GUTTER)) * view.whole * 1.01;
  }
}
