// State of the page: the visible part of the time axis, and all choices, which the address keeps.

const MIN_SPAN = 1e-5; // of the longest makespan: the shortest visible part

/** The visible part of the time axis, the same for all schedules: zoom and pan. */
export class View {
  constructor() {
    this.whole = 1; // the longest makespan
    this.range = null; // [from, to], or null for all of it
  }

  get from() { return this.range ? this.range[0] : 0; }
  get to() { return this.range ? this.range[1] : this.whole * 1.01; }

  /** The axis over `width` pixels from `left` on: functions from times to pixels and back. */
  over(left, width) {
    const { from, to } = this;
    const scale = width / (to - from);
    return {
      from, to, left, width, scale,
      x: (time) => left + (time - from) * scale,
      time: (x) => from + (x - left) / scale,
    };
  }

  /** Show a range, cut to the time axis. */
  show(from, to) {
    const end = this.whole * 1.01;
    const span = Math.min(Math.max(to - from, this.whole * MIN_SPAN), end);
    const begin = Math.min(Math.max(from, 0), end - span);
    this.range = span >= end * (1 - 1e-9) ? null : [begin, begin + span];
  }

  zoom(factor, around) {
    const { from, to } = this;
    this.show(around - (around - from) / factor, around + (to - around) / factor);
  }

  /** Move by a share of the visible part. */
  pan(share) {
    const shift = share * (this.to - this.from);
    if (this.range) this.show(this.from + shift, this.to + shift);
  }

  /** Move the visible part so that a range is in it. */
  reveal(from, to) {
    if (!this.range || (from >= this.from && to <= this.to)) return;
    const span = Math.max(this.to - this.from, 2 * (to - from));
    const middle = (from + to) / 2;
    this.show(middle - span / 2, middle + span / 2);
  }
}

const WAIT = 250; // milliseconds: browsers allow few changes of an address
const ALL = "all"; // of the time axis
const FLAGS = ["messages", "memory", "critical", "residuals"];

/** The choices on the page; the part of the address after # keeps them. */
export class State {
  constructor(scene) {
    this.scene = scene;
    this.reset();
  }

  /** Set the choices with which the page opens without an address. */
  reset() {
    const { scene } = this;
    this.chosen = null; // schedules, workers and microbatches, or null for those of the page
    this.link = scene.link;
    this.factors = new Map(scene.factors.map(({ key, initial }) => [key, initial]));
    const memory = scene.schedules.length === 1;
    this.shown = {
      messages: false, memory, critical: true, residuals: true, ...scene.show,
    };
    // a limit is one of memory
    this.curve = scene.schedules.some(({ memory }) => memory.limits) ? "memory" : "flight";
    this.find = "";
    this.theme = "auto";
    this.range = scene.view;
    this.focus = 0; // index of the schedule in the side panel
    this.selected = ""; // label of its chosen op
    this.worker = -1; // worker whose memory is drawn, -1 for the fullest
  }

  get isGiven() {
    const { scene } = this;
    return this.link === scene.link && scene.factors.every(({ key, initial }) => this.factors.get(key) === initial);
  }

  /** Write the choices that differ from those with which the page opens. */
  write() {
    const { scene } = this;
    const initialState = new State(scene);
    const parts = [];
    const add = (name, value) => parts.push(`${name}=${encodeURIComponent(value)}`);
    if (this.chosen) {
      const { schedules, workers, microbatches } = this.chosen;
      add("show", schedules.map(({ name, stagesPerWorker: v }) => (v > 1 ? `${name}*${v}` : name)).join());
      add("size", `${workers}x${microbatches}`);
    }
    if (this.link !== scene.link) add("link", this.link);
    for (const { key, initial } of scene.factors) {
      if (this.factors.get(key) !== initial) add(`x.${key}`, this.factors.get(key));
    }
    for (const name of FLAGS) {
      if (this.shown[name] !== initialState.shown[name]) add(name, this.shown[name] ? 1 : 0);
    }
    for (const name of ["curve", "find", "theme", "focus", "selected", "worker"]) {
      if (this[name] !== initialState[name]) add(name, this[name]);
    }
    const range = rangeText(this.range);
    if (range !== rangeText(initialState.range)) add("view", range);
    return parts.join("&");
  }

  /** Read a text of `write`; ignore choices that this page does not have. */
  read(text) {
    this.reset();
    const parameters = new URLSearchParams(text);
    const { scene } = this;
    const size = /^(\d+)x(\d+)$/.exec(parameters.get("size") ?? "");
    if (size && parameters.get("show")) {
      const schedules = parameters.get("show").split(",").map((text) => {
        const [name, v] = text.split("*");
        return { name, stagesPerWorker: Number(v ?? 1) };
      });
      this.chosen = { schedules, workers: Number(size[1]), microbatches: Number(size[2]) };
    }
    if (scene.links.includes(parameters.get("link"))) this.link = parameters.get("link");
    for (const { key } of scene.factors) {
      const factor = Number(parameters.get(`x.${key}`) ?? NaN);
      if (Number.isFinite(factor) && factor >= 0) this.factors.set(key, factor);
    }
    for (const name of FLAGS) if (parameters.has(name)) this.shown[name] = parameters.get(name) === "1";
    if (["flight", "memory"].includes(parameters.get("curve"))) this.curve = parameters.get("curve");
    if (["auto", "light", "dark"].includes(parameters.get("theme"))) this.theme = parameters.get("theme");
    this.find = parameters.get("find") ?? "";
    this.selected = parameters.get("selected") ?? "";
    const shown = this.chosen?.schedules.length ?? scene.schedules.length;
    this.focus = within(parameters.get("focus"), 0, shown - 1, 0);
    const workers = this.chosen?.workers ?? scene.schedules[this.focus].workers;
    this.worker = within(parameters.get("worker"), 0, workers - 1, -1);
    if (parameters.get("view") === ALL) this.range = null;
    const range = (parameters.get("view") ?? "").split("~").map(Number);
    if (range.length === 2 && range[0] >= 0 && range[1] > range[0]) this.range = range;
  }

  /** Keep the state in the address, a moment after it last changed. */
  keep() {
    clearTimeout(this.timer);
    if (location.protocol === "about:") return; // within a report it has no address of its own
    this.timer = setTimeout(() => {
      const text = this.write();
      if (text !== location.hash.slice(1)) {
        history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
      }
    }, WAIT);
  }
}

/** A part of the time axis, or all of it, as text. */
function rangeText(range) {
  return range ? range.map((time) => +time.toPrecision(7)).join("~") : ALL;
}

/** Read a whole number in a range, or return the default. */
function within(text, low, high, defaultNumber) {
  const number = text === null ? NaN : Number(text);
  return Number.isInteger(number) && number >= low && number <= high ? number : defaultNumber;
}
