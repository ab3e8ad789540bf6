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
    const message = done ? "Copied." : "Not copied: mark the text and copy it by hand.";
    setTimeout(() => (status.textContent = message), 50);
  });
}

// Buttons that open all folds, or all explanations, and close them again.
for (const button of all("[data-open]")) {
  button.addEventListener("click", () => {
    const boxes = all(button.dataset.open);
    const open = boxes.some((x) => !x.open);
    for (const details of boxes) details.open = open;
    [button.textContent, button.dataset.text] = [button.dataset.text, button.textContent];
  });
}

// One column or two: the choice holds for all pages.
const one = document.querySelector("[data-one]");
if (one) {
  one.checked = localStorage.getItem("one-column") === "true";
  one.addEventListener("change", () => localStorage.setItem("one-column", one.checked));
}

// The list of explanations covers them, until one of them is chosen.
for (const list of all(".ideas ul")) list.addEventListener("click", () => (list.parentElement.open = false));

const names = document.querySelector(".names"), keys = document.querySelector("[data-keys]");
names?.addEventListener("change", ({ target }) => {
  if (target === keys) return;
  const [from, to] = [names.elements.old.value, names.elements.new.value];
  if (from === to) location.href = names.querySelector("[aria-label^=Swap]").href;
  else location.href = `${from}--${to}.html`;
});
// Above the table of all pairs, the link leads to the pair that is chosen.
const choice = document.querySelector(".choose");
function compare() {
  const pair = `${choice.elements.old.value}--${choice.elements.new.value}.html`;
  const cell = document.querySelector(`td a[href="${pair}"]`);
  const link = choice.querySelector("a");
  if (cell) link.href = pair;
  else link.removeAttribute("href");
  link.textContent = cell ? `Compare: ${cell.ariaLabel}` : "Choose two different scripts.";
}
choice?.addEventListener("change", compare);
if (choice) addEventListener("pageshow", compare);

// The choice that is shown is that of the page, also when one comes back to it.
addEventListener("pageshow", () => names?.reset());

// A selection stays in the column that it began in.
document.querySelector(".highlight")?.addEventListener("pointerdown", ({ target, currentTarget }) => {
  currentTarget.dataset.select = target.closest(".lines pre")?.className;
});

// The keys lead to the change after, or before, the one that was gone to, if it is still
// in sight, or else the one at the top of the page. What is folded away is left out.
const fields = "select, textarea, input:not([type=checkbox], [type=radio])";
addEventListener("keydown", (event) => {
  const step = { n: 1, p: -1 }[event.key];
  if (!keys?.checked || !step || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.(fields)) return;
  const changes = all(".hunk").filter((x) => x.checkVisibility());
  const boxes = changes.map((x) => x.getBoundingClientRect());
  const target = changes.findIndex((x, i) =>
    x.matches(":target, :has(:target)") && boxes[i].top < innerHeight && boxes[i].bottom > 0);
  const above = boxes.findLastIndex((x) => scrollY && x.top < innerHeight / 4);
  const goal = changes[(target < 0 ? above : target) + step];
  if (!goal) return;
  location.replace(`#${goal.id}`);
  goal.querySelector("summary, .see a")?.focus({ preventScroll: true });
});
