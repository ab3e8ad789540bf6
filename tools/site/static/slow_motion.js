// The start page's step in slow motion. All numbers are those that two ranks of
// multigpu.py noted (tools/site/slow_motion.py); this file draws them.
"use strict";

const RECORD = JSON.parse(document.getElementById("slow-motion-record").textContent);
const EPOCHS = 3, SAMPLES = 16, RANKS = [0, 1], RIGHT = "000";
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const same = (x, y) => String(x) === String(y);
const mean = (x, y) => (x + y) / 2;
const gap = ([a, b]) => Math.abs(a.weight - b.weight);

// What the two ranks noted: epochs[e].steps[i][rank] is { taken, loss, own, used, weight },
// where `own` is a gradient before the ranks may average it, and `used` the one after.
function read(key) {
  const noted = RECORD[key];
  const steps = noted[0][0].map((_, i) => noted.map(([its]) => {
    const [taken, loss, own, used, weight] = its[i];
    return { taken, loss, own, used, weight: Math.round(weight * 1000) / 1000 };
  }));
  const each = steps.length / EPOCHS, [, losses] = noted[0];
  const epochs = losses.map((heldOut, e) => ({ heldOut, steps: steps.slice(e * each, (e + 1) * each) }));
  const order = ({ steps }) => steps.map((step) => step.map((x) => x.taken));
  for (const epoch of epochs.slice(1)) epoch.repeats = same(order(epoch), order(epochs[0]));
  const [averages, announces] = [...key].map((off) => off === "0");
  return { key, epochs, averages, announces, overlaps: same(...steps[0].map((x) => x.taken)) };
}
// A run without the sampler but with set_epoch ends at once: its record is an error.
const RUNS = Object.keys(RECORD).filter((key) => typeof RECORD[key] !== "string");
const EVERY = RUNS.flatMap((key) => read(key).epochs.flatMap((epoch) => epoch.steps));
const ends = (of) => [Math.min(0, ...EVERY.flat().flatMap(of)), Math.max(0, ...EVERY.flat().flatMap(of))];
const WIDEST = Math.max(...EVERY.map(gap));

// The pictures of a run, in order. The first step has three: the ranks take samples,
// compute gradients, and go on from them. Later steps have one.
function frames({ epochs }) {
  return [{}, ...epochs.flatMap(({ steps }, epoch) => [
    ...steps.flatMap((_, step) => (epoch || step ? [2] : [0, 1, 2]).map((phase) => ({ epoch, step, phase }))),
    { epoch, step: steps.length - 1, phase: 3 },
  ])];
}

// Sentences on what has just happened: [words, "right", "wrong" or nothing].
// The judgement comes first, the numbers second.
function tell(run, frame) {
  const said = happened(run, frame);
  return [...said.filter(([, kind]) => kind), ...said.filter(([, kind]) => !kind)];
}
// For how many milliseconds Play shows them. Later steps say little that is new.
function time(run, frame) {
  const words = tell(run, frame).map(([said]) => said).join(" ").split(" ").length;
  return frame.step && frame.phase === 2 ? 1600 : Math.min(4000, 800 + 100 * words);
}

