"use strict";
// One picture, closely: its results over it, with a slider that fades between the two, and what is known of it.

class Detail {
  constructor(dialog, { move, closed }) {
    this.dialog = dialog;
    this.move = move;
    this.name = document.getElementById("detail-name");
    this.figures = document.getElementById("figures");
    this.fade = document.getElementById("fade");
    this.solo = null; // the one result that is shown, or null for all of them
    this.last = 100; // where Space fades back to
    this.fade.addEventListener("input", () => this.fadeTo(Number(this.fade.value)));
    dialog.addEventListener("close", closed);
    dialog.addEventListener("keydown", (event) => this.press(event));
    this.bind("previous", () => move(-1));
    this.bind("next", () => move(1));
    this.bind("close", () => dialog.close());
  }

  bind(id, act) {
    document.getElementById(id).addEventListener("click", (event) => {
      act();
      if (event.detail > 0 && this.dialog.open) this.name.focus(); // after a click, keys mean the picture again
    });
  }

  async show(i, place, count) {
    this.i = i;
    this.solo = null;
    this.name.replaceChildren(...splitName(gradcam.names[i]));
    this.name.title = gradcam.names[i];
    document.getElementById("detail-place").textContent =
      place < 0 ? "hidden by the filters" : `${integer.format(place + 1)} of ${integer.format(count)}`;
    if (!this.dialog.open) {
      this.dialog.showModal();
      this.name.focus();
    }
    this.dialog.dataset.state = "loading";
    try {
      const details = await gradcam.loadDetails(i);
      if (this.i === i) this.fill(i, details);
    } catch (error) {
      if (this.i === i) this.fill(i, { explained: [], predictions: [], note: error.message });
    }
    if (this.i === i) this.dialog.dataset.state = "ready";
  }

  fill(i, details) {
    this.details = details;
    document.getElementById("facts").replaceChildren(...makeFacts(i, details));
    this.drawFigures();
    this.dialog.querySelector(".body").scrollTop = 0;
  }

  drawFigures() {
    const { explained } = this.details;
    const picture = gradcam.view(this.i, "large");
    const shown = explained.map((entry, k) => [entry, k]).filter(([, k]) => this.solo === null || this.solo === k);
    const figures = shown.map(([entry, k]) => this.makeFigure(entry, k, picture));
    if (gradcam.isFailed(this.i)) figures.push(make("p", { className: "failure", role: "alert", text: gradcam.errors[this.i] }));
    this.figures.replaceChildren(...figures);
    this.figures.dataset.count = figures.length > 1 ? "several" : "one";
    this.figures.style.setProperty("--columns", countColumns(explained));
    const overlays = explained.some((entry) => entry.files.overlay || entry.small);
    const remark = document.getElementById("fade-remark");
    this.fade.disabled = !picture || !overlays;
    document.getElementById("fade-row").hidden = !explained.length;
    remark.hidden = !explained.length || !this.fade.disabled;
    remark.textContent = overlays ? "The original image is not available, so the overlay cannot fade." : "No overlays were written.";
    this.fadeTo(this.fade.disabled ? 100 : Number(this.fade.value), { isKept: false });
  }

  makeFigure(entry, k, picture) {
    const stack = make("div", { className: "stack" });
    const [height, width] = this.details.size ?? [3, 4];
    stack.style.setProperty("--ratio", width / height);
    if (picture && !entry.on) stack.append(make("img", { className: "picture", src: picture, alt: `The image ${gradcam.names[this.i]}` }));
    const source = entry.files.overlay ?? entry.small;
    if (source) {
      const overlay = make("img", { className: entry.on ? "overlay other" : "overlay", alt: `Heatmap of ${entry.label} at ${entry.layer} by ${entry.method}` });
      overlay.onerror = () => {
        overlay.onerror = null;
        if (entry.small && source !== entry.small) overlay.src = entry.small;
        else overlay.remove();
      };
      overlay.src = source;
      stack.append(overlay);
    }
    return make("figure", { "data-k": k }, stack, this.makeCaption(entry, k));
  }

