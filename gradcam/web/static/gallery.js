"use strict";
// The gallery: its state, which the address contains after "#", its filters, and its keys.

const DEFAULTS = { q: "", class: "", least: "", most: "", which: "all", label: "all", sort: "input", look: "overlay", image: "" };
const element = (id) => document.getElementById(id);
const state = { ...DEFAULTS };
let order = [];

const grid = new Grid(element("grid"), (i) => look(i));
const detail = new Detail(element("detail"), {
  move: (by) => {
    const place = order.indexOf(detail.i);
    const next = place < 0 ? 0 : place + by;
    if (next >= 0 && next < order.length) look(order[next], { isNew: false });
  },
  closed: () => {
    state.image = "";
    keep();
    const place = order.indexOf(detail.i);
    if (place >= 0) grid.focus(place);
  },
});

function look(i, { isNew = true } = {}) {
  const wasOpen = state.image !== "";
  state.image = gradcam.names[i];
  keep({ isNew: isNew && !wasOpen }); // The back button returns to the gallery.
  showDetail(i);
}

function showDetail(i) {
  const place = order.indexOf(i);
  detail.show(i, place, order.length);
  element("previous").disabled = place <= 0;
  element("next").disabled = place === order.length - 1;
  const beside = order[place + 1];
  if (place >= 0 && beside !== undefined && gradcam.view(beside, "large")) new Image().src = gradcam.view(beside, "large");
}

function write() { // the state without defaults, as the text after "#"
  const changed = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  return new URLSearchParams(changed).toString();
}

function keep({ isNew = false } = {}) {
  const hash = `#${write()}`;
  if (hash === (location.hash || "#")) return;
  if (isNew) location.hash = hash;
  else {
    try {
      history.replaceState(null, "", hash);
    } catch { // some browsers forbid it on pages from disk
      location.replace(hash);
    }
  }
}

function read() { // the state from the address; invalid values are replaced by defaults
  const view = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(DEFAULTS)) state[name] = view.get(name) ?? DEFAULTS[name];
  if (!Object.hasOwn(SORTS, state.sort)) state.sort = DEFAULTS.sort;
  if (!["all", "done", "failed"].includes(state.which)) state.which = DEFAULTS.which;
  if (!["all", "right", "wrong"].includes(state.label)) state.label = DEFAULTS.label;
  if (!["overlay", "picture"].includes(state.look)) state.look = DEFAULTS.look;
  for (const name of ["least", "most"]) if (!Number.isFinite(Number(state[name]))) state[name] = "";
  if (!gradcam.classes.some((entry) => String(entry[0]) === state.class)) state.class = "";
  element("search").value = state.q;
  for (const name of ["class", "least", "most", "sort"]) element(name).value = state[name];
  for (const name of ["which", "label", "look"]) document.querySelector(`input[name=${name}][value=${state[name]}]`).checked = true;
}

function refresh() {
  order = select(state);
  grid.show(order, state.look);
  const all = gradcam.names.length;
  element("count").textContent =
    order.length === all ? `${integer.format(all)} ${all === 1 ? "image" : "images"}` : `${integer.format(order.length)} of ${integer.format(all)}`;
  element("nothing").hidden = order.length > 0;
  element("nothing").textContent = all ? "No image matches these filters." : "This run has no images.";
  const { image, look: _, sort: __, ...filters } = state;
  element("clear").hidden = Object.entries(filters).every(([name, value]) => value === DEFAULTS[name]);
}

function follow() { // the address, at the start and whenever it changes
  read();
  refresh();
  const i = state.image === "" ? -1 : gradcam.names.indexOf(state.image);
  if (i >= 0) showDetail(i);
  else if (element("detail").open) element("detail").close();
}

function change() { // when the user changes a filter
  state.q = element("search").value.trim();
  for (const name of ["class", "least", "most", "sort"]) state[name] = element(name).value;
  for (const name of ["which", "label", "look"]) state[name] = document.querySelector(`input[name=${name}]:checked`).value;
  keep();
  refresh();
  if (scrollY > grid.list.offsetTop) scrollTo(0, grid.list.offsetTop - element("filters").offsetHeight);
}

function listClasses() {
  const counts = new Map();
  gradcam.top.forEach((top, i) => {
    for (const at of [top, ...(gradcam.others[i] ?? [])]) counts.set(at, (counts.get(at) ?? 0) + 1);
  });
  const rank = rankBy("class", gradcam.classes.map((entry) => entry[1]));
  const labels = new Map();
  for (const [, label] of gradcam.classes) labels.set(label, (labels.get(label) ?? 0) + 1);
  const options = gradcam.classes.map(([index, label], at) => {
    const name = labels.get(label) > 1 ? `${label}, class ${index}` : label;
    return [rank[at], make("option", { value: index, text: `${name} (${integer.format(counts.get(at))})` })];
  });
  element("class").append(...options.sort((a, b) => a[0] - b[0]).map((pair) => pair[1]));
}

function openHelp() {
  element("help").showModal();
  element("help-title").focus();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || element("help").open) return;
  const isTyping = event.target.matches?.("input[type=search], input[type=number], select");
  if (event.key === "?" && !isTyping) openHelp();
  else if (element("detail").open) return;
  else if (event.key === "/" && !isTyping) element("search").focus();
  else if (event.key === "Escape" && event.target === element("search")) event.target.blur();
  else if (event.key === "Enter" && event.target === element("search")) grid.focus(0);
  else if (event.key.startsWith("Arrow") && event.target === document.body) grid.focus(grid.active);
  else return;
  event.preventDefault();
}

element("filters").addEventListener("input", change);
element("filters").addEventListener("submit", (event) => event.preventDefault());
element("clear").addEventListener("click", () => {
  for (const name of Object.keys(DEFAULTS)) if (name !== "sort" && name !== "look") state[name] = DEFAULTS[name];
  keep();
  read();
  refresh();
  element("search").focus();
});
element("more-button").addEventListener("click", () => {
  const isOpen = element("more").classList.toggle("open");
  element("more-button").setAttribute("aria-expanded", isOpen);
});
element("help-button").addEventListener("click", openHelp);
addEventListener("hashchange", () => {
  if (location.hash.slice(1) !== write()) follow();
});
addEventListener("keydown", press);

element("needs").remove();
element("label-row").hidden = !gradcam.wrong.length;
listClasses();
bindTheme(element("theme-button"));
follow();
