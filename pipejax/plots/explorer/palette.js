// Colours: those of phases come with the page, all others from its style sheet, light or dark.

const NAMES = [
  "paper", "ink", "quiet", "row", "rowChosen", "accent", "message", "held", "envelope", "limit",
  "thumb",
];

/** Read the colours that are in force now; phases by their code. */
export function readPalette(phases) {
  const style = getComputedStyle(document.documentElement);
  const palette = {
    font: style.getPropertyValue("--font"),
    fills: {}, inks: {}, isEdged: {},
    channels: new Float32Array(3 * Object.keys(phases).length), // red, green, blue of each phase
  };
  for (const name of NAMES) {
    const variable = name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
    palette[name] = style.getPropertyValue(`--${variable}`).trim();
  }
  const paper = brightness(rgb(palette.paper));
  for (const [code, { fill, ink }] of Object.entries(phases)) {
    palette.fills[code] = fill;
    palette.inks[code] = ink;
    palette.channels.set(rgb(fill), 3 * code);
    palette.isEdged[code] = Math.abs(brightness(rgb(fill)) - paper) < 40;
  }
  return palette;
}

function rgb(colour) {
  return [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
}

function brightness([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue;
}
