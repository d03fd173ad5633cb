// Draws the rows of a schedule. Only what is in sight is drawn; ops that are narrower than a few
// pixels are summed up by pixel, so a row of thousands of them costs no more than its width.

import { hatch, look, word } from "./palette.js";

export const GUTTER = 80; // left of the time axis: names of workers; as --gutter of the style sheet
const NARROW = 2.5; // width below which ops are painted pixel by pixel
const LABEL_HEIGHT = 9; // least height of a bar with text
const DIGIT_OF_FONT = 0.6; // width of a digit, relative to the size of its font
const FRAMED = 9; // width from which an op of the critical path has a frame around it
const MARK = 3; // largest height of the mark below narrower ops of the critical path
const MAX_LABELS = 2500; // in sight
const MAX_MESSAGES = 4000; // in sight
const FADED = 0.18; // opacity of ops that do not match the search

/** Heights [pixels] of the parts of a row: compute, and below it `numLanes` lanes. */
export function rowParts(height, numLanes) {
  const gap = height > 14 ? 3 : height > 7 ? 1 : 0;
  const lane = Math.max(2, Math.round((height - gap) * Math.min(0.26, 0.52 / numLanes)));
  const lanes = numLanes * lane;
  return { compute: height - gap - lanes, lane, lanes };
}

/** A canvas with a time axis right of the gutter. */
export class Drawing {
  constructor(canvas, fields) {
    Object.assign(this, { canvas, ...fields });
    this.context = canvas.getContext("2d", { alpha: false });
  }

  /** Give the canvas its size in CSS pixels, sharp on any screen. */
  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this, { width, height, ratio });
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
  }

  /** Clear the canvas; return its time axis. */
  begin(view, paper) {
    const { context, ratio, width, height } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = paper;
    context.fillRect(0, 0, width, height);
    return view.over(GUTTER, width - GUTTER);
  }

  /** Draw right of the gutter only, until the context is restored. */
  clip() {
    this.context.save();
    this.context.beginPath();
    this.context.rect(GUTTER, 0, this.width - GUTTER, this.height);
    this.context.clip();
  }
}

