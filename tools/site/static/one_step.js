// "Draw one step" of docs/predict.md: the formulas of cluster/predict.py, under the same
// names, and their picture. tests/docs/test_one_step.py compares both with predict.py.
"use strict";

const [LATENCY, HOP, LAYERS, BACKWARD] = [1e-5, 3e-6, 24, 2 / 3];
const WORTH = 0.05; // so much more efficiency is worth a way that is less simple
const send = (size, [between, within], nodes, { gpus, link, inside, latency }) =>
  size / Math.min(...(nodes > 1 ? [link] : []), ...(gpus > 1 ? [inside] : []))
  + between * latency + within * Math.min(HOP, latency);
const ring = (passes, size, nodes, cluster, ranks = nodes * cluster.gpus) =>
  passes * send(size * (ranks - 1) / ranks, [nodes - 1, ranks - nodes], nodes, cluster);
const allReduce = (size, nodes, cluster) => Math.min(ring(2, size, nodes, cluster),
  2 * send(size, [Math.ceil(Math.log2(nodes)), cluster.gpus - 1], nodes, cluster));

function buckets({ compute, bytes }, nodes, cluster) {
  const found = [];
  for (let ready = 0, sent = 0; ready < bytes;) {
    const size = Math.min((ready ? 25 : 1) * 2 ** 20, bytes - ready);
    const begun = Math.max(sent, BACKWARD * compute * (ready += size) / bytes);
    found.push([ready, begun, sent = begun + allReduce(size, nodes, cluster)]);
  }
  return found;
}

// {step, computed: [[begin, end, is it backward]], sent: [[begin, end]], between machines as well}
function fsdp({ compute, bytes }, nodes, cluster, hybrid) {
  const group = hybrid ? 1 : nodes, gather = ring(1, bytes / LAYERS, group, cluster); // or scatter
  const between = allReduce(bytes / LAYERS, nodes / group, { ...cluster, gpus: 1 });
  let [computed, gathered, free, reduced] = [0, gather, gather, 0];
  const found = { computed: [], sent: gather ? [[0, gather]] : [], between: [] };
  for (let left = 2 * LAYERS - 1; left >= 0; left--) {
    const begun = Math.max(computed, gathered), backward = left < LAYERS;
    computed = begun + (backward ? BACKWARD : 1 - BACKWARD) * compute / LAYERS;
    found.computed.push([begun, computed, backward]);
    gathered = free = Math.max(free, begun) + (left ? gather : 0);
    if (left && gather) found.sent.push([free - gather, free]);
    if (!backward) continue;
    free = Math.max(free, computed) + gather;
    reduced = Math.max(reduced, free) + between;
    if (gather) found.sent.push([free - gather, free]);
    if (between) found.between.push([reduced - between, reduced]);
  }
  return { ...found, step: Math.max(computed, free, reduced) };
}

function ddp(job, nodes, cluster) {
  const forward = (1 - BACKWARD) * job.compute, found = buckets(job, nodes, cluster);
  const sent = nodes * cluster.gpus > 1 ? found.map(([, ...ends]) => ends.map((x) => forward + x)) : [];
  return { computed: [[0, forward, false], [forward, job.compute, true]], sent, step: forward + found.at(-1)[2] };
}

// All that the picture shows. A way: [seconds of a step, efficiency, what limits it].
function predict(v) {
  const job = { compute: v["step-ms"] / 1e3, bytes: 4 * v.parameters }, nodes = v.machines, { gpus } = v;
  const ways = {}, steps = {}, ranks = nodes * gpus, cluster = { gpus, link: v.gbit * 1e9 / 8, inside: v.inside * 1e9, latency: LATENCY };
  for (const way of ["DDP", "HSDP", "FSDP"]) {
    const [atOnce, known] = [{ ...cluster, latency: 0 }, cluster].map((x) =>
      way === "DDP" ? ddp(job, nodes, x) : fsdp(job, nodes, x, way === "HSDP"));
    const { step } = steps[way] = known, efficiency = job.compute / step, late = atOnce.step - job.compute < step - atOnce.step;
    ways[way] = [step, efficiency, efficiency >= 0.9 ? "compute" : late ? "latency" : "bandwidth"];
  }
  const split = { DDP: [1, 1], "ZeRO-1": [1, ranks], HSDP: [gpus, gpus], FSDP: [ranks, ranks] }, gb = v.parameters / 1e9;
  const memory = Object.entries(split).map(([way, [model, rest]]) => [way, [4 * gb / model, 4 * gb / model, 8 * gb / rest]]);
  return { job, steps, sent: buckets(job, nodes, cluster), memory, ways };
}

