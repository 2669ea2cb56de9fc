// A moving picture gets a button that shows the still one instead. Where less motion is asked for, the still one is there from the start.
addEventListener("load", () => {
  for (const picture of document.querySelectorAll("picture.moving")) {
    const still = picture.querySelector("source");
    const less = still.media;
    const button = document.createElement("button");
    const show = (moves) => {
      still.media = moves ? "not all" : "all";
      button.textContent = moves ? "Stop the picture" : "Play the picture";
    };
    button.type = "button";
    button.className = "md-button";
    button.addEventListener("click", () => show(still.media === "all"));
    show(!matchMedia(less).matches);
    picture.after(button);
  }
});
