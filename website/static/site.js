// Everything here is an extra: the pages can be read without it.
"use strict";

const all = (selector) => [...document.querySelectorAll(selector)];

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
for (const [id, drawer] of [["__navigation", ".sidebar-drawer"], ["__toc", ".toc-drawer"]]) {
  const box = document.getElementById(id);
  const labels = all(`label[for=${id}][role=button]`);
  const follow = () => labels.forEach((x) => x.setAttribute("aria-expanded", box.checked));
  box?.addEventListener("change", () => {
    follow();
    if (box.checked) document.querySelector(`${drawer} a`)?.focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !box?.checked) return;
    box.checked = false;
    follow();
    labels.find((x) => x.checkVisibility())?.focus();
  });
  if (box) follow();
}

// What scrolls sideways must be within reach of the keys.
const reach = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
const wide = "article pre, article .table-wrapper, article p:has(> img)";
for (const box of all(wide)) reach.observe(box);
