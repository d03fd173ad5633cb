// The time axis above all schedules: marks, the place of the pointer, and a bar to scroll with.

import { GUTTER } from "./bars.js";
import { tickLabels, ticks, writeTime } from "./format.js";

const HEIGHT = 34;
const TRACK = 7; // the bar that shows which part of all is seen

export class Axis {
  constructor(canvas, unit) {
    Object.assign(this, { canvas, unit, marked: null }); // marked: pixels, while a range is marked
    this.context = canvas.getContext("2d", { alpha: false });
  }

  resize(width) {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this, { width, ratio });
    this.canvas.style.height = `${HEIGHT}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
  }

  draw(view, palette, pointer) {
    const { context, ratio, width } = this;
    const axis = view.over(GUTTER, width - GUTTER);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = palette.paper;
    context.fillRect(0, 0, width, HEIGHT);
    this.drawTrack(view, palette);
    if (this.marked) {
      const [one, other] = this.marked;
      context.fillStyle = palette.accent;
      context.globalAlpha = 0.35;
      context.fillRect(Math.min(one, other), TRACK, Math.abs(other - one), HEIGHT - TRACK);
      context.globalAlpha = 1;
    }
    const marks = ticks(axis.from, axis.to, Math.max(2, axis.width / 90));
    const { labels, name } = tickLabels(marks, axis.to, this.unit);
    context.font = `11px ${palette.font}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    context.fillStyle = context.strokeStyle = palette.quiet;
    marks.found.forEach((time, k) => {
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

  /** Whether a place of the canvas is on the bar, and which time it means there. */
  onTrack(y) {
    return y < TRACK + 2;
  }

  trackTime(view, x) {
    return ((x - GUTTER) / (this.width - GUTTER)) * view.whole * 1.01;
  }
}
