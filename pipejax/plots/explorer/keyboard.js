// Keys, wherever the focus is but in a field.

import { along, found, inRow } from "./walk.js";

const SHARE = 0.15; // of what is seen, that an arrow moves
const ZOOM = 1.5;

export function listenToKeys(explorer) {
  const { view, state } = explorer;
  const moved = (act) => () => { act(); explorer.viewChanged(); };
  const flip = (name) => () => explorer.show(name, !state.shown[name]);
  const keys = {
    "ArrowLeft": moved(() => view.pan(-SHARE)),
    "ArrowRight": moved(() => view.pan(SHARE)),
    "+": moved(() => view.zoom(ZOOM, explorer.middle())),
    "=": moved(() => view.zoom(ZOOM, explorer.middle())),
    "-": moved(() => view.zoom(1 / ZOOM, explorer.middle())),
    "0": () => explorer.fit(),
    "Home": () => explorer.fit(),
    "/": () => document.getElementById("find").focus(),
    "n": () => explorer.go(found, 1),
    "p": () => explorer.go(found, -1),
    "[": () => explorer.go(along, -1),
    "]": () => explorer.go(along, 1),
    ",": () => explorer.go(inRow, -1),
    ".": () => explorer.go(inRow, 1),
    "c": flip("critical"),
    "m": flip("messages"),
    "g": flip("memory"),
    "l": () => explorer.nextLink(),
    "r": () => explorer.resetTimes(),
    "d": () => explorer.switchTheme(),
    "?": () => explorer.help(),
    "Escape": () => explorer.choose(state.focus, -1),
  };
  document.addEventListener("keydown", (event) => {
    const isField = event.target.matches("input[type=text], input[type=search]");
    if (isField && event.key === "Escape") event.target.blur();
    // arrows move a slider that has the focus, and choose among alternatives
    const isInput = event.target.matches("input") && event.key.startsWith("Arrow");
    if (isField || isInput || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.getElementById("keys").open || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}
