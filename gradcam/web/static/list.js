"use strict";
// The list of classes or other targets. Only the rows in view exist, because drawing 1,000 rows takes too long.

const ROW = 32; // height of a row in pixels, as in page.css
let fitting = []; // the targets that match the search
let lowered = []; // their names in lower case, for the search

function makeList() {
  lowered = targets.names.map((text, target) => `${text.toLowerCase()} ${targets.indices[target] ?? ""}`);
  element("targets").querySelectorAll("[role=option]").forEach((row) => row.remove());
  element("search").placeholder = targets.kind === "class" ? "Name or class number" : "Name";
  makeSentence();
  filter();
}

function filter() {
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  fitting = [];
  let start;
  lowered.forEach((text, target) => {
    if (!words.every((word) => text.includes(word))) return;
    fitting.push(target);
    if (start === undefined && text.startsWith(words[0] ?? "")) start = target;
  });
  element("counted").textContent = !words.length ? countTargets() : fitting.length ? `${integer.format(fitting.length)} of ${integer.format(total)}` : "No matches.";
  element("spacer").style.height = `${ROW * fitting.length}px`;
  drawRows();
  return start ?? fitting[0];
}

const KINDS = { class: ["class", "classes"], box: ["box", "boxes"], missed: ["missed box", "missed boxes"], mask: ["mask", "masks"], text: ["sentence", "sentences"], like: ["reference image", "reference images"], word: ["word", "words"], keypoint: ["keypoint", "keypoints"] };

function countTargets() {
  const [one, several] = KINDS[targets.kind] ?? ["score", "scores"];
  const set = current(), mapped = set.row ? set.row.size : total;
  const all = `${integer.format(total)} ${total === 1 ? one : several}`;
  return mapped < total ? `${all}, ${integer.format(mapped)} with heatmaps` : all;
}

function drawRows() {
  if (!data) return;
  const list = element("targets"), rows = [...list.querySelectorAll("[role=option]")];
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 3);
  const visible = fitting.slice(first, first + Math.ceil(list.clientHeight / ROW) + 6);
  rows.slice(visible.length).forEach((row) => row.remove());
  visible.forEach((target, i) => drawRow(rows[i] ?? list.appendChild(make("li", { role: "option" }, makeVerdict("", 0))), target, first + i));
  if (document.getElementById(`target-${state[state.side]}`)) list.setAttribute("aria-activedescendant", `target-${state[state.side]}`);
  else list.removeAttribute("aria-activedescendant");
  element("name-a").textContent = name(state.a);
  element("name-b").textContent = isPair() ? name(state.b) : "";
  for (const word of element("sentence").children) word.setAttribute("aria-pressed", String(Number(word.dataset.target) === state.a));
}

function drawRow(row, target, position) {
  const [text, share] = score(data, target), verdict = row.firstChild, values = {
    id: `target-${target}`, "data-target": target, "aria-selected": String(target === state.a),
    "aria-posinset": position + 1, "aria-setsize": fitting.length, title: targets.indices[target] === null ? label(target) : `${name(target)}, class ${targets.indices[target]}`,
  };
  for (const [key, value] of Object.entries(values)) row.setAttribute(key, value);
  row.style.top = `${ROW * position}px`;
  row.classList.toggle("other", target === state.b);
  row.classList.toggle("unmapped", !current().has(target));
  verdict.children[0].textContent = label(target);
  verdict.children[1].textContent = text + sayChange(target);
  verdict.children[2].style.setProperty("--share", Math.min(1, Math.max(0, share)));
  row.classList.toggle("outlined", hasObject(target));
  row.style.setProperty("--outline", colourOf(target));
}

function sayChange(target) {
  const points = Math.round(100 * (findChange(target) ?? 0));
  return points ? ` (${points > 0 ? "+" : "−"}${Math.abs(points)})` : "";
}

function makeSentence() { // A caption is shown as a sentence whose words can be pointed at.
  const texts = targets.kind === "word" ? targets.texts ?? [] : [];
  element("sentence").hidden = !texts.length;
  element("sentence").replaceChildren(...texts.map((text, target) => make("button", { type: "button", className: /^\s/.test(text) ? "spaced" : "", "data-target": target, text: text.trim() })));
}

function select(target, { scrolls = true } = {}) {
  if (target === undefined) return;
  state[isPair() ? state.side : "a"] = target;
  refresh();
  if (scrolls) reveal(target);
}

function reveal(target) {
  const list = element("targets"), top = ROW * fitting.indexOf(target);
  if (top >= 0 && top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  drawRows();
}

function step(by) {
  const index = fitting.indexOf(state[isPair() ? state.side : "a"]);
  select(fitting[Math.min(Math.max(index < 0 ? 0 : index + by, 0), fitting.length - 1)]);
}

function bindList(on) {
  on("targets", "click", (event) => {
    const row = event.target.closest("[role=option]");
    if (row) select(Number(row.dataset.target), { scrolls: false });
  });
  on("targets", "scroll", drawRows);
  on("search", "input", () => {
    element("targets").scrollTop = 0;
    const first = filter();
    if (element("search").value.trim()) select(first);
  });
  for (const kind of ["pointerover", "focusin", "click"]) {
    on("sentence", kind, (event) => { if (event.target.dataset.target) select(Number(event.target.dataset.target)); });
  }
}
