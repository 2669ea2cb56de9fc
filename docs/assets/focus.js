// What scrolls sideways can be focused, and so be scrolled by the keyboard. The buttons of blocks of code have names that differ.
addEventListener("load", () => {
  document.querySelectorAll(".md-code__nav").forEach((buttons, index) => (buttons.ariaLabel = `Code ${index + 1}`));
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
