"use strict";
// The grid of cards. Only the cards in view and a few rows around them are in the document.

class Grid {
  constructor(list, open) {
    this.list = list;
    this.open = open;
    this.order = [];
    this.cards = new Map(); // by position in the order
    this.active = 0; // the position that the Tab key reaches; its card always exists
    this.look = "overlay";
    addEventListener("scroll", () => this.request(), { passive: true });
    new ResizeObserver(() => this.arrange()).observe(list);
    list.addEventListener("click", (event) => {
      const card = event.target.closest("li");
      if (card) this.activate(Number(card.dataset.place));
    });
    list.addEventListener("keydown", (event) => this.press(event));
    list.addEventListener("focusin", (event) => this.mark(Number(event.target.closest("li").dataset.place)));
  }

  show(order, look) {
    this.order = order;
    this.look = look;
    this.active = 0;
    for (const place of [...this.cards.keys()]) this.remove(place);
    this.arrange();
  }

  arrange() { // computes the number of columns and the height of a row
    const width = this.list.clientWidth;
    if (!width) return;
    const style = getComputedStyle(this.list);
    const gap = parseFloat(style.getPropertyValue("--gap"));
    this.columns = Math.max(1, Math.floor((width + gap) / (parseFloat(style.getPropertyValue("--least")) + gap)));
    this.cell = (width + gap) / this.columns;
    this.width = this.cell - gap;
    this.height = Math.round(this.width * 0.75) + parseFloat(style.getPropertyValue("--caption"));
    this.row = this.height + gap;
    this.list.style.height = `${Math.max(0, Math.ceil(this.order.length / this.columns) * this.row - gap)}px`;
    for (const [place, card] of this.cards) this.put(card, place);
    this.draw();
  }

  request() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const above = -this.list.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(above / this.row) - 1) * this.columns;
    const end = Math.min(this.order.length, (Math.ceil((above + innerHeight) / this.row) + 1) * this.columns);
    const isVisible = (place) => (place >= first && place < end) || place === this.active;
    for (const place of [...this.cards.keys()]) if (!isVisible(place)) this.remove(place);
    for (let place = first; place < end; place++) this.provide(place);
    if (this.order.length) this.provide(this.active);
  }

  provide(place) {
    if (this.cards.has(place)) return;
    const card = makeCard(this.order[place], this.look);
    card.dataset.place = place;
    card.setAttribute("aria-setsize", this.order.length);
    card.setAttribute("aria-posinset", place + 1);
    card.firstChild.tabIndex = place === this.active ? 0 : -1;
    this.put(card, place);
    const after = [...this.list.children].find((item) => Number(item.dataset.place) > place);
    this.list.insertBefore(card, after ?? null); // Screen readers follow the document's order.
    this.cards.set(place, card);
  }

  put(card, place) {
    const left = (place % this.columns) * this.cell, top = Math.floor(place / this.columns) * this.row;
    Object.assign(card.style, { left: `${left}px`, top: `${top}px`, width: `${this.width}px`, height: `${this.height}px` });
  }

  remove(place) {
    const card = this.cards.get(place);
    this.cards.delete(place);
    card.querySelector("img")?.removeAttribute("src"); // cancels the download
    card.remove();
  }

  mark(place) {
    const before = this.cards.get(this.active);
    if (before) before.firstChild.tabIndex = -1;
    this.active = place;
    this.provide(place);
    this.cards.get(place).firstChild.tabIndex = 0;
  }

  activate(place) {
    this.mark(place);
    this.open(this.order[place]);
  }

  focus(place) { // scrolls the card into view, and focuses it
    place = Math.min(Math.max(place, 0), this.order.length - 1);
    if (place < 0) return;
    const bar = document.getElementById("filters").offsetHeight;
    const top = this.list.getBoundingClientRect().top + Math.floor(place / this.columns) * this.row;
    if (top < bar + 8) scrollBy(0, top - bar - 8);
    else if (top + this.height > innerHeight - 8) scrollBy(0, top + this.height - innerHeight + 8);
    this.mark(place);
    this.draw();
    this.cards.get(place).firstChild.focus({ preventScroll: true });
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(innerHeight / this.row) - 1) * this.columns;
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const place = this.active + steps[event.key];
    const isVertical = event.key === "ArrowUp" || event.key === "ArrowDown";
    if (isVertical && (place < 0 || place >= this.order.length)) return;
    this.focus(place);
  }
}

function makeCard(i, look) {
  const isFailed = gradcam.isFailed(i);
  const name = gradcam.names[i];
  const button = make("button", { type: "button", className: "card", title: name });
  button.append(isFailed ? make("span", { className: "error", text: gradcam.errors[i] }) : makeThumb(i, look));
  button.append(make("span", { className: "name" }, ...splitName(name)));
  if (isFailed) button.append(make("span", { className: "verdict bad", text: "failed" }));
  else if (gradcam.top[i] >= 0) {
    const verdict = makeVerdict(gradcam.label(i), gradcam.confidence[i]);
    if (gradcam.isWrong(i)) verdict.firstChild.prepend(make("span", { className: "wrong", text: "wrong: " }));
    button.append(verdict);
  }
  return make("li", { className: isFailed ? "failed" : null }, button);
}

function makeThumb(i, look) {
  const thumb = make("span", { className: "thumb" });
  const url = look === "picture" ? gradcam.view(i, "small") : gradcam.view(i, "0") ?? gradcam.view(i, "small");
  if (url) {
    const image = make("img", { alt: "", decoding: "async", draggable: "false" });
    image.onload = () => image.classList.add("here"); // An image without its data would show its frame.
    image.onerror = () => image.replaceWith(make("span", { className: "missing", text: "not available" }));
    image.src = url;
    thumb.append(image);
  } else {
    thumb.append(make("span", { className: "missing", text: "not available" }));
  }
  if (gradcam.has[i] & BLANK && look === "overlay") thumb.append(make("span", { className: "badge", text: "empty heatmap" }));
  return thumb;
}

function splitName(name) { // The folder is pale, and is cut off first.
  const slash = name.lastIndexOf("/") + 1;
  return [make("span", { className: "folder", text: name.slice(0, slash) }), make("span", { text: name.slice(slash) })];
}
