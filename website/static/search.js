// Search with Pagefind: pages, files and diffs, by section. site.js loads this when the
// search is first used.
const root = new URL("../", import.meta.url);
const MOST = { pages: 8, sections: 4 };
// In this order; so many of each are among the first, if there are.
const KINDS = { Page: 4, File: 2, Diff: 1, Test: 1 };
let engine;

async function load() {
  const pagefind = await import(new URL("pagefind/pagefind.js", root).href);
  await pagefind.options({ baseUrl: root.pathname, excerptLength: 16 });
  return pagefind;
}

function made(tag, parent, properties = {}) {
  return parent.appendChild(Object.assign(document.createElement(tag), properties));
}

// search.py cuts the words of code apart.
const plain = (text) => text.replace(/\u2063(<\/?mark>)?( |$)/g, "$1");

function show(list, page) {
  const item = made("li", list);
  made("a", item, { href: page.url, textContent: plain(page.meta.title) });
  made("span", item, { className: "kind", textContent: page.meta.kind });
  const hits = (section) => section.weighted_locations.length;
  const sections = page.sub_results
    .filter((section) => section.url !== page.url && section.title !== page.meta.title)
    .sort((one, other) => hits(other) - hits(one))
    .slice(0, MOST.sections);
  if (!sections.length) made("p", item, { innerHTML: plain(page.excerpt) });
  const inner = sections.length && made("ul", item);
  for (const section of sections) {
    const part = made("li", inner);
    made("a", part, { href: section.url, textContent: plain(section.title) });
    made("p", part, { innerHTML: plain(section.excerpt) });
  }
}

// {kind: [result]} for the text, or null if it has changed since.
async function find(text) {
  engine ??= load();
  const pagefind = await engine;
  const ask = (kind) => [text, { filters: { kind } }];
  const [first, ...others] = Object.keys(KINDS);
  const found = { [first]: await pagefind.debouncedSearch(...ask(first), 120) };
  if (!found[first]) return null;
  for (const kind of others) found[kind] = await pagefind.search(...ask(kind));
  for (const kind in found) found[kind] = found[kind].results;
  return found;
}

// The best of each kind, and more of the first kinds where others have few.
function best(found) {
  const chosen = new Set();
  for (const kind in found)
    for (const result of found[kind].slice(0, KINDS[kind])) chosen.add(result);
  const results = Object.values(found).flat();
  for (const result of results) if (chosen.size < MOST.pages) chosen.add(result);
  return results.filter((result) => chosen.has(result));
}

// Show what is found for the field's text in `box`, at each change.
export function attach(field, box) {
  const status = made("p", box);
  status.setAttribute("role", "status");
  const list = made("ol", box);
  const more = made("button", box, { type: "button", textContent: "Show all", hidden: true });
  const say = (text) => (status.textContent = text);
  let all = [];
  let shown = [];

  async function fill(results) {
    const text = field.value;
    const pages = await Promise.all(results.map((result) => result.data()));
    if (text !== field.value) return false;
    list.replaceChildren();
    for (const page of pages) show(list, page);
    const count = all.length;
    const part = count > results.length ? `, the best ${results.length} of them below` : "";
    say(count ? `Found on ${count} page${count > 1 ? "s" : ""}${part}.` : "Nothing found.");
    more.hidden = !part;
    return true;
  }

  async function search() {
    const text = field.value.trim();
    box.hidden = more.hidden = !text;
    if (!text) return list.replaceChildren();
    try {
      const found = await find(text);
      if (!found || text !== field.value.trim()) return;
      all = Object.values(found).flat();
      shown = best(found);
      await fill(shown);
    } catch (error) {
      say("The search cannot be loaded.");
      throw error;
    }
  }

  more.addEventListener("click", async () => {
    const next = all.findIndex((result) => !shown.includes(result));
    if (await fill(all)) list.children[next].querySelector("a").focus();
  });
  field.addEventListener("input", search);
  search();
}
