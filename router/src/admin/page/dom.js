// Makes and updates elements. Text from the router becomes text nodes and attribute values only:
// nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

// Characters that show nothing, or change the order of the text around them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A name as it is shown: characters that could not be seen are written out. */
export function shown(name) {
  return String(name ?? "").replace(HIDDEN, (char) => {
    return `\\u{${char.codePointAt(0).toString(16)}}`;
  });
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element. `text` is its text, the other members are its attributes. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets a text; an unchanged one is left alone, so that a selection in it stays. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets or removes an attribute. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** The part of a bar that is filled, from 0 to 1. */
export function setShare(node, share) {
  const width = `${Math.round(Math.min(Math.max(share || 0, 0), 1) * 1000) / 10}%`;
  if (node.style.width !== width) node.style.width = width;
}

/** The children of an element, one for each item, kept from one update to the next. */
export class Keyed {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.parts = new Map();
  }

  /** Has one child per item in their order; `apply` changes a child's parts. */
  update(items, keyOf, apply) {
    const gone = new Set(this.parts.keys());
    let at = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      gone.delete(key);
      let part = this.parts.get(key);
      if (!part) {
        part = this.create(item);
        this.parts.set(key, part);
      }
      if (part.node === at) at = at.nextElementSibling;
      else this.parent.insertBefore(part.node, at);
      apply(part, item);
    }
    for (const key of gone) {
      this.parts.get(key).node.remove();
      this.parts.delete(key);
    }
  }
}
