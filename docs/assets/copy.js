// A block that goes on from others gets a button that copies it with them.
addEventListener("load", () => {
  const text = (block) => block.querySelector("code").textContent.trimEnd();
  for (const note of document.querySelectorAll(".goes-on")) {
    const blocks = [...document.querySelectorAll(".language-python.highlight")];
    const own = blocks.findLast((block) => note.compareDocumentPosition(block) & Node.DOCUMENT_POSITION_PRECEDING);
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy with it";
    button.addEventListener("click", async () => {
      const needed = note.dataset.blocks.split(" ").map((index) => blocks[index]);
      await navigator.clipboard.writeText([...needed, own].map(text).join("\n\n\n") + "\n");
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy with it"), 2000);
    });
    note.append(" ", button);
  }
});