function happened(run, { epoch, step, phase }) {
  if (epoch === undefined) return [["Two ranks, each with its own copy of the model, train on 16 samples with DistributedDataParallel (DDP)."]];
  const now = run.epochs[epoch], [a, b] = now.steps[step], apart = gap([a, b]);
  if (phase === 3) return [[`Epoch ${epoch + 1} ends: the held-out loss${epoch ? "" : ", of samples that no rank trains on,"} is ${fixed(now.heldOut)}.`], ...judge(run, epoch)];
  const takes = [`Epoch ${epoch + 1}, step ${step + 1}: rank 0 takes samples ${a.taken.join(", ")}, rank 1 takes ${b.taken.join(", ")}.`];
  const drift = apart ? [[`The weights are ${fixed(apart, 3)} apart: these are ${epoch || step ? "still two models" : "two models now"}.`, "wrong"]] : [];
  const shares = run.overlaps ? ["Both take the same samples: rank 1 only repeats the work of rank 0.", "wrong"]
    : ["The sampler gives each rank samples of its own.", "right"];
  if (phase === 0) return [takes, shares];
  if (phase === 1) return [[`backward() computes a gradient on each rank from its samples: ${fixed(a.own)} on rank 0, ${fixed(b.own)} on rank 1.`],
    ...run.overlaps ? [["The same samples give the same gradient.", "wrong"]] : []];
  if (now.repeats) return [takes, ["Nobody calls set_epoch: the order of epoch 1 comes again.", "wrong"], ...drift];
  if (epoch && run.announces) return [takes, [`set_epoch(${epoch}) shuffles anew: the ranks take the samples in another order.`, "right"], ...drift];
  if (epoch || step) return [takes, shares, ...drift];
  if (run.averages) return [[`self.ddp_model was called, so DDP averages the gradients during backward(): both ranks go on with ${fixed(a.used)}.`],
    run.overlaps ? ["The gradients were equal already: rank 1 adds nothing.", "wrong"] : ["Both weights make the same step: the ranks still have one model.", "right"]];
  return [["self.model was called, and not self.ddp_model: DDP sends no gradient, and each rank goes on with its own.", "wrong"],
    ...apart ? drift : [["The weights stay equal only because both ranks have taken the same samples."]]];
}

// At the end of an epoch. A wrong run may print the better loss.
function judge(run, epoch) {
  const now = run.epochs[epoch], right = read(RIGHT).epochs[epoch].heldOut, said = [], wrong = (words) => said.push([words, "wrong"]);
  if (run.key === RIGHT)
    return [["This is the right run: an epoch takes every sample once, each epoch has a new order, and both ranks keep the same weights.", "right"]];
  if (gap(now.steps.at(-1)))
    wrong("Without ddp_model, each rank trains a model of its own on its share of the samples, and only rank 0's is saved.");
  else if (!run.averages) wrong("Without ddp_model, DDP sends no gradient: the weights are equal only because the samples are.");
  if (now.repeats) wrong("Without set_epoch, every epoch has the order of the first: the same samples always meet in a batch, and what one batch gets wrong never averages out.");
  if (run.overlaps) wrong("Without the sampler, both ranks take the same samples: rank 1 does no useful work.");
  const better = now.heldOut < right, theirs = `the ${fixed(right)} of the right run`;
  if (!said.length) said.push(["The right run has the same loss after epoch 1."]);
  else if (run.overlaps) said.push([`This loss will not tell you: with twice as many steps, it ${better ? "is better than" : "comes near"} ${theirs}.`]);
  else if (better) said.push([`This loss will not tell you: by chance, it is better than ${theirs}.`]);
  else said.push([`This loss will not tell you: your script has no right run to compare it with.`]);
  return said;
}

// The picture, as SVG

const at = (x) => +x.toFixed(1);
const box = (x, y, w, h, kind, more = "") => `<rect x="${at(x)}" y="${at(y)}" width="${at(w)}" height="${at(h)}" class="${kind}" ${more}/>`;
const write = (x, y, words, kind = "ink") => `<text x="${at(x)}" y="${at(y)}" class="${kind}">${words}</text>`;
const rule = (x1, y1, x2, y2, kind) => `<path d="M${at(x1)} ${at(y1)}L${at(x2)} ${at(y2)}" class="${kind}"/>`;
const group = (kind, x, y, parts) => `<g class="${kind}" transform="translate(${x} ${y})">${parts.flat().join("")}</g>`;
// What is drawn comes from where it was in the picture before.
const comes = (x, y, drawn) => `<g class="moves" style="--x:${at(x)}px;--y:${at(y)}px">${drawn}</g>`;
const square = (x, y, size, sample, kind, high = size) => box(x, y, size, high, kind) + write(x + size / 2, y + high / 2 + 4.5, sample, "number");
const line = (points, kind) => `<polyline points="${points.map((z) => z.map(at)).join(" ")}" class="${kind}"/>`;

