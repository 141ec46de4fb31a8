"use strict";
// Dark or light: as the system has it, until somebody chooses. Before anything is drawn, so that nothing flashes.

const theme = {
  key: "gradcam-theme",
  system: matchMedia("(prefers-color-scheme: dark)"),
  chosen: null,

  load() {
    try {
      this.chosen = localStorage.getItem(this.key);
    } catch { /* storage may be forbidden */ }
    this.apply();
  },

  apply() {
    const isKnown = this.chosen === "dark" || this.chosen === "light";
    document.documentElement.dataset.theme = isKnown ? this.chosen : this.system.matches ? "dark" : "light";
  },

  toggle() {
    this.chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    this.apply();
    try {
      localStorage.setItem(this.key, this.chosen);
    } catch { /* it then holds for this visit */ }
  },
};

theme.load();
