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

// The menu shows the entry of this page, once its picture has its place.
addEventListener("load", () => {
  const menu = document.querySelector(".sidebar-scroll");
  const entry = menu?.querySelector(".current-page > a");
  if (!entry) return;
  const below = entry.getBoundingClientRect().bottom - menu.getBoundingClientRect().bottom;
  const by = below > 0 ? below + menu.clientHeight / 2 : 0;
  menu.scrollBy({ top: by, behavior: "instant" });  // and not slowly, as the theme would
});

// The theme's button has three states.
function nameTheme() {
  const now = { light: "light", dark: "dark" }[document.body.dataset.theme] ?? "as the system";
  for (const button of all(".theme-toggle"))
    button.title = `Colours: light, dark or as the system. Now: ${now}`;
}
new MutationObserver(nameTheme).observe(document.body, { attributeFilter: ["data-theme"] });
nameTheme();

// What scrolls sideways must be within reach of the keys.
const reach = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
const wide = "article pre, article .table-wrapper, article p:has(> img)";
for (const box of all(wide)) reach.observe(box);

// The search is loaded when it is first used. A page that is opened from a file cannot
// load Pagefind: there, the search page has Sphinx's own search, which knows the chapters.
const content = new URL(document.documentElement.dataset.content_root, location.href);
const served = location.protocol !== "file:";

async function searchIn(field, box) {
  const { attach } = await import(new URL("_static/search.js", content).href);
  attach(field, box);
}

const side = document.querySelector(".sidebar-search");
if (side && served) {
  // The box is fixed, and stands where this place is: below the field.
  const place = document.createElement("div");
  const box = place.appendChild(document.createElement("div"));
  box.className = "found";
  box.hidden = true;
  side.form.after(place);
  side.autocomplete = "off";
  side.addEventListener("focus", () => searchIn(side, box), { once: true });
  side.addEventListener("focus", () => (box.hidden = !side.value.trim()));
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || box.hidden) return;
    side.focus();
    box.hidden = true;
  });
  const leave = ({ target }) => (box.hidden ||= target !== side && !box.contains(target));
  addEventListener("click", leave);
  addEventListener("focusin", leave);
}

const large = document.querySelector(".search input");
if (large) {
  large.value = new URLSearchParams(location.search).get("q") ?? "";
  const box = document.getElementById("search-results");
  if (served) searchIn(large, box);
  else
    for (const name of ["_static/searchtools", "_static/language_data", "searchindex"]) {
      const script = document.createElement("script");
      script.src = new URL(`${name}.js`, content);
      script.async = false;
      document.head.append(script);
    }
}

addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable]")) return;
  event.preventDefault();
  const field = large ?? side;
  if (field?.checkVisibility({ visibilityProperty: true })) field.focus();
  else location.href = new URL("search.html", content);
});
