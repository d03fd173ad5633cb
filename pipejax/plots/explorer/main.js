// Opens the page.

import { byId } from "./dom.js";
import { Explorer } from "./explorer.js";

const began = performance.now();
Explorer.open(JSON.parse(byId("scene").textContent)).then((explorer) => {
  window.explorer = explorer; // for the browser's console, and for tests
  explorer.loaded = performance.now() - began;
  document.documentElement.dataset.ready = "";
}).catch((error) => {
  byId("notice").textContent = `This page cannot be shown: ${error.message}`;
  throw error;
});
