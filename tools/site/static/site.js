// Everything here is an extra: the pages can be read without it.
"use strict";

// The page is shown when all of it is done, so that nothing moves (site.css).
addEventListener("DOMContentLoaded", () => document.documentElement.classList.add("laid-out"));

const MARKS = "sphinx_highlight_terms"; // the theme keeps here what it marks on the next page
const all = (selector) => [...document.querySelectorAll(selector)];

// The list of pages shows the current one in its middle.
const list = document.querySelector(".sidebar-scroll");
function showHere() {
  const here = list?.querySelector(".current-page > a")?.getBoundingClientRect();
  if (here) list.scrollTop += here.top - list.getBoundingClientRect().top - list.clientHeight / 2;
}
showHere();

// The theme opens its drawers with labels, which no key can reach.
for (const label of all(".nav-overlay-icon, .toc-overlay-icon")) {
  const box = document.getElementById(label.htmlFor);
  const button = document.createElement("button");
  button.type = "button";
  button.className = label.className;
  button.ariaLabel = box.ariaLabel;
  button.append(...label.childNodes);
  button.addEventListener("click", () => (box.checked = !box.checked, showHere()));
  label.replaceWith(button);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") box.checked = false;
  });
}

// An option does not break behind its hyphens.
for (const option of all("article code .pre")) option.classList.toggle("option", /^-.{1,30}$/.test(option.textContent) || option.textContent.length < 33 && !!option.closest("td"));
for (const pre of all(":is(.highlight-sh, .highlight-console) pre"))
  pre.innerHTML = pre.innerHTML.replace(/(?<=[>\s])-[\w-]{1,30}(?=[\s<=])/g, '<span class="option">$&</span>');

// A long command goes on below, indented.
for (const pre of all(".highlight-sh pre")) {
  const lines = pre.innerHTML.match(/^.*\n/gm) ?? [];
  if (lines.join("") === pre.innerHTML && lines.every((x) => x.split("<span").length === x.split("</span").length))
    pre.innerHTML = lines.map((x) => `<span class="command-line">${x}</span>`).join("");
}

// An output in columns scrolls, and others wrap. The command above it does so always.
for (const pre of all(".highlight-console pre")) {
  pre.classList.toggle("columns", /\S {3}/.test(pre.textContent));
  pre.innerHTML = pre.innerHTML.replace(/^(<span><\/span>)?<span class="gp">.*\n/gm, '<span class="command-line">$&</span>');
}

// The empty corner of a table is no header.
for (const header of all("article th"))
  if (!header.textContent.trim()) header.replaceWith(document.createElement("td"));

// A phone stacks the cells of a table, each with its column's name, unless all are numbers.
for (const table of all("article table")) {
  const names = [...table.querySelectorAll("thead :is(th, td)")].map((x) => x.textContent), cells = [...table.querySelectorAll("tbody td")];
  table.classList.toggle("stacks", !cells.every((x) => !x.cellIndex || /^[\W\d]*\w{0,2}$/.test(x.textContent.trim())));
  for (const cell of cells) cell.dataset.name = cell.textContent.trim() && names[cell.cellIndex];
}

// A long name breaks behind its underscores first.
for (const x of all("article :is(h1, td .pre:not(.option), td a, p > a > .download)"))
  if (!x.children.length) x.innerHTML = x.innerHTML.replaceAll("_", "_<wbr>");

// A sign of percent stays beside its number.
const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const { currentNode: text } = texts;
  if (/\d %/.test(text.data) && !text.parentNode.closest("pre, code, script")) text.data = text.data.replace(/(\d) %/g, "$1\u00a0%");
}

// What goes wrong without a line stands out.
for (const bold of all("article p > strong:first-child"))
  bold.parentNode.classList.toggle("without", bold.textContent === "Without it." && bold === bold.parentNode.firstChild);

// A phone shows code without the indent that all of its lines have.
const indentOf = (lines) => Math.min(...lines.filter((x) => x.trim()).map((x) => x.search(/\S/)));
for (const pre of all(".highlight-python pre")) {
  const code = document.createElement("span");
  code.className = "dedent";
  code.style.setProperty("--indent", indentOf(pre.textContent.split("\n")));
  code.append(...pre.childNodes);
  pre.append(code);
}