export class Bars extends Drawing {
  resize(width, rowHeight) {
    super.resize(width, Math.max(1, rowHeight * this.schedule.workers));
    this.rowHeight = rowHeight;
    this.parts = rowParts(rowHeight, this.schedule.lanesBeside.length);
    const columns = Math.max(1, Math.round((width - GUTTER) * this.ratio));
    this.image = new ImageData(columns, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.line = new Uint32Array(columns);
    this.sums = new Float32Array(4 * columns); // red, green, blue and cover of each pixel of a line
  }

  /** Draw all rows; return the number of messages in sight if too many to be drawn, else 0. */
  draw(view, shown) {
    const axis = this.begin(view, this.palette.paper);
    this.colours = this.schedule.colours(shown);
    const { shortest, longest } = this.schedule;
    const isDense = longest * axis.scale < NARROW;
    if (shortest * axis.scale < NARROW) this.paintNarrow(axis, shown);
    else this.drawRows(shown);
    this.clip();
    // lines come first, so ops with numbers cover them
    const hidden = shown.messages ? this.drawMessages(axis) : 0;
    if (!isDense && shown.critical) this.traceCritical(axis);
    if (!isDense) this.drawWide(axis, shown);
    if (shown.critical) this.frameCritical(axis);
    if (shown.hovered >= 0) this.drawLinks(axis, shown.hovered);
    if (shown.selected >= 0) this.drawLinks(axis, shown.selected);
    this.context.restore();
    this.drawNames(shown);
    return hidden;
  }

  drawRows(shown) {
    const { context, palette, schedule, rowHeight, parts, width } = this;
    for (let row = 0; row < schedule.workers; row++) {
      context.fillStyle = row === shown.worker ? palette.rowChosen : palette.row;
      const height = parts.compute + parts.lanes;
      context.fillRect(GUTTER, row * rowHeight, width - GUTTER, height);
    }
  }

  drawNames(shown) {
    const { context, palette, schedule, rowHeight } = this;
    const stride = Math.ceil(11 / rowHeight); // the names of one in so many rows fit
    context.font = `${Math.min(12, Math.max(9, rowHeight - 2))}px ${palette.font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let row = 0; row < schedule.workers; row++) {
      if (row % stride !== 0 && row !== shown.worker) continue;
      if (shown.worker >= 0 && row !== shown.worker && Math.abs(row - shown.worker) < stride) continue;
      context.fillStyle = row === shown.worker ? palette.ink : palette.quiet;
      const name = `worker ${row}`;
      const fits = rowHeight > 14 && context.measureText(name).width < GUTTER - 10;
      context.fillText(fits ? name : String(row), GUTTER - 8, (row + 0.5) * rowHeight);
    }
  }

  /** Call visit(op, left, right) [pixels] for the ops of a lane in sight; `isOrdered`: by time. */
  eachInSight(lane, isOrdered, axis, visit) {
    const { opStart, opFinish } = this.schedule;
    const { from, to, scale } = axis;
    let k = isOrdered ? firstEndingAfter(lane, opFinish, from) : 0;
    for (; k < lane.length; k++) {
      const op = lane[k];
      if (opStart[op] > to) {
        if (isOrdered) break;
      } else if (opFinish[op] >= from) { // false for NaN
        visit(op, (opStart[op] - from) * scale, (opFinish[op] - from) * scale);
      }
    }
  }

  /** Paint all rows with the ops that are too narrow for a bar, pixel by pixel. */
  paintNarrow(axis, shown) {
    const { context, palette, parts, rowHeight, schedule, ratio } = this;
    this.pixels.fill(palette.words.paper);
    schedule.lanes.forEach((lanes, row) => {
      const ground = row === shown.worker ? "rowChosen" : "row";
      const top = row * rowHeight;
      lanes.forEach((lane, k) => {
        const [offset, height] = this.laneParts(k);
        this.sumUp(lane, k === 0, axis, shown.matches);
        this.paintLine(top + offset, height, palette.words[ground]);
      });
    });
    context.putImageData(this.image, Math.round(GUTTER * ratio), 0);
  }

  /** Add the colours of the narrow ops of a lane to the sums of the pixels. */
  sumUp(lane, isOrdered, axis, matches) {
    const { ratio } = this;
    const { pipe, with_phase: partner } = this.schedule.ops;
    const { channels, shades } = this.palette;
    const { code, depth, withCode, withDepth, isByPhase } = this.colours;
    this.sums.fill(0);
    // called for up to a hundred thousand ops of a frame, so it makes no objects
    this.eachInSight(lane, isOrdered, axis, (op, left, right) => {
      if (right - left >= NARROW || right <= left) return;
      const weight = matches && !matches[op] ? FADED : 1;
      if (partner[op] === 0) {
        const colours = isByPhase && pipe[op] % 2 ? shades : channels;
        this.cover(left * ratio, right * ratio, colours, code[op], depth[op], weight);
      } else {
        const half = weight / 2;
        this.cover(left * ratio, right * ratio, channels, code[op], depth[op], half);
        const colours = isByPhase && this.schedule.pipes > 1 ? shades : channels;
        this.cover(left * ratio, right * ratio, colours, withCode[op], withDepth[op], half);
      }
    });
  }

  /** Add a colour to all pixels between two places, weighted by the covered part of each. */
  cover(left, right, channels, code, depth, weight) {
    const { sums, palette: { deeps } } = this;
    const deep = channels === this.palette.channels ? depth : 0;
    const red = channels[3 * code] + deep * (deeps[3 * code] - channels[3 * code]);
    const green = channels[3 * code + 1] + deep * (deeps[3 * code + 1] - channels[3 * code + 1]);
    const blue = channels[3 * code + 2] + deep * (deeps[3 * code + 2] - channels[3 * code + 2]);
    const last = Math.min(Math.floor(right), this.line.length - 1);
    for (let x = Math.max(0, Math.floor(left)); x <= last; x++) {
      const part = weight * (Math.min(right, x + 1) - Math.max(left, x));
      sums[4 * x] += part * red;
      sums[4 * x + 1] += part * green;
      sums[4 * x + 2] += part * blue;
      sums[4 * x + 3] += part;
    }
  }

  /** Paint the sums over a background, on all lines of a part of a row. */
  paintLine(top, height, ground) {
    const { sums, line, pixels, ratio } = this;
    const [red, green, blue] = [ground & 255, (ground >> 8) & 255, (ground >> 16) & 255];
    for (let x = 0, k = 0; x < line.length; x++, k += 4) {
      const covered = sums[k + 3];
      if (covered === 0) {
        line[x] = ground;
        continue;
      }
      const free = Math.max(0, 1 - covered);
      const scale = covered > 1 ? 1 / covered : 1;
      line[x] = word(
        free * red + scale * sums[k], free * green + scale * sums[k + 1], free * blue + scale * sums[k + 2]);
    }
    const end = Math.min(this.image.height, Math.round((top + height) * ratio));
    for (let y = Math.round(top * ratio); y < end; y++) pixels.set(line, y * line.length);
  }

  drawWide(axis, shown) {
    const { schedule, rowHeight, parts } = this;
    const labels = [];
    schedule.lanes.forEach((lanes, row) => {
      const top = row * rowHeight;
      lanes.forEach((lane, k) => {
        const [offset, height] = this.laneParts(k);
        const y = top + offset;
        const rowLabels = []; // numbers of a phase in a row: all or none
        const narrowPhases = new Set(); // phases of which a number does not fit
        this.eachInSight(lane, k === 0, axis, (op, left, right) => {
          if (right - left < NARROW) return;
          this.drawBar(op, axis.left + left, y, right - left, height, shown);
          if (height < LABEL_HEIGHT || schedule.ops.microbatch[op] < 0) return;
          const size = this.labelSize(op, right - left, height);
          const phase = schedule.ops.phase[op];
          if (size === 0) narrowPhases.add(phase);
          else rowLabels.push([op, axis.left + left, y, right - left, height, size]);
        });
        labels.push(...rowLabels.filter(([op]) => !narrowPhases.has(schedule.ops.phase[op])));
      });
    });
    if (labels.length <= MAX_LABELS) this.drawLabels(labels, shown);
  }

  /** Font size of the number of an op, 0 if it does not fit. */
  labelSize(op, width, height) {
    const { with_phase: partner, phase, microbatch } = this.schedule.ops;
    const lineHeight = partner[op] ? height / 2 : height;
    const fitting = (width - 1) / this.opText(phase[op], microbatch[op]).length / DIGIT_OF_FONT;
    const size = Math.min(12, Math.round(lineHeight - 1), Math.floor(fitting));
    return size >= LABEL_HEIGHT ? size : 0;
  }

  /** Text on an op: its number, and its letter unless its colour shows the phase. */
  opText(phase, microbatch) {
    const letter = this.colours.isByPhase ? "" : this.schedule.phases[phase].letter;
    return letter + this.schedule.number(microbatch);
  }

  drawBar(op, x, y, width, height, shown) {
    const { context, palette, schedule: { ops } } = this;
    const isFaded = shown.matches && !shown.matches[op];
    const gap = width > 8 ? 1 : width > 4 ? 0.5 : 0;
    if (isFaded) context.globalAlpha = FADED;
    const isSecond = ops.pipe[op] % 2 === 1;
    const half = ops.with_phase[op] ? height / 2 : height;
    const { code, depth, withCode, withDepth } = this.colours;
    const opColour = look(palette, code[op], depth[op]);
    this.fill(opColour, x, y, width - gap, half, isSecond);
    if (half < height) {
      const other = look(palette, withCode[op], withDepth[op]);
      this.fill(other, x, y + half, width - gap, half, !isSecond); // a pair is of both pipes
    }
    context.globalAlpha = 1;
  }

  fill({ fill, ink, isEdged }, x, y, width, height, isHatched) {
    const { context, palette } = this;
    context.fillStyle = fill;
    context.fillRect(x, y, width, height);
    if (isHatched && this.schedule.pipes > 1 && this.colours.isByPhase) {
      context.fillStyle = hatch(palette, context, ink);
      context.fillRect(x, y, width, height);
    }
    if (isEdged && height > 2) {
      context.strokeStyle = palette.quiet;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, Math.max(0, width - 1), height - 1);
    }
  }

  drawLabels(labels, shown) {
    const { context, palette, schedule } = this;
    const { ops } = schedule;
    const { code, depth, withCode, withDepth } = this.colours;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [op, x, y, width, height, size] of labels) {
      const isFused = ops.with_phase[op] > 0;
      const lines = [[ops.phase[op], ops.microbatch[op], code[op], depth[op]]];
      if (isFused) lines.push([ops.with_phase[op], ops.with_microbatch[op], withCode[op], withDepth[op]]);
      const lineHeight = height / lines.length;
      lines.forEach(([phase, microbatch, colour, deep], k) => {
        const text = width >= 56 && !isFused ? schedule.label(op) : this.opText(phase, microbatch);
        context.font = `${size}px ${palette.font}`;
        context.globalAlpha = shown.matches && !shown.matches[op] ? 0.4 : 1;
        context.fillStyle = look(palette, colour, deep).ink;
        context.fillText(text, x + width / 2, y + (k + 0.5) * lineHeight + 0.5);
      });
    }
    context.globalAlpha = 1;
  }

  /** Place of an op in its row [pixels]: left, top, width, height. */
  place(axis, op, row) {
    const { schedule, rowHeight } = this;
    const [offset, height] = this.laneParts(schedule.opLane(op));
    const x = axis.x(schedule.opStart[op]);
    return [x, row * rowHeight + offset, axis.x(schedule.opFinish[op]) - x, height];
  }

  /** Offset of a lane in its row, and its height [pixels]; lane 0 is compute. */
  laneParts(k) {
    const { compute, lane } = this.parts;
    return k === 0 ? [0, compute] : [compute + (k - 1) * lane, lane];
  }

  row(op) {
    const { worker, stage } = this.schedule.ops;
    return worker[op] >= 0 ? worker[op] : this.schedule.participants(stage[op])[0];
  }

  /** Nodes of the critical path that are in sight. */
  *pathInSight(axis) {
    const { path, program } = this.schedule;
    for (const node of path) {
      if (program.finish[node] >= axis.from && program.start[node] <= axis.to) yield node;
    }
  }

  /** Lines of the critical path from row to row. */
  traceCritical(axis) {
    const { context, palette, schedule } = this;
    const { program } = schedule;
    context.strokeStyle = palette.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const node of this.pathInSight(axis)) {
      const message = program.nodeMessages[node];
      if (message >= 0) this.traceMessage(axis, message);
      const op = program.nodeOps[node];
      const edge = schedule.lastInto(node);
      const from = edge < 0 ? -1 : program.nodeOps[program.pred[edge]]; // a message that no node carries
      if (op >= 0 && from >= 0 && this.row(from) !== this.row(op)) this.traceOps(axis, from, op);
    }
    context.stroke();
  }

  /** Frame the ops of the critical path, or mark them below where they are narrow. */
  frameCritical(axis) {
    const { context, palette, rowHeight, parts, schedule: { program } } = this;
    const mark = Math.min(MARK, Math.max(1, parts.compute / 4)); // height below narrow ops
    context.strokeStyle = context.fillStyle = palette.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const node of this.pathInSight(axis)) {
      const op = program.nodeOps[node];
      if (op < 0) continue;
      const row = this.row(op);
      const [x, y, width, height] = this.place(axis, op, row);
      if (width >= FRAMED) context.rect(x + 0.25, y + 0.75, width - 1, height - 1.5);
      else context.fillRect(x, row * rowHeight + parts.compute - mark, Math.max(width, 0.7), mark);
    }
    context.stroke();
  }

  /** A line from a time in one row to a time in another, between the edges of their compute. */
  traceLine(axis, fromTime, fromRow, toTime, toRow) {
    const { context, rowHeight, parts } = this;
    const isDown = toRow > fromRow;
    context.moveTo(axis.x(fromTime), fromRow * rowHeight + (isDown ? parts.compute : 0));
    context.lineTo(axis.x(toTime), toRow * rowHeight + (isDown ? 0 : parts.compute));
  }

  traceOps(axis, from, to) {
    const { schedule } = this;
    this.traceLine(axis, schedule.opFinish[from], this.row(from), schedule.opStart[to], this.row(to));
  }

  traceMessage(axis, k) {
    const { messages: { producer, consumer }, messageTimes, ops: { worker } } = this.schedule;
    const { leave, arrive } = messageTimes;
    this.traceLine(axis, leave[k], worker[producer[k]], arrive[k], worker[consumer[k]]);
  }

  /** Draw the messages in sight; if they are too many, draw none and return their number. */
  drawMessages(axis) {
    const { context, palette, schedule } = this;
    const { leave, arrive } = schedule.messageTimes;
    const inSight = [...leave.keys()].filter((k) => leave[k] <= axis.to && arrive[k] >= axis.from);
    if (inSight.length > MAX_MESSAGES) return inSight.length;
    context.strokeStyle = palette.message;
    context.lineWidth = 1;
    context.beginPath();
    for (const k of inSight) this.traceMessage(axis, k);
    context.stroke();
    return 0;
  }

  /** Frame an op, and draw lines from its predecessors: the last arrival as a full line. */
  drawLinks(axis, op) {
    const { context, palette, schedule } = this;
    if (!schedule.runs(op)) return;
    const [x, y, width, height] = this.place(axis, op, this.row(op));
    context.strokeStyle = palette.accent;
    context.lineWidth = 2;
    context.strokeRect(x - 0.5, y, Math.max(width, 2), height);
    for (const { op: from, message, isLast } of schedule.waits(op)) {
      if (from < 0) continue;
      context.setLineDash(isLast ? [] : [3, 3]);
      context.beginPath();
      if (message >= 0) this.traceMessage(axis, message);
      else if (this.row(from) !== this.row(op)) this.traceOps(axis, from, op);
      context.stroke();
    }
    context.setLineDash([]);
  }

  rowAt(y) {
    return Math.min(this.schedule.workers - 1, Math.max(0, Math.floor(y / this.rowHeight)));
  }

  /** The op at a place of the canvas, or -1. */
  opAt(view, x, y) {
    const { schedule, rowHeight, parts } = this;
    const row = Math.floor(y / rowHeight);
    if (x < GUTTER || row < 0 || row >= schedule.workers || schedule.error) return -1;
    const axis = view.over(GUTTER, this.width - GUTTER);
    // 0 within compute, 1 within the lane below it, and so on
    const laneNumber = Math.ceil((y - row * rowHeight - parts.compute) / parts.lane);
    const k = Math.min(Math.max(laneNumber, 0), schedule.lanesBeside.length);
    const lane = schedule.lanes[row][k];
    let hit = -1;
    let nearest = 3; // largest distance [pixels]
    this.eachInSight(lane, k === 0, axis, (op, left, right) => {
      const distance = Math.max(left - (x - GUTTER), x - GUTTER - right, 0);
      if (distance < nearest || (distance === nearest && distance === 0)) [hit, nearest] = [op, distance];
    });
    return hit;
  }
}

function firstEndingAfter(lane, opFinish, time) {
  let low = 0;
  let high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    // an op that does not run under this link model ends when the one before it does
    let k = middle;
    while (k >= low && Number.isNaN(opFinish[lane[k]])) k--;
    if (k < low || opFinish[lane[k]] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}
