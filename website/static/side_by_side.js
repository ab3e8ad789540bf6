// After site.js, on the pages that show scripts.
"use strict";

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that are opened from a file may have no clipboard.
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

for (const button of all("[data-copy]")) {
  button.addEventListener("click", async () => {
    const text = all(button.dataset.copy).map((x) => x.textContent).join("");
    const status = button.parentElement.querySelector("[role=status]");
    status.textContent = "";
    const done = await copy(text);
    button.focus();
    // After a moment, or the same words a second time would not be read out.
    const said = done ? "Copied." : "Not copied: mark the text and copy it by hand.";
    setTimeout(() => (status.textContent = said), 50);
  });
}

for (const button of all("[data-unfold]")) {
  button.addEventListener("click", () => {
    const open = button.textContent === "Unfold all";
    for (const fold of all(".sbs details")) fold.open = open;
  });
  const follow = () => {
    const folded = all(".sbs details:not([open])").length;
    button.textContent = folded ? "Unfold all" : "Fold all";
  };
  document.addEventListener("toggle", follow, true);
}

for (const form of all(".picker")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const [from, to] = [form.elements.old.value, form.elements.new.value];
    if (from !== to) location.href = `${from}--${to}.html`;
    else form.querySelector("[role=status]").textContent = "Choose two different scripts.";
  });
  // The choice that is shown is that of the page, also when one comes back to it.
  addEventListener("pageshow", () => form.reset());
}