// A diff names its file once, and then functions. Its signs have a column of their own.
for (const pre of all(".highlight-diff pre")) {
  let file, stretch = [];
  const dedent = () => {
    const indent = indentOf(stretch.map((x) => x.textContent.slice(1)));
    for (const line of stretch.splice(0)) {
      const sign = document.createElement("i"), text = line.firstChild;
      sign.textContent = text.data[0];
      text.data = text.data.slice(1);
      const code = text.data ? text : text.nextSibling?.firstChild;
      if (code) code.data = code.data.replace(RegExp(`^ {${indent}}`), "");
      line.style.setProperty("--indent", Math.min(8, Math.max(0, line.textContent.search(/\S/))));
      line.prepend(sign);
    }
  };
  for (const line of pre.children) {
    const [head, name, scope = ""] = line.textContent.match(/^@@ (?:(\D\S*)(?: in (.+))?|.*) @@/) ?? [];
    if (head) {
      dedent();
      line.textContent = [name !== file && name, scope].filter(Boolean).join(" · ");
      file = name;
    } else if (line.textContent !== "\n") stretch.push(line);
  }
  dedent();
}

// A whole program is folded.
for (const box of all("article .highlight-python")) {
  const lines = box.textContent.trim().split("\n").length;
  if (lines < 70) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "unfold";
  button.textContent = `Show all ${lines} lines`;
  button.addEventListener("click", () => {
    box.classList.remove("folded");
    box.querySelector("pre").focus();
    button.remove();
  });
  box.classList.add("folded");
  box.after(button);
}

// A checklist can be ticked.
for (const box of all(".task-list-item input")) {
  const label = document.createElement("label"), name = box.nextElementSibling;
  box.before(label);
  label.append(box, name);
  box.disabled = false;
  box.autocomplete = "off";
}

// What few need is folded: tests, what changes in imports, and the words of a picture.
function fold(box, words) {
  const details = document.createElement("details"), summary = details.appendChild(document.createElement("summary"));
  details.className = "aside";
  summary.textContent = words;
  box.replaceWith(details);
  details.append(box);
}
for (const box of all("article p").filter((x) => x.textContent.startsWith("Tests: "))) fold(box, `${box.children.length} test${box.children.length > 1 ? "s" : ""}`);
for (const box of all("article > section .highlight-diff")) {
  const isHead = (x) => /^.\s*(import .*|from .*)?\s*$/.test(x.textContent) || x.querySelector(".sd");
  if ([...box.querySelectorAll("del, ins")].every(isHead)) fold(box, "docstring, imports");
}
for (const box of all('p:has(img[src*="which_one"]) + ol')) fold(box, "The same as a list");

// What happens without a change stands at its heading, and above all of them: what matters most.
const recorded = all("article section > .flip").map((x) => [x.parentNode, Object.assign(document.createElement("span"), {
  className: /^stops/.test(x.dataset.tag) ? "tag stops" : "tag", textContent: x.dataset.tag })]);
if (recorded.length) {
  const list = document.createElement("nav");
  list.className = "mistakes";
  list.ariaLabel = "Changes with a recorded mistake";
  list.innerHTML = "<p>What happens if you forget a change, as it was recorded:</p><ul></ul>";
  for (const [section, tag] of recorded) {
    const heading = section.querySelector(":is(h2, h3, h4)"), link = document.createElement("a"), entry = document.createElement("li");
    link.href = `#${section.id}`;
    for (const x of heading.childNodes) if (!x.matches?.(".headerlink")) link.append(x.cloneNode(true));
    entry.append(link, tag.cloneNode(true));
    list.lastChild.append(entry);
    const line = document.createElement("p");
    line.append(tag);
    heading.after(line);
  }
  document.querySelector("article h1 ~ section").before(list);
}

const landmarks = { ".sidebar-drawer": "All pages", ".toc-drawer": "On this page" };
for (const [selector, name] of Object.entries(landmarks)) {
  for (const drawer of all(selector)) drawer.setAttribute("aria-label", name);
}

// What scrolls sideways must be within reach of the keys.
const reach = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
const wide = "article pre, article .table-wrapper";
for (const box of all(wide)) reach.observe(box);

