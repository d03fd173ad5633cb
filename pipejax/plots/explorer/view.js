// The part of the time axis that is seen, the same for all schedules: zoom and pan.

const CLOSEST = 1e-5; // of the longest makespan: as far as one can zoom in

export class View {
  constructor() {
    this.whole = 1; // the longest makespan
    this.range = null; // [from, to], or null for all of it
  }

  get from() {
    return this.range ? this.range[0] : 0;
  }

  get to() {
    return this.range ? this.range[1] : this.whole * 1.01;
  }

  /** Lay the axis over pixels: those from `left` on, so many of them. */
  over(left, width) {
    const { from, to } = this;
    const scale = width / (to - from);
    return {
      from, to, left, width, scale,
      x: (time) => left + (time - from) * scale,
      time: (x) => from + (x - left) / scale,
    };
  }

  /** Show a range, as far as there is one. */
  show(from, to) {
    const end = this.whole * 1.01;
    const span = Math.min(Math.max(to - from, this.whole * CLOSEST), end);
    const begin = Math.min(Math.max(from, 0), end - span);
    this.range = span >= end * (1 - 1e-9) ? null : [begin, begin + span];
  }

  zoom(factor, around) {
    const { from, to } = this;
    this.show(around - (around - from) / factor, around + (to - around) / factor);
  }

  /** Move by a share of what is seen. */
  pan(share) {
    const by = share * (this.to - this.from);
    if (this.range) this.show(this.from + by, this.to + by);
  }

  /** Bring a time into sight. */
  reveal(from, to) {
    if (!this.range || (from >= this.from && to <= this.to)) return;
    const span = Math.max(this.to - this.from, 2 * (to - from));
    const middle = (from + to) / 2;
    this.show(middle - span / 2, middle + span / 2);
  }
}