// The samples, and below them which of them each rank takes: time runs to the right.
// A narrow picture has only the current epoch, and epoch 1 in thin lines to compare with.
// Of two ranks that share the samples, a wide picture has room for larger squares.
const THIN = 13, high = (size, wide) => Math.floor(wide ? 1.2 * size : size), EPOCH = (size) => 2 * high(size, true) + 28;
const lanesTall = (size, wide) => wide ? size + 30 + EPOCHS * EPOCH(size) : 3 * size + 2 * THIN + 64;
function lanes(run, frame, left, size, wide) {
  const begun = (e, s) => frame.epoch > e || frame.epoch === e && frame.step >= s;
  const place = (i, w = size) => left + i * w + 4 * Math.floor(i / 4);
  const h = high(size, wide), w = wide && !run.overlaps ? Math.round(1.4 * size) : size;
  const count = new Map(), good = run.key === RIGHT ? "ok-ink" : "ink"; // a wrong run has nothing in green here
  const epochs = run.epochs.map(({ steps, repeats }, e) => {
    const current = wide || e === (frame.epoch ?? 0), y = size + (wide ? 54 + e * EPOCH(size) : current ? e ? 56 + 2 * THIN : 48 : 30);
    if (!current) return e ? [] : [write(-5, y + THIN + 4, "epoch 1", "ink tiny"), ...steps.flatMap((step, s) => RANKS.flatMap((rank) =>
      step[rank].taken.map((sample, i) => square(place(4 * s + i), y + rank * THIN, size, sample, run.overlaps && rank ? "rank1 twice" : `rank${rank}`, THIN))))];
    const parts = [write(0, y - 8, `epoch ${e + 1}`, "ink b")];
    for (const rank of RANKS) parts.push(write(0, y + h * (rank + 0.5) + 4.5, `rank ${rank}`, "ink small"));
    if (repeats && begun(e, 0)) parts.push(write(left + 24, y - 8, "the order of epoch 1 again", "bad-ink b"));
    else if (run.announces && e && begun(e, 0)) parts.push(write(left + 24, y - 8, `set_epoch(${e}): a new order`, `${good} b`));
    steps.forEach((step, s) => RANKS.forEach((rank) => step[rank].taken.forEach((sample, i) => {
      const x = place(4 * s + i, w), top = y + rank * h, kind = `rank${rank}` + (repeats || run.overlaps && rank ? " twice" : "");
      if (!begun(e, s)) return parts.push(box(x, top, w, h, "empty"));
      const drawn = square(x, top, w, sample, kind, h), fresh = frame.epoch === e && frame.step === s && (frame.phase === 0 || frame.phase === 2 && (e || s));
      if (frame.epoch === e) count.set(sample, [...count.get(sample) ?? [], rank]);
      parts.push(fresh ? comes(place(sample) - x, 22 - top, drawn) : drawn);
    })));
    if (frame.epoch === e && frame.phase !== 3)
      parts.push(box(place(4 * frame.step, w) - 1, y - 1, 4 * w + 2, 2 * h + 2, "now"));
    return parts;
  });
  const pool = [...Array(SAMPLES).keys()].map((sample) => {
    const by = count.get(sample);
    return square(place(sample), 22, size, sample, !by ? "free" : by.length > 1 ? "rank1 twice" : `rank${by[0]}`);
  });
  const ended = frame.phase === 3, all = `Epoch ${frame.epoch + 1} took each sample ${run.overlaps ? "twice" : "once"}`;
  const title = ended ? write(0, 14, all, `${run.overlaps ? "bad-ink" : good} b`) : write(0, 14, `${SAMPLES} samples`, "ink b");
  return [group("pool", 0, 0, [title, pool]), group("taken", 0, 0, epochs)];
}

