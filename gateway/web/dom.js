// Small helpers to build and update the document. All text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element with attributes and children; a child that is a string becomes text. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

/** The same for a drawing. */
export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

/** Sets attributes that differ; `null` and `false` take one away. */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) {
      node.removeAttribute(name);
    } else if (node.getAttribute(name) !== String(value)) {
      node.setAttribute(name, value);
    }
  }
}

/** Sets a text that differs, so that a selection or a reader's place stays. */
export function setText(node, text) {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/**
 * Makes the children of `parent` those of `items`, in their order: `make(item)` builds what is new,
 * `update(node, item)` runs for all, and what has no item is removed. Nodes keep their identity.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = known.get(key);
    if (node) {
      known.delete(key);
    } else {
      node = make(item);
      node.dataset.key = key;
    }
    update(node, item);
    if (node === place) {
      place = place.nextElementSibling;
    } else {
      parent.insertBefore(node, place);
    }
  }
  for (const node of known.values()) {
    node.remove();
  }
}

/**
 * Makes a table. On a narrow screen its rows become cards, which takes a table's own roles away, so
 * they are given by name. `columns` are `{name, number}`.
 */
export function table(caption, columns) {
  const head = columns.map(({ name, number }) =>
    el("th", { scope: "col", role: "columnheader", class: number ? "number" : null }, name));
  const body = el("tbody", { role: "rowgroup" });
  const node = el("table", { role: "table", class: "cards" },
    el("caption", {}, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head)),
    body);
  return { node, body };
}

/** Makes a row for a table: the cell of `header` names it. */
export function row(columns, header) {
  const cells = columns.map(({ name, number }, i) => {
    const attributes = { "data-label": name, class: number ? "number" : null };
    return i === header
      ? el("th", { ...attributes, scope: "row", role: "rowheader" })
      : el("td", { ...attributes, role: "cell" });
  });
  return el("tr", { role: "row" }, ...cells);
}