// In one unit, that of the last
const times = (...seconds) => {
  const [unit, size] = [["ms", 1e-3], ["s", 1], ["min", 60], ["h", 3600]][[10, 600, 7200].filter((most) => seconds.at(-1) >= most).length];
  return `${seconds.map((x) => size < 1 ? digits(x / size) : (x / size).toFixed(1)).join(" of ")} ${unit}`;
};
const took = (ms) => ms < 1000 ? `${digits(ms)} ms` : `${(ms / 1e3).toFixed(1)} s`;
const digits = (x) => x.toLocaleString("en", x < 10 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: 0 });
const typed = (x) => x < 1e6 ? x : x.toExponential().replace("+", ""), short = (x) => x.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
const sum = (some) => some.reduce((x, y) => x + y), at = (x) => +x.toFixed(1);
const box = (x, y, w, h, kind) => `<rect x="${at(x)}" y="${y}" width="${at(Math.max(w, 1))}" height="${h}" class="${kind}"/>`;
const write = (x, y, words, kind = "ink") => `<text x="${at(x)}" y="${y}" class="${kind}">${words}</text>`;

// [the picture as SVG, so many pixels wide; what it says in words]. Below the sliders, it does not repeat them.
function draw(v, width, repeats = true) {
  const { job, steps, sent: ready, memory, ways } = predict(v), wide = width > 560, left = 14, right = width - left, out = [];
  const fits = (parts) => sum(parts) <= v["memory-gb"], fitting = memory.filter(([, parts]) => fits(parts)).map(([way]) => way);
  const [first] = fitting, known = fitting.filter((name) => ways[name]);
  const take = known.reduce((best, name) => ways[name][1] > ways[best][1] + WORTH ? name : best, known[0] ?? "FSDP");
  const way = first === "DDP" ? first : take, isDdp = way === "DDP"; // the way that is drawn, and that the headline names
  const { step, computed, sent, between = [] } = steps[way], limit = ways[way][2], { compute } = job;
  // A long step is cut where nothing new happens: [cut, resumed] is left out.
  const [cut, resumed] = step > 4 * compute ? [2 * compute, step - compute] : [step, step], gap = resumed > cut ? 28 : 0;
  const scale = (right - left - gap) / (step - (resumed - cut)), isShown = ([from, to]) => from < cut || to > resumed;
  const x = (seconds) => left + Math.min(seconds, cut) * scale + (seconds > cut ? gap + Math.max(seconds - resumed, 0) * scale : 0);
  const put = (y, parts, kind) => parts.map((part, i) => out.push(write(left, y + 20 * i, part, kind))), fold = (parts) => wide ? [parts.join(", ")] : parts;
  const bar = ([from, to], y, height, kind) => out.push(box(x(from), y, x(to) - x(from) - (isDdp ? 1 : 0), height, kind));
  const gb = digits(v["memory-gb"]), kinds = ["weights", "gradients", "optimizer"];
  const best = first ? `${first} ${first === "DDP" ? "fits" : "is the first to fit"}` : "no way fits";
  const percent = (name) => ways[name][1] < 0.01 ? "under 1 %" : `${(100 * ways[name][1]).toFixed(0)} %`;
  const needs = Object.fromEntries(memory.map(([name, parts]) => [name, sum(parts) < 1000 ? `${digits(sum(parts))} GB` : `${digits(sum(parts) / 1e3)} TB`])), hybrid = memory.find(([name]) => name === "HSDP")[1];
  const head = isDdp ? `DDP: ${percent(way)} efficient` : !first ? `Nothing fits: ${way} needs ${needs[way]}`
    : wide ? `DDP does not fit: take ${way}, ${percent(way)} efficient` : `Take ${way}: ${percent(way)} efficient`.replace(/(under 1 %).*/, "$1");
  const notes = [first !== "DDP" ? `DDP needs ${needs.DDP} of ${gb} GB` : take !== way ? `${take} would reach ${percent(take)}` : "",
    !fits(hybrid) && ways.HSDP[1] > ways[way][1] ? `HSDP would reach ${percent("HSDP")} ${wide ? "on GPUs " : ""}with ${needs.HSDP}` : ""].filter(Boolean);
  const told = [`GPUs wait ${times(step - compute, step)}`, `limited by ${limit}`];
  let y = 7;
  out.push(write(left, y += 25, head, "ink b h"));
  // Each part has equally many rows for all jobs, so that the picture keeps its height.
  const rows = (parts, kind, count = parts.length) => (put(y + 20, parts, kind), y += 20 * count);
  rows(wide ? [notes.join("; ")] : notes, "ink b", wide ? 1 : 2);
  rows(fold(told), limit === "compute" ? "ink b" : "red b");
  if (repeats) rows(fold([`${short(v.parameters)} parameters, ${took(v["step-ms"])} on one GPU`,
    `${digits(v.gbit)} Gbit/s, ${digits(v.inside)} GB/s inside`, `${digits(v.machines)} × ${v.gpus} GPUs of ${gb} GB`]), "soft");
  y += 32;
  put(y, [`A step with ${way}: each GPU computes`], "ink b");
  out.push(box(left, y + 8, right - left, 32, "wait"));
  for (const ends of computed.filter(isShown)) bar(ends, y + 8, 32, ends[2] ? "blue" : "plain");
  const label = (from, to, words, kind) => to - from < 8 * words.length + 8 ? "" : write((from + to) / 2, y + 29, words, kind);
  const end = x(compute), begin = x(computed[0][1]);
  if (isDdp) out.push(label(left, begin, "forward", "ink mid"), label(begin, end, "backward", "ink b mid"), label(end, gap ? x(cut) : right, `waits ${times(step - compute)}`, "red b mid"));
  else { // what the slivers are stands below them: where backward begins, and one gap with an arrow
    let free = left;
    const say = (from, words, kind, wide) => (out.push(write(Math.max(from, free), y + 54, words, kind)), free = Math.max(from, free) + wide);
    const middles = computed.slice(1).flatMap(([next], i) => x(next) - x(computed[i][1]) > 4 && next < cut ? [(x(next) + x(computed[i][1])) / 2] : []);
    say(left, "forward", "soft", 55);
    const middle = middles.find((z) => z > free + 4 && z < x(cut) - 120), begun = x(Math.max(computed.find((z) => z[2])[0], cut < step && 0));
    if (middle && begun > middle + 120) say(middle - 4, "↑ waits for weights", "red", 130);
    say(begun, "backward", "soft", 0);
    const [, last] = computed.at(-1);
    out.push(label(x(last), right, "waits for gradients", "red b mid"));
  }
  const above = isDdp ? 111 : 92; // from the row of the link to that of the GPUs: DDP has bands between them
  y += above + 8;
  // Red where GPUs wait, green where they compute.
  const send = (ends, y, height) => {
    if (!isShown(ends)) return;
    let [done, last] = ends;
    for (const [from, to] of [...computed, [last, last]]) {
      if (to < done || from > last) continue;
      if (from > done) bar([done, from], y, height, "red");
      if (to > from) bar([Math.max(done, from), done = Math.min(to, last)], y, height, "green");
    }
  };
  const per = isDdp ? Math.ceil(22 * sent.length * (step - (resumed - cut)) / step / (right - left)) : 1; // so many buckets are one box
  for (let i = 0, a = begin; i < sent.length; i += per) {
    const some = sent.slice(i, i + per), last = some.at(-1)[1], from = last - sum(some.map((z) => z[1] - z[0]));
    if (isDdp) {
      const b = begin + ready[Math.min(i + per, sent.length) - 1][0] / job.bytes * (end - begin), [to, at0] = [x(last), x(from)];
      if (isShown([from, last]) && (last <= cut || from >= resumed)) out.push(`<path class="band ${to > end + 1 ? "red" : "green"}" d="M${at(a)} ${y - above + 32}H${at(b - 1)}`
        + `L${at(Math.max(to - 1, at0 + 1))} ${y}H${at(at0)}z"/>`);
      a = b;
    }
    send([from, last], y, between.length ? 15 : 32);
  }
  for (const ends of between) send(ends, y + 17, 15);
  out.push(`<path class="axis" d="M${left} ${y + 42}v-4H${right}v4"/>`, write(left, y + 55, "0", "soft"), write(right, y + 55, times(step), "soft end"));
  if (gap) {
    const middle = x(cut) + gap / 2;
    out.push(box(middle - 10, y - above - 2, 20, above + 48, "paper"));
    for (const top of [y - above, y]) for (const side of [-10, 10]) out.push(`<path class="line" d="M${at(middle + side - 4)} ${top + 32}l8 -32"/>`);
  }
  const what = isDdp ? `The link sends ${digits(sent.length)} buckets${wide && per > 1 ? `, ${digits(per)} in a box` : ""}` : "The link sends weights and gradients";
  put(y - 8, [sent.length ? what : "One GPU sends nothing"], "ink b halo");
  y += 78;
  for (const [i, [kind, words]] of [["green", "sent while computing"], ["red", "sent while waiting"]].entries())
    out.push(box(left + 180 * i, y - 10, 10, 10, kind), write(left + 180 * i + 15, y, words, "soft"));
  if (between.length) put(y += 19, ["above: in a machine; below: between them"], "soft");
  if (gap) put(y += 19, [`//: ${times(resumed - cut)} are left out`], "soft");
  if (!isDdp && !between.length) y += 19;
  if (!gap) y += 19;
  put(y += 36, [`Memory of a GPU: ${best}`], "ink b");
  put(y += 19, ["activations come on top: they are not counted"], "soft");
  // All bars have one scale. It ends behind the limit, or where the longest bar does.
  const start = left + 60, full = right - start - (wide ? 196 : 180), longest = Math.max(v["memory-gb"] / 0.8, ...memory.map(([, parts]) => sum(parts)));
  const line = start + v["memory-gb"] / longest * full;
  y += 22;
  out.push(write(line, y, `${gb} GB`, "ink b mid"), write(right - 106, y, "needs", "soft end"), write(right, y, "efficiency", "soft end"));
  for (const [name, parts] of memory) {
    put((y += 28) - 4, [name], "ink b");
    for (const i of [2, 1, 0]) // the optimizer's bar is below that of the gradients, below that of the weights
      out.push(box(start, y - 19, sum(parts.slice(0, i + 1)) / longest * full, 21, kinds[i]));
    const over = sum(parts) / v["memory-gb"];
    out.push(write(right - 106, y - 4, needs[name], over > 1 ? "ink b end" : "ink end"), write(right, y - 4, over > 1
      ? `${digits(over < 10 ? Math.ceil(10 * over) / 10 : over)} × ${over < 1000 ? "too large" : ""}` : ways[name] ? percent(name) : "not predicted", "ink end"));
  }
  out.push(`<path class="line" d="M${at(line)} ${y - 108}v116"/>`, ...kinds.flatMap((kind, i) => [
    box(left + 90 * i, y + 19, 10, 10, kind), write(left + 90 * i + 15, y + 29, kind, "soft")]));
  const words = `${[head, ...notes].join("; ")}. ${told.join(", ").replace(/^./, (x) => x.toUpperCase())}. Memory: ${best}; activations come on top.`;
  return [`<svg xmlns="http://www.w3.org/2000/svg" class="one-step" role="img" aria-label="${words}" width="${width}" height="${y += 44}"`
    + ` viewBox="0 0 ${width} ${y}">${box(0.5, 0.5, width - 1, y - 1, 'card" rx="8')}${out.join("")}</svg>`, words];
}

