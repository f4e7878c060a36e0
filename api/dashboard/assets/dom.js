// Builds elements. All text goes in as text nodes: nothing here, or anywhere in the dashboard, parses HTML,
// so a job's name or a traceback can never become markup.

const SVG = "http://www.w3.org/2000/svg";

// An HTML element. `attributes`: strings and numbers are set as attributes, true as an empty attribute,
// false, null and undefined are left out, functions become listeners (onclick: ...). `children`: nodes,
// strings, numbers, nested arrays; null and false are left out.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// The same in the SVG namespace.
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(node, ...children) {
  node.replaceChildren();
  append(node, children);
}

// Sets the text only where it differs, so that a selection or a screen reader is not disturbed.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Calls `draw` at the next frame, and not more often than every `interval_ms`, however often it is asked to.
export function throttled(draw, interval_ms) {
  let waiting = null;
  let last = -Infinity;
  const run = () => {
    waiting = null;
    last = performance.now();
    draw();
  };
  const request = () => {
    waiting ??= setTimeout(() => requestAnimationFrame(run), Math.max(0, last + interval_ms - performance.now()));
  };
  request.cancel = () => {
    clearTimeout(waiting);
    waiting = null;
  };
  return request;
}