// Gradients on a line of numbers, rank 0 above it and rank 1 below.
// The link between them is green or red, or grey where nothing was sent.
function gradient(pairs, width, note, link) {
  const [low, high] = ends((x) => [x.own, x.used]), x = (value) => 12 + (value - low) / (high - low) * (width - 24), y = (rank) => rank ? 49 : 31;
  const out = [write(0, 14, "gradient", "ink b"), write(width, 14, ...note), rule(0, 40, width, 40, "axis"),
    rule(x(0), 40, x(0), 46, "axis"), write(x(0), 66, "0", "ink small mid")];
  const [first, last] = pairs.map(([, to]) => x(to)), one = first === last;
  if (pairs.length) out.push(rule(first, one ? 31 : 40, last, one ? 49 : 40, link));
  pairs.forEach(([from, to], rank) => {
    const before = from > to && x(to) > 50 || x(to) > width - 60; // where there is room for the number
    out.push(rule(x(from), y(rank), x(to), y(rank), "trail"),
      comes(x(from) - x(to), 0, `<circle cx="${at(x(to))}" cy="${y(rank)}" r="6" class="rank${rank}"/>`),
      one && rank ? "" : write(x(to) + (before ? -10 : 10), y(rank) + (rank ? 6 : 2), fixed(to), before ? "ink small end" : "ink small"));
  });
  return group("gradient", 0, 0, out);
}

// How far each rank's weight is from the mean of both, after each step so far.
// Both begin with the same weight.
function weight(run, steps, width, tall, wide) {
  const middle = 22 + tall / 2, part = (width - 54) / run.epochs.flatMap((epoch) => epoch.steps).length;
  const last = steps.at(-1), apart = steps.some(gap), x = part * steps.length;
  const y = (step, rank) => middle - (step[rank].weight - mean(step[0].weight, step[1].weight)) / WIDEST * tall;
  const points = (rank) => [[0, middle], ...steps.map((step, i) => [part * (i + 1), y(step, rank)])];
  const out = [write(0, 14, "weight", "ink b"), rule(0, middle, last ? x : width - 54, middle, "axis"), write(...wide ? [60, 14, width > 320 ? "· distance from the mean" : ""] : [0, 22 + tall + 16, "distance from the mean"], "soft small")];
  if (apart) {
    out.push(line([...points(0), ...points(1).reverse()], "gap"), write(width, 14, `${fixed(gap(last), 3)} apart`, "bad-ink b end"));
    for (const rank of RANKS) {
      const side = Math.sign(y(last, rank) - middle) * Math.max(Math.abs(y(last, rank) - middle), 7);
      out.push(line(points(rank), `line${rank}`), `<circle cx="${at(x)}" cy="${at(y(last, rank))}" r="3.5" class="rank${rank}"/>`,
        write(x + 7, middle + side + 4, `rank ${rank}`, "ink small"));
    }
  } else if (last) {
    out.push(...RANKS.map((rank) => line(points(rank), run.averages ? "met" : "unsent")), write(width, 14, "equal", run.averages ? "ok-ink b end" : "ink b end"));
  }
  return group("weight", 0, 0, out);
}

