// Mouse, pen and touch on the timelines: zoom, pan, mark a range, hover, choose.

import { GUTTER } from "./bars.js";

const MOVED = 3; // pixels from which a press is a drag
const NOTCH = 1.0015; // zoom of a pixel of the wheel

/** Listen on the canvas of a schedule; `explorer` takes what is meant. */
export function listen(explorer, pane, index) {
  const { canvas } = pane.bars;
  let press = null;

  canvas.addEventListener("wheel", (event) => {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const scrolls = document.documentElement.scrollHeight > window.innerHeight + 1;
    if (!isSideways && scrolls && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const delta = event.deltaMode === 1 ? 16 : 1; // lines to pixels
    if (isSideways) {
      explorer.view.pan(((event.deltaX || event.deltaY) * delta) / (pane.bars.width - GUTTER));
    } else {
      explorer.view.zoom(NOTCH ** (-event.deltaY * delta), timeAt(event));
    }
    explorer.viewChanged();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    const { from, to } = explorer.view;
    press = { x: event.offsetX, y: event.offsetY, from, to, moved: false, marks: event.shiftKey };
  });

  canvas.addEventListener("pointermove", (event) => {
    explorer.pointTo(timeAt(event));
    if (!press) {
      explorer.hover(index, pane.bars.opAt(explorer.view, event.offsetX, event.offsetY), event);
      return;
    }
    const by = event.offsetX - press.x;
    press.moved ||= Math.abs(by) > MOVED;
    if (!press.moved) return;
    if (press.marks) {
      explorer.mark(press.x, event.offsetX);
    } else {
      canvas.classList.add("moving");
      const scale = (press.to - press.from) / (pane.bars.width - GUTTER);
      if (explorer.view.range) explorer.view.show(press.from - by * scale, press.to - by * scale);
      explorer.viewChanged();
    }
  });

  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("moving");
    const done = press;
    press = null;
    if (!done) return;
    explorer.mark(null);
    if (done.moved && done.marks) {
      const ends = [done.x, event.offsetX].map((x) => axisOf(pane).time(x)).sort((a, b) => a - b);
      explorer.view.show(...ends);
      explorer.viewChanged();
    } else if (!done.moved) {
      if (event.offsetX < GUTTER) explorer.chooseWorker(index, pane.bars.rowAt(event.offsetY));
      else explorer.choose(index, pane.bars.opAt(explorer.view, event.offsetX, event.offsetY));
    }
  });

  canvas.addEventListener("pointercancel", () => { press = null; });
  canvas.addEventListener("pointerleave", () => {
    explorer.pointTo(null);
    explorer.hover(index, -1);
  });
  canvas.addEventListener("dblclick", (event) => {
    explorer.view.zoom(3, timeAt(event));
    explorer.viewChanged();
  });

  const axisOf = ({ bars }) => explorer.view.over(GUTTER, bars.width - GUTTER);
  const timeAt = (event) => axisOf(pane).time(Math.max(GUTTER, event.offsetX));
}

/** Listen on the axis: the bar above it scrolls. */
export function listenToAxis(explorer) {
  const { axis } = explorer;
  let grip = null;
  axis.canvas.addEventListener("pointerdown", (event) => {
    if (!explorer.view.range || !axis.onTrack(event.offsetY)) return;
    axis.canvas.setPointerCapture(event.pointerId);
    const time = axis.trackTime(explorer.view, event.offsetX);
    const { from, to } = explorer.view;
    grip = time >= from && time <= to ? time - from : (to - from) / 2;
    move(event);
  });
  axis.canvas.addEventListener("pointermove", (event) => { if (grip !== null) move(event); });
  axis.canvas.addEventListener("pointerup", () => { grip = null; });

  function move(event) {
    const { view } = explorer;
    const begin = axis.trackTime(view, event.offsetX) - grip;
    view.show(begin, begin + view.to - view.from);
    explorer.viewChanged();
  }
}
