// Search with Pagefind: pages, files and diffs, by section. site.js loads this when the
// search is first used.
const root = new URL("../", import.meta.url);
const MOST = { pages: 8, sections: 4 };
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

// Show what is found for the field's text in `box`, at each change.
export function attach(field, box) {
  const status = made("p", box);
  status.setAttribute("role", "status");
  const list = made("ol", box);
  const say = (text) => (status.textContent = text);

  async function search() {
    const text = field.value.trim();
    box.hidden = !text;
    if (!text) return list.replaceChildren();
    try {
      engine ??= load();
      const pagefind = await engine;
      const found = await pagefind.debouncedSearch(text, {}, 120);
      if (!found) return; // the text has changed since
      const shown = found.results.slice(0, MOST.pages);
      const pages = await Promise.all(shown.map((result) => result.data()));
      if (text !== field.value.trim()) return;
      list.replaceChildren();
      for (const page of pages) show(list, page);
      const count = found.results.length;
      const more = count > shown.length ? `, the best ${shown.length} of them below` : "";
      say(count ? `Found on ${count} page${count > 1 ? "s" : ""}${more}.` : "Nothing found.");
    } catch (error) {
      say("The search cannot be loaded.");
      throw error;
    }
  }

  field.addEventListener("input", search);
  search();
}
