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

/** Put an element beside the pointer, where it is not cut by the window. */
export function placeBeside(element, { clientX, clientY }) {
  const { width, height } = element.getBoundingClientRect();
  const left = clientX + 14 + width > window.innerWidth ? clientX - 14 - width : clientX + 14;
  const top = clientY + 16 + height > window.innerHeight ? clientY - 12 - height : clientY + 16;
  element.style.left = `${Math.max(4, left)}px`;
  element.style.top = `${Math.max(4, top)}px`;
}
