// Opens the page.

import { byId } from "./dom.js";
import { Explorer } from "./explorer.js";

Explorer.open(JSON.parse(byId("scene").textContent)).then((explorer) => {
  window.explorer = explorer; // for the browser's console, and for tests
  explorer.readyAt = performance.now(); // milliseconds since the page was asked for
  document.documentElement.dataset.ready = "";
}).catch((error) => {
  byId("notice").textContent = `This page cannot be shown: ${error.message}`;
  throw error;
});
