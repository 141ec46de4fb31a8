// The shape of the image, before anything is drawn, so that nothing moves.
document.documentElement.style.setProperty("--ratio", document.querySelector("meta[name=ratio]").content);