// The mean loss of each step, and what is held out; dashed in a wrong run, the right run's.
// A wide picture has it below the weights, at the same places.
function chart(run, frame, width, tall, wide) {
  const base = 24 + tall, part = (wide ? width - 54 : width) / EPOCHS, [, most] = ends((x) => x.loss), right = read(RIGHT);
  const points = ({ epochs }) => epochs.flatMap(({ steps }, e) => steps.map(([a, b], s) =>
    [(e + (s + (wide ? 1 : 0.5)) / steps.length) * part, base - tall * mean(a.loss, b.loss) / most]));
  const seen = run.epochs.flatMap((x, e) => x.steps.filter((_, s) =>
    frame.epoch > e || frame.epoch === e && (frame.step > s || frame.step === s && frame.phase > 0)));
  const drawn = points(run).slice(0, seen.length);
  const out = [write(0, 14, "loss of each step", "ink b"), rule(0, base, width, base, "axis"), rule(part, 24, part, base, "trail"), rule(2 * part, 24, 2 * part, base, "trail"), line(drawn, "loss")];
  if (run.key !== RIGHT) out.push(line(points(right), "dashed"), write(width, 14, "dashed: right run", "ink small end"));
  if (seen.length) {
    const [[x, y], [a, b]] = [drawn.at(-1), seen.at(-1)], falls = drawn.at(-2)?.[1] < y - 8 && x < width - 40;
    out.push(`<circle cx="${at(x)}" cy="${at(y)}" r="4" class="ink"/>`,
      write(falls ? x + 9 : x, falls ? y - 2 : y - 8, fixed(mean(a.loss, b.loss), 1), falls ? "ink small halo" : "ink small mid halo"));
  }
  out.push(write(0, base + 20, "held-out loss after epoch", "ink small"));
  right.epochs.forEach(({ heldOut }, e) => {
    const ended = frame.epoch > e || frame.epoch === e && frame.phase === 3;
    out.push(write(e * part, base + 37, `${e + 1}:`, "ink"), write(e * part + 17, base + 37, ended ? fixed(run.epochs[e].heldOut) : "–", ended ? "held-out ink b" : "ink"));
    if (run.key !== RIGHT) out.push(write(e * part, base + 53, `right: ${fixed(heldOut)}`, "ink small"));
  });
  return group("losses", 0, 0, out);
}

// [the picture so many pixels wide, what it says in words]
function draw(key, index, room) {
  const run = read(key), frame = frames(run).at(index), wide = room > 700, width = Math.max(room, 340), pad = 14;
  const words = tell(run, frame).map(([said]) => said).join(" "), inner = width - 2 * pad, left = wide ? 48 : 44, gaps = left + 12;
  const size = Math.min(26, Math.floor(((wide ? 0.53 : 1) * inner - gaps) / SAMPLES));
  const half = wide ? gaps + SAMPLES * size + 28 : 0, rest = inner - half, part = wide ? rest : (inner - 20) / 2;
  const tall = lanesTall(size, wide);
  const past = run.epochs.flatMap(({ steps }, e) => steps.filter((_, s) => e < frame.epoch || e === frame.epoch && s <= frame.step));
  const now = past.at(-1), { phase } = frame, moved = phase > 1 ? past : past.slice(0, -1);
  const gradients = phase > 0 ? now.map(({ own, used }) => phase > 1 ? [own, used] : [own, own]) : [];
  const equal = !run.overlaps && run.averages, sent = run.overlaps ? ["equal already", "bad-ink b end"] : ["averaged", "ok-ink b end"];
  const note = phase > 1 ? run.averages ? sent : ["not sent", "bad-ink b end"] : phase && run.averages ? ["not sent yet", "ink small end"] : ["", "ink"];
  const y = wide ? pad : tall + pad, low = wide ? 60 : 40, below = y + (wide ? 180 : 84);
  const parts = [[pad, pad, lanes(run, frame, left, size, wide)],
    [pad + half, y, gradient(gradients, part, note, phase > 1 && equal ? "met" : "unsent")],
    [wide ? pad + half : pad + part + 20, wide ? y + 74 : y, weight(run, moved, part, wide ? 80 : 32, wide)],
    [pad + half, below, chart(run, frame, rest, low, wide)]];
  const height = Math.max(below + low + 24 + 53 + pad - 4, tall + 2 * pad);
  return [`<svg xmlns="http://www.w3.org/2000/svg" class="slow-motion${wide ? " wide" : ""}" role="img" aria-label="${words}" width="${width}" height="${height}"`
    + ` viewBox="0 0 ${width} ${height}">${box(0.5, 0.5, width - 1, height - 1, "card", 'rx="8"')}`
    + `${parts.map(([x, top, drawn]) => group("", x, top, [drawn])).join("")}</svg>`, words];
}