// The boxes of the picture of which_one lead where the files of the list below it lead,
// and so do the pages that it names: a finger needs more room than their letters.
const room = ({ x, y, width, height }) => `<rect x="${x}" y="${y + height / 2 - 13}" width="${width}" height="26" fill-opacity="0"/>`;
for (const picture of all('picture:has(img[src*="which_one"])')) fetch(picture.querySelector("img").currentSrc).then((got) => got.text()).then((svg) => {
  picture.outerHTML = svg.replace('role="img"', 'role="group"');
  for (const text of all("article svg text")) {
    const links = all("article li a"), file = links.find((x) => x.textContent === text.textContent);
    if (!file) {
      const named = new Map(links.filter((x) => text.textContent.includes(x.textContent)).map((x) => [x.textContent, x.href]));
      for (const [name, url] of named) text.innerHTML = text.innerHTML.replace(name, `<a href="${url}">${name}</a>`);
      for (const link of text.querySelectorAll("a"))
        text.insertAdjacentHTML("afterend", `<a href="${link.href.baseVal}" tabindex="-1" aria-hidden="true">${room(link.getBBox())}</a>`);
      continue;
    }
    const link = document.createElementNS("http://www.w3.org/2000/svg", "a"), box = text.previousElementSibling;
    link.setAttribute("href", (file.nextElementSibling ?? file).href);
    if (box?.localName !== "rect") link.innerHTML = room(text.getBBox());
    text.replaceWith(link);
    if (box?.localName === "rect") link.append(box);
    link.append(text);
  }
}).catch(() => {}); // a page that was opened as a file keeps the picture

// What people type, and words of the heading that answers it
const MEANT = {
  "oom": "out of memory",
  "memory leak": "cuda out of memory",
  "warmup": "learning rate in every step",
  "find_unused_parameters": "finished reduction",
  "gradient clipping fsdp": "wrong in silence",
  "gradient checkpointing": "keep fewer activations",
  "resume dataloader": "leave out what is trained already",
  "dataloader workers": "load the data in workers",
  "batchnorm": "with batch normalization",
  "ema": "average the weights",
  "set_epoch": "shuffle anew in every epoch",
  "distributedsampler": "give each rank its share of the samples",
};

