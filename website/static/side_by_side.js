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
    button.focus({ preventScroll: true });
    // After a moment, or the same words a second time would not be read out.
    const said = done ? "Copied." : "Not copied: mark the text and copy it by hand.";
    setTimeout(() => (status.textContent = said), 50);
  });
}

// Buttons that open all folds, or all explanations, and close them again.
for (const button of all("[data-open]")) {
  const [opened, closed] = { ".fold": ["Fold all", "Unfold all"], ".why": ["Hide all", "Explain all"] }[button.dataset.open];
  button.addEventListener("click", () => {
    const open = button.textContent === closed;
    for (const details of all(button.dataset.open)) details.open = open;
  });
  const follow = () => {
    button.textContent = all(`${button.dataset.open}:not([open])`).length ? closed : opened;
  };
  document.addEventListener("toggle", follow, true);
}

const names = document.querySelector(".names");
const inSight = () => names.getBoundingClientRect().bottom;
const isIn = (x, edge) => x.getBoundingClientRect().top <= edge;

// What the reader looks at stays in sight when one side is exchanged: the line of the
// side that stays, if it is not at the top of the page.
function place(side) {
  const edge = inSight();
  if (isIn(document.querySelector(".highlight"), edge - 1) === false) return "";
  const line = all(`.${side} > [data-n]`).find(
    (x) => x.checkVisibility() && x.getBoundingClientRect().bottom > edge);
  return line ? `#${line.id}` : "";
}

for (const form of all(".picker")) {
  form.addEventListener("change", ({ target }) => {
    const [from, to] = [form.elements.old.value, form.elements.new.value];
    const stays = target.name === "old" ? "new" : "old";
    if (from !== to) location.href = `${from}--${to}.html${place(stays)}`;
    else form.querySelector("[role=status]").textContent = "Choose two different scripts.";
  });
  // The choice that is shown is that of the page, also when one comes back to it.
  addEventListener("pageshow", () => form.reset());
}
for (const link of all("[data-swap]")) {
  link.addEventListener("click", () => {
    const line = place("new");
    link.hash = line && `#old-${line.slice(1)}`;
  });
}

// A line of the left side that stands in the right one as well is not shown there in one
// column: its counterpart is.
function find() {
  const line = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!line || line.checkVisibility() || !line.closest(".same")) return;
  const other = line.closest(".lines").querySelector(".new").children;
  other[[...line.parentElement.children].indexOf(line)].scrollIntoView();
}
find();
addEventListener("hashchange", find);

// A click on a line's number gives its address.
for (const box of all(".highlight")) {
  box.addEventListener("click", ({ target, clientX }) => {
    const onNumber = target.dataset.n && clientX - target.getBoundingClientRect().left < 30;
    if (onNumber) location.replace(`#${target.id}`);
  });
  box.addEventListener("pointerdown", ({ target }) => {
    const pre = target.closest(".lines pre");
    if (pre) box.dataset.select = pre.className;
    else delete box.dataset.select;
  });
}

// The keys n and p, and where one is.
const changes = all(".hunk");
const here = () => changes.filter((x) => isIn(x, inSight() + 2)).length - 1;
const keys = document.querySelector("[data-keys]");
if (keys) {
  keys.checked = localStorage.getItem("keys") !== "off";
  keys.addEventListener("change", () => localStorage.setItem("keys", keys.checked ? "on" : "off"));
}
addEventListener("keydown", (event) => {
  const step = { n: 1, p: -1 }[event.key];
  const typing = event.target.closest?.("select, textarea, [contenteditable], input:not([type=checkbox], [type=radio])");
  if (!keys?.checked || !step || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const goal = changes[here() + step];
  if (goal) location.replace(`#${goal.id}`);
});
const strip = all(".strip a");
if (strip.length) {
  const follow = () => strip.forEach((x, i) => x.classList.toggle("here", i === here()));
  addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
  follow();
}
