"use strict";
// Functions for both the gallery and the page of one image: elements, percentages, and the switch to dark or light.

const collator = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });
const integer = new Intl.NumberFormat("en-US");

function percent(share) {
  if (share < 0 || share > 1) return share.toPrecision(4); // a value
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value < 9.95 && value > 0 ? value.toFixed(1) : Math.round(value)} %`;
}

function make(tag, options = {}, ...children) { // an element; text goes in as text
  const { className, text, ...attributes } = options;
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function makeVerdict(label, confidence) {
  const bar = make("span", { className: "bar" });
  bar.style.setProperty("--share", Math.min(1, Math.max(0, confidence)));
  return make("span", { className: "verdict" },
    make("span", { className: "label", text: label }), make("span", { className: "number", text: percent(confidence) }), bar);
}

function bindTheme(button) {
  const name = () => {
    const other = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark";
    button.textContent = other;
    button.setAttribute("aria-label", `Switch to ${other.toLowerCase()}`);
  };
  button.addEventListener("click", () => {
    theme.toggle();
    name();
  });
  theme.system.addEventListener("change", () => {
    theme.apply();
    name();
  });
  name();
}