const scale = (...powers) => powers.flatMap((n) => [1, 1.3, 1.6, 2, 2.5, 3, 4, 5, 6.4, 7, 8].map((x) => +`${x}e${n}`));
const FIELDS = Object.entries({ // label, unit, default, stops of the slider
  parameters: ["Parameters", "", 1.3e9, scale(6, 7, 8, 9, 10, 11)],
  "step-ms": ["Step on one GPU", " ms", 640, [...scale(0, 1, 2, 3), 10000]],
  "memory-gb": ["GPU memory", " GB", 40, [8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288]],
  machines: ["Machines", "", 8, [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]],
  gpus: ["GPUs in each", "", 8, [1, 2, 3, 4, 6, 8, 12, 16]],
  gbit: ["Link", " Gbit/s", 100, [0.1, 1, 2.5, 10, 25, 40, 50, 100, 200, 400, 800, 1600, 3200]],
  inside: ["Link inside", " GB/s", 450, [1, 2, 5, 10, 16, 25, 32, 50, 64, 100, 150, 200, 300, 450, 900, 1800]],
});
const PRESETS = { // steps of 32,768 tokens (8B: 16,384, 70B: 8,192) at 400 TFLOP/s
  "GPT-2": { parameters: 124e6, "step-ms": 61, "memory-gb": 40 },
  "1.3B": { parameters: 1.3e9, "step-ms": 640, "memory-gb": 40 },
  "8B": { parameters: 8e9, "step-ms": 1966, "memory-gb": 80 },
  "70B": { parameters: 70e9, "step-ms": 8602, "memory-gb": 80 },
};