function play(figure) {
  const caption = figure.querySelector("[role=status]"), drawing = figure.querySelector(".drawing");
  const [model, sampler, order] = figure.querySelectorAll("[type=checkbox]"), [start, back, step] = figure.querySelectorAll("button"), count = figure.querySelector(".count");
  model.checked = false; // the page begins with a mistake, at the end of its run
  const key = () => [model, order, sampler].map((x) => x.checked ? 0 : 1).join("");
  const pictures = () => frames(read(key()));
  const last = () => pictures().length - 1;
  let index = last(), timer, width;
  const show = (room = drawing.clientWidth) => {
    const said = tell(read(key()), pictures()[index]), off = key().slice(0, 2);
    if (index === last() && off !== "00") said.push([`<span class="again">Tick the line${off === "11" ? "s to repair them" : " to repair it"}.</span>`]);
    [drawing.innerHTML] = draw(key(), index, width = room);
    count.textContent = `${index + 1} of ${last() + 1}`;
    caption.ariaLive = timer ? "off" : "polite"; // the next one would cut it off
    caption.innerHTML = said.map(([words, kind]) => kind ? `<strong class="${kind}">${words}</strong>` : words).join(" ");
    back.disabled = !index;
    start.textContent = timer ? "Pause" : "Play";
  };
  const follow = () => {
    const link = location.hash.match(/^#run=([01])([01])([01])&step=(\d+)$/);
    if (!link) return;
    stop();
    [model, order, sampler].forEach((x, i) => x.checked = link[i + 1] === "0");
    if (order.checked) sampler.checked = true;
    index = Math.min(Math.max(link[4] - 1, 0), last());
    was = pictures();
    show();
    figure.scrollIntoView();
  };
  // The address holds what is shown, to be sent.
  const keep = () => history.replaceState(null, "", `#run=${key()}&step=${index + 1}`);
  const stop = () => timer = clearTimeout(timer);
  const go = (by) => {
    const all = last() + 1;
    index = (index + by + all) % all; // after the end comes the first
    if (index === last()) stop();
    show();
    if (!timer) keep();
  };
  const wait = () => timer = setTimeout(() => {
    go(1);
    if (timer) wait();
  }, time(read(key()), pictures()[index]));
  const look = () => {
    show();
    caption.scrollIntoView({ block: "nearest" });
  };
  start.onclick = () => {
    if (timer) return keep(show(stop()));
    if (index === last()) index = 0;
    wait();
    look();
  };
  back.onclick = () => go(-1, stop());
  step.onclick = () => go(1, stop());
  // The picture of the same step in another run, which may have fewer steps in an epoch.
  const like = ({ epoch, step, phase }) => pictures().findLastIndex((x) =>
    x.epoch === epoch && x.phase === phase && (phase === 3 || !(x.step > step)));
  let was = pictures();
  figure.onchange = ({ target }) => {
    if (target === sampler) order.checked = sampler.checked; // only this sampler has set_epoch
    if (order.checked) sampler.checked = true;
    stop();
    index = index < was.length - 1 ? like(was[index]) : last();
    was = pictures();
    keep();
    look();
  };
  figure.onkeydown = (event) => {
    const press = { ArrowRight: step, ArrowLeft: back }[event.key];
    if (!press) return;
    event.preventDefault();
    press.click();
  };
  addEventListener("resize", () => drawing.clientWidth === width || show());
  addEventListener("beforeprint", () => show(760)); // paper has room for all epochs
  addEventListener("afterprint", () => show());
  addEventListener("hashchange", follow);
  show();
  follow();
}
document.querySelectorAll(".watch").forEach(play);