// In a search, the pages of a script that is named come first, then pages and sections with
// all words of the query in their heading, then pages with all of them in one section, then
// others. What is found of a page stands together, and names the page once. (What is last
// here is shown first.)
if (typeof Search !== "undefined") {
  const { gettext } = Documentation, { _parseQuery: parse, _performSearch: search } = Search;
  let pages, also; // for the line above the results
  let marks, phrase, least; // what is marked on a page that is gone to; what is typed or meant; how many of its words do
  let marked; // what is marked in the results: a word counts in all its forms (clip, clipping)
  const stem = (word) => new Stemmer().stemWord(word).replace(/i$/, ""), literal = (x) => x.replace(/[^\w\s]/g, "\\$&").replace(/\s+/g, "\\s+").replaceAll("timeout", "time-?out");
  const begins = (words) => RegExp(`(?<![a-z])(?:${words.map(literal).join("|")})`, "gi");
  Documentation.ngettext = () => `${pages} page${pages > 1 ? "s" : ""}${also ? `; also searched: ${also}` : ""}`;
  Documentation.gettext = (text) => text.startsWith("Your search did not") ? "No page has these words. Try fewer, or others." : gettext(text);
  // One operation has several spellings, and what is meant is searched as well.
  const formsOf = (typed) => {
    const [, one, two] = typed.match(/^(all|reduce|no)[-_ ]?(reduce|gather|scatter|sync)$/) ?? [];
    return one ? [`${one}_${two}`, one + two, `${one}-${two}`] : [typed, MEANT[typed]].filter(Boolean);
  };
  Search._parseQuery = (query) => {
    const forms = formsOf(query.toLowerCase().trim()), [, ...terms] = parse(forms.at(-1));
    if (forms.length === 3) terms[0] = new Set(forms); // and not all that is called "all"
    const stems = (words) => [...words].map((x) => x.startsWith(stem(x)) ? stem(x) : x);
    marks = (forms.length === 3 ? forms : stems(terms[2])).join(" ").replace("timeout", "$& time-out");
    marked = RegExp(`${begins([...forms, ...forms.length === 3 ? [] : stems(parse(forms[0])[3])]).source}\\w*`, "gi");
    terms[2] = new Set(); // Sphinx marks nothing
    localStorage.removeItem(MARKS);
    least = forms.length === 2 ? 2 : 1;
    phrase = begins(forms);
    return [query, ...terms];
  };
  // The marks go along to a result, and nowhere else.
  for (const kind of ["click", "auxclick"]) addEventListener(kind, ({ target }) => {
    if (target.closest("#search-results a")) localStorage.setItem(MARKS, marks);
    else if (target.closest("a")) localStorage.removeItem(MARKS);
  });
  Search._performSearch = (query) => {
    const typed = query.toLowerCase().trim(), names = [typed, typed.replace(/\.py$/, "")], forms = formsOf(typed);
    also = forms.filter((x) => x !== typed).join(", ");
    const inGlossary = /^(all_gather|reduce_scatter)$/.test(forms[0]) ? "Collective" : "";
    const has = (title) => title === inGlossary || forms.some((form) => form.split(/\s+/).every((x) => title.toLowerCase().includes(x) || stem(x) && title.search(begins([stem(x)])) >= 0));
    const { alltitles, docnames, filenames, titles } = Search._index;
    const headings = Object.entries(alltitles)
      .filter(([title]) => has(title))
      .sort(([a], [b]) => b.length - a.length)
      .flatMap(([title, places]) => places.map(([file, id]) => {
        const name = titles[file] === title ? title : `${titles[file]} > ${title}`;
        return [docnames[file], name, id ? `#${id}` : "", null, 100, filenames[file], "title"];
      })).sort((x, y) => !!y[2] - !!x[2]);
    const named = FILES.filter(([file]) => names.some((x) => `/${file}`.endsWith(`/${x}`)))
      .map(([, page, title]) => [page, title, "", null, 100, "", "title"]).reverse();
    const before = (found, known) => [
      ...found.filter((x) => !known.some((y) => x[0] + x[2] === y[0] + y[2])), ...known];
    const inText = forms.map((form) => search(...parse(form)).sort((x, y) => !!x[2] - !!y[2])).reverse();
    Search._parseQuery(query); // keeps its words, and not those of the last form
    const groups = new Map();
    for (const x of [...inText, headings, named].reduce(before).reverse()) groups.set(x[0], [...groups.get(x[0]) ?? [], x]);
    pages = groups.size;
    return [...groups.values()].flatMap(([first, ...rest]) => [
      first.with(1, first[1].replace(" > ", " › ")),
      ...rest.filter((x) => x[2]).map((x) => x.with(1, x[1].replace(/^.* > /, "› ")).with(6, "section")),
    ]).reverse();
  };
  // Below a result stands its text around what is typed or meant: neither code, tables nor
  // names of tests. A page that has it nowhere else comes last, with its title alone.
  const textOf = (x) => x.textContent.replace(/\s+/g, " ").trim();
  Search.makeSearchSummary = (html, words, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html"), main = page.querySelector("[role=main]"), whole = textOf(main);
    const names = new Map([...main.querySelectorAll("section[id]")].map((x) => [x, textOf(x.querySelector(":is(h1, h2, h3, h4)")).replace(/.$/, "")]));
    const own = (here) => {
      const copy = here.cloneNode(true);
      for (const x of copy.querySelectorAll("section[id]")) x.remove();
      return textOf(copy);
    };
    // In its title, a page has a word for all of its sections.
    const has = (text, x) => text.search(begins([x])) >= 0, title = textOf(main.querySelector("h1")), full = new Map([main, ...names.keys()].map((x) => [x, title + own(x)]));
    for (const x of main.querySelectorAll("p")) if (x.textContent.startsWith("Tests: ")) x.remove();
    const rows = [...main.querySelectorAll("tbody tr")].map((x) => [x.closest("section[id]"), [...x.cells].map(textOf).join(": ")]);
    for (const x of main.querySelectorAll("pre, table, nav, script, .beside, .ends, section > :is(h1, h2, h3, h4)")) x.remove();
    // A result that is a page shows, and leads to, the section that has it most often.
    const place = anchor && page.getElementById(anchor.slice(1)), places = place || !names.size ? [place || main] : [...names.keys()];
    const starts = [...words].map((x) => x.replace(/i$/, "")); // they are stems
    let best = { score: 0, at: 0, long: 160, text: textOf(places[0]) };
    for (const here of places) {
      const text = here === place ? textOf(here) : own(here), lower = text.toLowerCase(), hits = [...text.matchAll(phrase)];
      const hasAll = starts.every((x) => has(full.get(here), x)) ? 10 + 3 * starts.filter((x) => has(title, x)).length : 0;
      const near = (at) => starts.filter((x) => has(lower.slice(at, at + 160), x)).length;
      const found = hits.length ? [{ score: 100 + hits.length, at: hits[0].index, long: hits[0][0].length }]
        : [...lower.matchAll(begins(starts))].map(({ index }, _, all) => ({ score: near(index) + hasAll + all.length / 1000, at: index, long: 60 }));
      if (hasAll) { // perhaps all are in its code or tables: then, the row that has most of them
        const count = (row) => starts.filter((x) => has(row, x)).length;
        const [row] = rows.flatMap(([at, row]) => at === here && count(row) ? [row] : []).sort((x, y) => count(y) - count(x));
        found.push({ score: hasAll, at: 0, long: 160, ...row && { text: row } });
      }
      for (const x of found) if (x.score > best.score) best = { text, ...x, here };
    }
    const { text, at, long, here, score } = best, from = Math.max(0, at - 100), end = at + long + 100, shown = document.createElement("p");
    const said = from ? `… ${text.slice(from, end).replace(/^\S* /, "")}` : text.slice(0, end);
    shown.className = "context";
    shown.textContent = end < text.length ? said.replace(/ \S*$/, " …") : said;
    queueMicrotask(() => { // it stands below its result then
      const item = shown.parentNode, link = item.querySelector("a");
      for (const x of [link, shown]) mark(x);
      if (!item.matches(".kind-text") || item.matches(":has(+ .kind-section)")) return;
      if (score < least && also && whole.search(phrase) < 0) { // it has single words of what is meant
        item.remove();
        pages--;
        Search.status.textContent = Documentation.ngettext();
      } else if (score < least) last(item);
      else if (here?.id && here !== places[0]) {
        link.setAttribute("href", `${link.getAttribute("href")}#${here.id}`);
        link.append(` › ${names.get(here)}`);
        mark(link);
      }
      if (!item.closest(".mentions")) item.dataset.score = score; // what is known stands in this order
      Search.output.append(...[...Search.output.querySelectorAll("[data-score].kind-text")].sort((x, y) => y.dataset.score - x.dataset.score));
    });
    return shown;
  };
  function mark(x) {
    x.innerHTML = x.textContent.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt()};`).replace(marked, '<span class="highlighted">$&</span>');
  }
  function last(item) {
    const list = document.querySelector(".mentions") ?? Search.output.cloneNode();
    if (!list.parentNode) {
      const head = document.createElement("p");
      head.textContent = "Also mentioned in";
      list.classList.add("mentions");
      Search.output.after(head, list);
    }
    item.querySelector(".context").remove();
    list.append(item);
  }
  addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const links = all("#search-results li > a");
    if (!step || !event.target.matches("body, [name=q], #search-results a")) return;
    const goal = links[links.indexOf(event.target) + step];
    if (!goal) return;
    event.preventDefault();
    goal.focus();
  });
}

// A result of a search is scrolled to: its first word below the title.
if (localStorage.getItem(MARKS) && !location.hash)
  addEventListener("load", () => setTimeout(() => {
    const found = all("article .highlighted").find((x) => !x.closest("h1"));
    found?.closest("details")?.setAttribute("open", "");
    found?.closest(".folded")?.nextElementSibling.click();
    found?.scrollIntoView({ block: "center" });
  }, 50));

// Output that shows no command has no button to copy a command.
addEventListener("load", () => {
  for (const box of all(".highlight-console"))
    if (!box.textContent.includes("$ ")) box.querySelector(".copybtn")?.remove();
});
