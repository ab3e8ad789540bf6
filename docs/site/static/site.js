// Everything here is an extra: the pages can be read without it.
"use strict";

const all = (selector) => [...document.querySelectorAll(selector)];

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are opened from a file may have no clipboard.
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

for (const button of all("[data-copy]")) {
  button.addEventListener("click", async () => {
    await copy(all(button.dataset.copy).map((x) => x.textContent).join(""));
    button.focus();
    button.parentElement.querySelector("[role=status]").textContent = "Copied.";
  });
}

for (const button of all("[data-unfold]")) {
  button.addEventListener("click", () => {
    const open = button.textContent === "Unfold all";
    for (const fold of all(".sbs details")) fold.open = open;
    button.textContent = open ? "Fold all" : "Unfold all";
  });
}

for (const form of all(".picker")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const [from, to] = [form.elements.old.value, form.elements.new.value];
    if (from !== to) location.href = `${from}--${to}.html`;
    else form.querySelector("[role=status]").textContent = "Choose two different scripts.";
  });
}

const closed = [];
addEventListener("beforeprint", () => {
  closed.push(...all("details:not([open])"));
  for (const fold of closed) fold.open = true;
});
addEventListener("afterprint", () => {
  for (const fold of closed.splice(0)) fold.open = false;
});

// The theme opens its drawers with labels, which no key can reach.
for (const label of all(".nav-overlay-icon, .toc-overlay-icon")) {
  label.tabIndex = 0;
  label.setAttribute("role", "button");
  label.setAttribute("aria-label", document.getElementById(label.htmlFor).ariaLabel);
  label.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    label.click();
  });
}

// What scrolls sideways must be within reach of the keys.
const reach = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const box of all("article pre, article .table-wrapper")) reach.observe(box);
