// Texts of numbers, as the command line writes them, and elements of the page.

const MAX_DECIMALS = 10;

/** Write a time with the prefix that suits it; slots have none. */
export function writeTime(value, unit) {
  if (unit !== "s") return `${digits(value, 6)} ${unit}`;
  for (const [factor, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
    if (Math.abs(value) >= factor) return `${digits(value / factor, 5)} ${name}`;
  }
  return value === 0 ? "0 s" : `${digits(value / 1e-9, 4)} ns`;
}

/** Write the least and the largest of some times, or their common value. */
export function writeRange(times, unit) {
  if (times.length === 1 || times[1] === 0) return writeTime(times[0], unit);
  const [high, name] = writeTime(times[1], unit).split(" ");
  const low = digits((times[0] * Number(high)) / times[1], 3);
  return `${low} to ${digits(Number(high), 3)} ${name}`;
}

export function writePercent(ratio) {
  return `${(100 * ratio).toFixed(2)} %`;
}

/** Write a change relative to an earlier value, with its sign. */
export function writeChange(value, before) {
  const change = before > 0 ? value / before - 1 : 0;
  return `${change < 0 ? "\u2212" : "+"}${Math.abs(100 * change).toFixed(2)} %`;
}

/** Write the memory of a worker. */
export function writeHeld(value, unit) {
  return unit === "bytes" ? `${(value / 1e9).toFixed(2)} GB` : digits(value, 4);
}

export function digits(value, count) {
  return String(+value.toPrecision(count));
}

/** Times of about `count` marks on an axis; the step is 1, 2 or 5 times a power of ten. */
export function ticks(from, to, count) {
  const minStep = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = power * ([1, 2, 5, 10].find((k) => k * power >= minStep) ?? 10);
  const times = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) times.push(k * step);
  return { times, step };
}

/** Labels of an axis, all with one prefix and as many decimals as the step needs. */
export function tickLabels({ times, step }, to, unit) {
  const scales = unit === "s" ? [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]] : [[1, unit]];
  const [factor, name] = scales.find(([seconds]) => to >= seconds) ?? scales[scales.length - 1];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  const write = decimals < MAX_DECIMALS // tiny times are written with a power of ten
    ? (time) => (time / factor).toFixed(decimals)
    : (time) => digits(time / factor, 4);
  return { labels: times.map(write), name };
}

/** Write a microbatch: 12, or 12.1 for a slice of it, or nothing for -1. */
export function writeNumber(microbatch, slices) {
  if (microbatch < 0) return "";
  return slices > 1 ? `${Math.floor(microbatch / slices)}.${microbatch % slices}` : String(microbatch);
}

export const byId = (id) => document.getElementById(id);

/** Make an element with attributes, listeners (on...) and children; texts never become markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value; // an attribute is refused by the page
    else if (value !== null && value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Put an element beside the pointer, within the window. */
export function placeBeside(element, { clientX, clientY }) {
  const { width, height } = element.getBoundingClientRect();
  const left = clientX + 14 + width > window.innerWidth ? clientX - 14 - width : clientX + 14;
  const top = clientY + 16 + height > window.innerHeight ? clientY - 12 - height : clientY + 16;
  element.style.left = `${Math.max(4, left)}px`;
  element.style.top = `${Math.max(4, top)}px`;
}