  makeCaption(entry, k) {
    const caption = make("figcaption", {}, make("strong", { text: entry.label }));
    const facts = [entry.layer, entry.method, entry.evidence === "positive" ? "" : entry.evidence, `score ${entry.score.toPrecision(3)}`];
    caption.append(make("span", { className: "facts", text: facts.filter(Boolean).join(" · ") }));
    if (entry.blank) caption.append(make("span", { className: "badge", text: sayBlank(entry.evidence) }));
    const links = make("span", { className: "links" });
    for (const [kind, url] of Object.entries(entry.files)) {
      links.append(make("a", { href: url, target: "_blank", rel: "noopener", text: kind }));
    }
    if (this.details.explained.length > 1) {
      const button = make("button", { type: "button", className: "link", text: this.solo === null ? "enlarge" : "show all" });
      button.onclick = () => {
        this.showOnly(this.solo === null ? k : null);
        this.name.focus();
      };
      links.append(button);
    }
    caption.append(links);
    return caption;
  }

  showOnly(k) {
    this.solo = k;
    this.drawFigures();
  }

  step(by) { // all, first, second, ..., last, all
    const count = this.details?.explained.length ?? 0;
    if (count < 2) return;
    const place = ((this.solo ?? -1) + 1 + by + count + 1) % (count + 1);
    this.showOnly(place ? place - 1 : null);
  }

  fadeTo(value, { isKept = true } = {}) {
    if (isKept) {
      this.fade.value = value;
      if (value > 0) this.last = value;
    }
    this.fade.setAttribute("aria-valuetext", `overlay at ${value} percent`);
    this.figures.style.setProperty("--fade", value / 100);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.details) return;
    const isSlider = event.target === this.fade;
    const isControl = event.target.closest("button, a, summary");
    if (event.key === "ArrowLeft" && !isSlider) this.move(-1);
    else if (event.key === "ArrowRight" && !isSlider) this.move(1);
    else if (event.key === " " && !isControl && !this.fade.disabled) this.fadeTo(Number(this.fade.value) > 0 ? 0 : this.last);
    else if (/^[0-9]$/.test(event.key) && !this.fade.disabled) this.fadeTo(Math.round(Number(event.key) * 100 / 9));
    else if (event.key === "[" || event.key === "]") this.step(event.key === "]" ? 1 : -1);
    else return;
    event.preventDefault();
  }
}

function countColumns(explained) { // classes beside each other, otherwise methods, otherwise layers
  const counts = ["index", "method", "layer"].map((key) => new Set(explained.map((entry) => entry[key])).size);
  const columns = counts.find((count) => count > 1) ?? 2;
  return columns > 4 ? 3 : columns;
}

function sayBlank(evidence) {
  return evidence === "signed" ? "no evidence for or against" : `no ${evidence} evidence`;
}

function makeFacts(i, details) {
  const facts = [];
  if (details.page) {
    facts.push(make("p", {}, make("a", { href: details.page, text: "Explore all heatmaps" })));
  }
  if (details.predictions.length) {
    const list = make("ol", { className: "predictions" });
    for (const [index, label, probability] of details.predictions) {
      const row = makeVerdict(label, probability);
      row.title = `class ${index}`;
      list.append(make("li", {}, row));
    }
    facts.push(make("h3", { text: "Predictions" }), list);
  }
  if (details.size) {
    const [height, width] = details.size;
    facts.push(make("h3", { text: "Image" }), make("p", { className: "number", text: `${width} × ${height}${saySeen(details)}` }));
  }
  if (details.note) facts.push(make("h3", { text: "Note" }), make("p", { className: "note", text: details.note }));
  return facts;
}

function saySeen({ size, region }) {
  if (!region || (region[2] === size[0] && region[3] === size[1])) return "";
  return `; the model saw ${region[3]} × ${region[2]}, from x = ${region[1]}, y = ${region[0]}`;
}
