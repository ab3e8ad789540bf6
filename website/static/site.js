// Everything here is an extra: the pages can be read without it.
"use strict";

const all = (selector) => [...document.querySelectorAll(selector)];

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
