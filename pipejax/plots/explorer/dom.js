// Elements: text is always set as text, never as markup, for names come from files.

export const byId = (id) => document.getElementById(id);

/** Make an element with attributes, listeners (on...) and children; texts become text. */
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
