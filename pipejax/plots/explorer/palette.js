// Colours: those of phases come with the page, all others from its style sheet, light or dark.

const NAMES = [
  "paper", "ink", "quiet", "row", "rowChosen", "accent", "message", "held", "envelope", "limit",
  "thumb",
];

/** Number of codes of phases, from that of an idle cell on. */
export function numCodes(phases) {
  return 1 + Math.max(...Object.keys(phases).map(Number));
}

/** Read the current colours: of phases by code, then of the steps of the scale of residuals. */
export function readPalette(scene) {
  const style = getComputedStyle(document.documentElement);
  const isDark = brightness(rgb(style.getPropertyValue("--paper").trim())) < 128;
  const seconds = isDark ? scene.seconds.toReversed() : scene.seconds; // the largest has most contrast
  const steps = seconds.slice(1).map((deep, k) => ({ fill: seconds[k], shade: seconds[k], deep }));
  const count = numCodes(scene.phases);
  const phases = { ...scene.phases, ...Object.fromEntries(steps.map((step, k) => [count + k, step])) };
  const palette = {
    seconds,
    font: style.getPropertyValue("--font"),
    phases, looks: new Map(), hatches: new Map(),
    // red, green, blue of each phase, of its shade in the second pipe, and for first stages
    channels: new Float32Array(3 * numCodes(phases)),
    shades: new Float32Array(3 * numCodes(phases)),
    deeps: new Float32Array(3 * numCodes(phases)),
  };
  for (const name of NAMES) {
    const variable = name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
    palette[name] = style.getPropertyValue(`--${variable}`).trim();
  }
  palette.words = Object.fromEntries(["paper", "row", "rowChosen"].map((name) =>
    [name, word(...rgb(palette[name]))]));
  const paper = brightness(rgb(palette.paper));
  const minContrast = paper > 128 ? 12 : 30; // a fill that is nearer to the paper needs an edge
  for (const [code, { fill, shade, deep }] of Object.entries(phases)) {
    palette.channels.set(rgb(fill), 3 * code);
    palette.shades.set(rgb(shade), 3 * code);
    palette.deeps.set(rgb(deep), 3 * code);
  }
  palette.isEdged = (fill) => Math.abs(brightness(rgb(fill)) - paper) < minContrast;
  return palette;
}

/** Fill and ink of a phase; `depth` is 1 on a worker's first stage, 0 on its last. */
export function look(palette, phase, depth) {
  const key = 1000 * phase + Math.round(900 * depth); // depths are rounded to 900 steps
  if (!palette.looks.has(key)) {
    const { channels, deeps } = palette;
    const parts = [0, 1, 2].map((k) =>
      Math.round(channels[3 * phase + k] + depth * (deeps[3 * phase + k] - channels[3 * phase + k])));
    const fill = `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
    const ink = brightness(parts) > 0.45 * 255 ? "#000000" : "#ffffff";
    palette.looks.set(key, { fill, ink, isEdged: palette.isEdged(fill) });
  }
  return palette.looks.get(key);
}

/** Pattern of strokes in an ink, for the second pipe. */
export function hatch(palette, context, ink) {
  if (!palette.hatches.has(ink)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const strokes = tile.getContext("2d");
    strokes.strokeStyle = ink;
    strokes.globalAlpha = 0.4;
    strokes.beginPath();
    for (const from of [-6, 0, 6]) {
      strokes.moveTo(from - 1, 7);
      strokes.lineTo(from + 7, -1);
    }
    strokes.stroke();
    palette.hatches.set(ink, context.createPattern(tile, "repeat"));
  }
  return palette.hatches.get(ink);
}

/** An opaque pixel as a number, in the order of bytes that browsers run on. */
export function word(red, green, blue) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function rgb(colour) {
  return [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
}

function brightness([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue;
}