const MORE = ["memory-gb", "gpus", "inside"]; // these sliders are folded

function explore(picture) {
  const intro = picture.previousElementSibling; // here, one sees that there are sliders
  intro.innerHTML = intro.innerHTML.replace(/On <a.*presets\.\s*Set them/s, "Set the sliders");
  const figure = document.createElement("figure"), values = Object.fromEntries(FIELDS.map(([name, x]) => [name, x[2]]));
  figure.className = "draw-one-step";
  const presets = Object.keys(PRESETS).map((name) => `<button type="button">${name}</button>`).join(" ");
  const sliders = (more) => FIELDS.filter(([name]) => MORE.includes(name) === more).map(([name, [label, , , stops]]) =>
    `<label>${label} <b></b><input type="range" name="${name}" aria-label="${label}" max="${stops.length - 1}"></label>`).join("");
  figure.innerHTML = `<p class="presets">${presets}</p><form>${sliders(false)}<details><summary>GPU memory, GPUs per machine, link inside</summary><span>${sliders(true)}</span></details></form><em></em><div></div>`
    + '<p><a>Link to this picture</a> <button type="button">Copy the answer</button></p><p class="highlight command"><code></code> <button type="button">Copy</button></p><span role="status"></span>';
  picture.replaceWith(figure);
  const [form, note, drawing, link, command, status] = figure.querySelectorAll("form, em, div, a, code, [role]");
  // At the sliders, the answer is said at the foot of a phone, unless the picture shows it.
  const isSeen = (x) => x.getBoundingClientRect().top < innerHeight && x.getBoundingClientRect().bottom > 0;
  const inSight = new IntersectionObserver(() => status.classList.toggle("said", !isSeen(form) || isSeen(drawing.querySelector(".h"))));
  let prints = false; // then, there are no sliders
  const show = () => {
    for (const [name, [, unit, , stops]] of FIELDS) {
      const slider = form.elements[name], text = name === "parameters" ? short(values[name])
        : name === "step-ms" ? took(values[name]) : digits(values[name]) + unit;
      slider.value = stops.findLastIndex((x) => x <= values[name]);
      slider.ariaValueText = slider.previousElementSibling.textContent = text;
    }
    for (const button of figure.querySelectorAll(".presets button"))
      button.ariaPressed = Object.entries(PRESETS[button.textContent]).every(([name, x]) => values[name] === x);
    [drawing.innerHTML, status.textContent] = draw(values, drawing.clientWidth || 320, prints); // 0: it is not laid out yet
    const answer = drawing.querySelector(".h");
    answer.innerHTML = answer.innerHTML.replace(/\d+ %/, '<tspan class="percent">$&</tspan>');
    inSight.disconnect();
    for (const x of [answer, form]) inSight.observe(x);
    link.href = `#${FIELDS.map(([name]) => `${name}=${typed(values[name])}`).join("&")}`;
    command.innerHTML = (`python cluster/predict.py --parameters ${typed(values.parameters)} --step-ms ${values["step-ms"]}`
      + ` --link ${values.gbit}Gbit --inside ${values.inside}GB/s --nodes ${values.machines} --gpus ${values.gpus}`).replace(/--\S+ \S+/g, "<span>$&</span>");
  };
  const read = () => {
    const asked = new URLSearchParams(location.hash.slice(1)), ignored = [];
    for (const [name, [, unit, , stops]] of FIELDS) {
      const x = unit ? +asked.get(name) : Math.round(asked.get(name));
      if (x >= stops[0] && x <= stops.at(-1)) values[name] = x;
      else if (asked.has(name)) ignored.push(` ${name}=${asked.get(name)} (takes ${typed(stops[0])} to ${typed(stops.at(-1))})`);
    }
    if (MORE.some((name) => asked.has(name))) form.querySelector("details").open = true;
    note.textContent = ignored.length ? `Ignored in the address:${ignored}` : "";
    show();
  };
  form.oninput = ({ target: { name, value } }) => {
    values[name] = Object.fromEntries(FIELDS)[name][3][value];
    changed();
  };
  const changed = () => (show(), history.replaceState(null, note.textContent = "", link.href));
  figure.onclick = ({ target }) => {
    if (PRESETS[target.textContent]) changed(Object.assign(values, PRESETS[target.textContent]));
    else if (target.textContent === "Copy the answer") navigator.clipboard?.writeText(status.textContent);
    else if (target.textContent === "Copy") navigator.clipboard?.writeText(command.textContent);
  };
  addEventListener("hashchange", read);
  addEventListener("beforeprint", () => show(prints = true));
  addEventListener("afterprint", () => show(prints = false));
  new ResizeObserver(show).observe(drawing);
  read();
  if (location.hash.includes("=")) figure.closest("section").scrollIntoView();
}
document.querySelectorAll("p:has(> img[src$='/one_step.svg'])").forEach(explore);
