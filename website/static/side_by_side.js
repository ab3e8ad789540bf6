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

// What is above this is behind the names of the two scripts.
const names = document.querySelector(".names");
const edge = () => names.getBoundingClientRect().bottom;

// The change that the reader is at: the one that was gone to, if it is in sight.
const changes = all(".hunk");
function here() {
  const tops = changes.map((x) => x.getBoundingClientRect().top);
  const target = changes.findIndex((x) => x.matches(":target"));
  if (tops[target] > 0 && tops[target] < innerHeight) return target;
  return tops.filter((top) => top < edge()).length - 1;
}

// What the reader looks at stays in sight when one side is exchanged: the line of the
// side that stays at which the current change is, or else its first line that is in
// sight and not blank. Nothing, if the reader has not left the top of the page.
function place(side) {
  if (document.querySelector(".sbs .highlight").getBoundingClientRect().top > edge() - 1) return "";
  const below = (x) => x.getBoundingClientRect().bottom > edge();
  const change = changes[here()]?.querySelector(".change");
  const lines = all(`.${side} > [data-n]`);
  const inside = change && below(change.firstElementChild);
  const line = inside
    ? lines.find((x) => change.compareDocumentPosition(x) & (FOLLOWING | CONTAINED))
    : lines.find((x) => x.checkVisibility() && below(x) && x.textContent.trim());
  return line ? `#at-${line.id}` : "";
}
const { DOCUMENT_POSITION_FOLLOWING: FOLLOWING, DOCUMENT_POSITION_CONTAINED_BY: CONTAINED } = Node;

// Such a place is the change that has the line or ends before it, or else the line.
function arrive() {
  const line = document.getElementById(location.hash.replace(/^#at-/, ""));
  if (!line || !location.hash.startsWith("#at-")) return;
  const first = line.parentElement.firstElementChild === line;
  const is = line.closest(".change") || (first && line.closest(".after > .lines:first-child"));
  location.replace(`#${is ? line.closest(".hunk").id : line.id}`);
}

if (names) {
  names.addEventListener("change", ({ target }) => {
    const [from, to] = [names.elements.old.value, names.elements.new.value];
    const stays = target.name === "old" ? "new" : "old";
    if (from === to) document.querySelector("[data-swap]").click();
    else location.href = `${from}--${to}.html${place(stays)}`;
  });
  // The choice that is shown is that of the page, also when one comes back to it.
  addEventListener("pageshow", () => names.reset());
}
for (const link of all("[data-swap]")) {
  link.addEventListener("click", () => {
    link.hash = place("new").replace("#at-", "#at-old-");
  });
}

// In one column, a line that both sides have is shown once, on the right.
function find() {
  const line = document.getElementById(location.hash.slice(1));
  if (!line?.closest(".same .old") || line.checkVisibility()) return;
  const fold = line.closest("details");
  if (fold) fold.open = true;
  const at = [...line.parentElement.children].indexOf(line);
  line.parentElement.nextElementSibling.children[at].scrollIntoView();
}
arrive();
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
  // The lines of this column, and not the blank ones that stand for what lies between.
  box.addEventListener("copy", (event) => {
    const [side, chosen] = [box.dataset.select, getSelection()];
    if (!side || !chosen.rangeCount) return;
    const range = chosen.getRangeAt(0);
    if (!range.startContainer.parentElement.closest(`.lines .${side}`)) return;
    const texts = all(`.highlight .${side} > [data-n]`)
      .filter((x) => x.checkVisibility() && range.intersectsNode(x))
      .map((x) => {
        const part = document.createRange();
        part.selectNodeContents(x);
        if (x.contains(range.startContainer)) part.setStart(range.startContainer, range.startOffset);
        if (x.contains(range.endContainer)) part.setEnd(range.endContainer, range.endOffset);
        return part.toString();
      });
    event.clipboardData.setData("text/plain", texts.join(""));
    event.preventDefault();
  });
}

const keys = document.querySelector("[data-keys]");
if (keys) {
  keys.checked = localStorage.getItem("keys") !== "off";
  keys.addEventListener("change", () => localStorage.setItem("keys", keys.checked ? "on" : "off"));
}
const fields = "select, textarea, [contenteditable], input:not([type=checkbox], [type=radio])";
addEventListener("keydown", (event) => {
  const step = { n: 1, p: -1 }[event.key];
  if (!keys?.checked || !step || event.ctrlKey || event.metaKey || event.altKey) return;
  const goal = event.target.closest?.(fields) ? null : changes[here() + step];
  if (!goal) return;
  location.replace(`#${goal.id}`);
  goal.querySelector(".whys :is(summary, a)")?.focus({ preventScroll: true });
});

const strip = all(".strip a");
if (strip.length) {
  const follow = () => {
    const at = here();
    strip.forEach((x, i) => x.classList.toggle("here", i === at));
  };
  addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
  addEventListener("hashchange", follow);
  follow();
}
