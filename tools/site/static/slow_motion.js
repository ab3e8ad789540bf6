// The start page's step in slow motion. All numbers are those that two ranks of
// multigpu.py noted (tools/site/slow_motion.py); this file draws them.
"use strict";

const RECORD = JSON.parse(document.getElementById("slow-motion-record").textContent);
const EPOCHS = 3, SAMPLES = 16, RANKS = [0, 1], RIGHT = "000";
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const same = (x, y) => String(x) === String(y);
const gap = ([{ apart }]) => apart;

// What the two ranks noted: epochs[e].steps[i][rank] is { taken, own, used, apart }, where
// `own` is a gradient before the ranks may average it, and `used` the one after. `apart` is
// how far the ranks' weights are from each other after the step.
function read(key) {
  const noted = RECORD[key];
  const steps = noted[0][0].map((_, i) => noted.map(([its]) => {
    const [taken, own, used, apart] = its[i];
    return { taken, own, used, apart };
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
const WIDEST = Math.max(...RUNS.flatMap((key) => read(key).epochs.flatMap(({ steps }) => steps.map(gap))));

// The pictures of a run, in order. The first step has four: the ranks take samples, compute
// gradients, may average them, and change their weights. Later steps have one.
function frames({ epochs }) {
  return [{}, ...epochs.flatMap(({ steps }, epoch) => [
    ...steps.flatMap((_, step) => (epoch || step ? [3] : [0, 1, 2, 3]).map((phase) => ({ epoch, step, phase }))),
    { epoch, step: steps.length - 1, phase: 4 },
  ])];
}

// What a frame has of a run: two runs are alike for as long as this is.
function seen({ epochs, averages }, { epoch, step, phase }) {
  if (epoch === undefined) return "";
  const { steps, repeats } = epochs[epoch];
  return String([repeats, phase > 1 && averages, steps[step]?.map((x) => [x.taken, x.own, phase > 1 && x.apart])]);
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
  return frame.step && frame.phase === 3 ? 900 : Math.min(2000, 400 + 50 * words);
}

function happened(run, { epoch, step, phase }) {
  if (epoch === undefined) return [["Two ranks, each with its own copy of the model, train on 16 samples with DistributedDataParallel (DDP)."]];
  const now = run.epochs[epoch], [a, b] = now.steps[step], apart = gap([a, b]);
  if (phase === 4) return [...judge(run, epoch)];
  const takes = [`Epoch ${epoch + 1}, step ${step + 1}: rank 0 takes samples ${a.taken.join(", ")}, rank 1 takes ${b.taken.join(", ")}.`];
  const drift = apart ? [[`The two models are ${fixed(apart)} apart.`, "wrong"]] : [];
  const shares = run.overlaps ? ["Both take the same samples: rank 1 only repeats the work of rank 0.", "wrong"]
    : ["The sampler gives each rank samples of its own.", "right"];
  if (phase === 0) return [takes, shares];
  if (phase === 1) return [[`backward() computes gradients on each rank from its samples. That of one weight is ${fixed(a.own)} on rank 0 and ${fixed(b.own)} on rank 1.`],
    ...run.overlaps ? [["The same samples give the same gradients.", "wrong"]] : []];
  if (phase === 2 && !run.averages) return [["self.model was called, and not self.ddp_model: DDP sends nothing, and each rank keeps its own gradients.", "wrong"]];
  if (phase === 2) return [run.overlaps ? ["DDP sends the gradients, but they were equal already: rank 1 adds nothing.", "wrong"]
    : ["self.ddp_model was called: during backward(), DDP sends the gradients, so that both ranks learn from the samples of both.", "right"],
  [`Both go on with the average, ${fixed(a.used)}.`]];
  if (now.repeats) return [takes, [`Nobody calls set_epoch: epoch ${epoch + 1} takes the samples in the order of epoch 1.`, "wrong"], ...drift];
  if (epoch && run.announces) return [takes, [`set_epoch(${epoch}) shuffles anew: in epoch ${epoch + 1}, other samples share a batch.`, "right"], ...drift];
  if (epoch || step) return [takes, shares, ...drift];
  if (apart) return [["optimizer.step() changes each rank's weights by its own gradients."], [`These are two models now, ${fixed(apart)} apart.`, "wrong"]];
  return [["optimizer.step() changes the weights of both ranks by the same gradients."],
    run.averages ? ["The ranks still have one model.", "right"] : ["The weights stay equal only because both ranks have taken the same samples."]];
}

// How far the held-out loss is from the right run's, in percent
const percent = (run, epoch) => Math.round(100 * (run.epochs[epoch].heldOut / read(RIGHT).epochs[epoch].heldOut - 1));
const WORSE = 5; // from so many percent on, a loss shows the mistake

// At the end of an epoch. A wrong run may print the better loss.
function judge(run, epoch) {
  const now = run.epochs[epoch], right = run.key === RIGHT, said = [], wrong = (words) => said.push([words, "wrong"]);
  if (right)
    said.push(["This is the right run: an epoch takes every sample once, each epoch has a new order, and both ranks keep the same weights.", "right"]);
  if (gap(now.steps.at(-1))) wrong(`Without ddp_model, each rank trains a model of its own: the two are ${fixed(gap(now.steps.at(-1)))} apart${now.repeats ? "" : ", and only rank 0's is saved"}.`);
  else if (!run.averages) wrong("Without ddp_model, DDP sends nothing.");
  if (now.repeats) wrong(`Without set_epoch, the same samples share a batch in every epoch${run.averages ? ": the model fits this order" : ""}.`);
  if (run.overlaps) wrong(`Without the sampler, both ranks take the same samples${run.averages ? ": rank 1 does no useful work" : ""}.`);
  const far = percent(run, epoch), side = far < 0 ? "below" : "above";
  const than = right ? "" : far ? `, ${Math.abs(far)}\u00a0% ${side} the right run` : ", as in the right run";
  said.push([`Held-out loss${epoch || !right ? "" : ", of samples that no rank trains on,"} after epoch ${epoch + 1}: ${fixed(now.heldOut)}${than}.`]);
  if (!right && !said[0][1]) said.push(["Epoch 1 is like that of the right run."]);
  else if (run.overlaps && far < WORSE) said.push(["Twice as many steps hide the mistake."]);
  else if (!right && far < WORSE) said.push([far < 0 ? "It is lower by chance." : "The loss does not show it."]);
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
// A message goes so far, from a second on; what it brings is seen from a second on.
const goes = (x, from, drawn) => `<g class="goes" style="--x:${at(x)}px;--t:${from}s">${drawn}</g>`;
const late = (until, drawn) => `<g class="late" style="--t:${until}s">${drawn}</g>`;
// What both ranks took has the colours of both.
const shared = (x, y, size) => box(x, y, size, size, "rank0") + `<path d="M${at(x + size)} ${y}v${size}h${-size}z" class="rank1"/>` + box(x, y, size, size, "both twice");
const square = (x, y, size, sample, kind, high = size) => box(x, y, size, high, kind) + write(x + size / 2, y + high / 2 + 4.5, sample, "number");
const circle = (x, y, r, kind) => `<circle cx="${at(x)}" cy="${at(y)}" r="${r}" class="${kind}"/>`;
const line = (points, kind) => `<polyline points="${points.map((z) => z.map(at)).join(" ")}" class="${kind}"/>`;

// The samples, and below them which of them each rank takes: time runs to the right.
// A narrow picture has only the first and the current epoch: the first in thin lines, to compare with.
// Two ranks that share the samples need half as many columns: these are wider, and end where the samples do.
const THIN = 15, high = (size, wide) => Math.floor(wide ? 1.2 * size : size), EPOCH = (size) => 2 * high(size, true) + 28;
const lanesTall = (size, wide) => wide ? size + 30 + EPOCHS * EPOCH(size) : 3 * size + 2 * THIN + 84;
function lanes(run, frame, left, size, wide) {
  const begun = (e, s) => frame.epoch > e || frame.epoch === e && frame.step >= s;
  const place = (i, w = size) => left + i * w + 4 * Math.floor(i / 4);
  const h = high(size, wide), free = wide ? size : size + 2;
  const home = (i) => wide ? place(i) : i * free + 4 * Math.floor(i / 4); // above them, no label needs room
  const w = run.overlaps ? size : (home(SAMPLES - 1) + free - left - 4) / 8;
  const count = new Map(), good = run.key === RIGHT ? "ok-ink" : "ink"; // a wrong run has nothing in green here
  const epochs = run.epochs.map(({ steps, repeats }, e) => {
    const current = wide || e === (frame.epoch ?? 0), y = size + (wide ? 54 + e * EPOCH(size) : current ? e ? 76 + 2 * THIN : 48 : 48);
    if (!current) return e ? [] : [write(0, y - 8, "first and current epoch", "ink b"), ...RANKS.map((rank) => write(0, y + THIN * (rank + 0.5) + 4.5, `rank ${rank}`, "ink small")), ...steps.flatMap((step, s) => RANKS.flatMap((rank) =>
      step[rank].taken.map((sample, i) => square(place(4 * s + i, w), y + rank * THIN, w, sample, run.overlaps && rank ? "rank1 twice" : `rank${rank}`, THIN))))];
    const parts = [write(0, y - 8, `epoch ${e + 1}`, "ink b")];
    for (const rank of RANKS) parts.push(write(0, y + h * (rank + 0.5) + 4.5, `rank ${rank}`, "ink small"));
    if (repeats && begun(e, 0)) parts.push(write(left + 24, y - 8, "the order of epoch 1 again", "bad-ink b"));
    else if (run.announces && e && begun(e, 0)) parts.push(write(left + 24, y - 8, `set_epoch(${e}): a new order`, `${good} b`));
    steps.forEach((step, s) => RANKS.forEach((rank) => step[rank].taken.forEach((sample, i) => {
      const x = place(4 * s + i, w), top = y + rank * h, kind = `rank${rank}` + (repeats || run.overlaps && rank ? " twice" : "");
      if (!begun(e, s)) return parts.push(box(x, top, w, h, "empty"));
      const drawn = square(x, top, w, sample, kind, h), fresh = frame.epoch === e && frame.step === s && (frame.phase === 0 || frame.phase === 3 && (e || s));
      if (frame.epoch === e) count.set(sample, [...count.get(sample) ?? [], rank]);
      parts.push(fresh ? comes(home(sample) - x, 22 - top, drawn) : drawn);
    })));
    if (frame.epoch === e && frame.phase !== 4)
      parts.push(box(place(4 * frame.step, w) - 1, y - 1, 4 * w + 2, 2 * h + 2, "now"));
    return parts;
  });
  const pool = [...Array(SAMPLES).keys()].map((sample) => {
    const by = count.get(sample);
    if (by?.length > 1) return shared(home(sample), 22, free) + write(home(sample) + free / 2, 22 + free / 2 + 4.5, sample, "number b");
    return square(home(sample), 22, free, sample, by ? `rank${by[0]}` : "free");
  });
  const ended = frame.phase === 4, all = `Epoch ${frame.epoch + 1} took each sample ${run.overlaps ? "twice" : "once"}`;
  const title = ended ? write(0, 14, all, `${run.overlaps ? "bad-ink" : good} b`) : write(0, 14, `${SAMPLES} samples`, "ink b");
  return [group("pool", 0, 0, [title, pool]), group("taken", 0, 0, epochs)];
}

// The message between the ranks: a box for each, the gradient before and after, and in the
// middle where they meet. Green is sent, and red is cut.
function gradient(run, now, { epoch, step, phase }, width, wide) {
  const out = [write(0, 14, "gradient", "ink b"), width < 310 ? "" : write(wide ? 72 : 68, 14, "of one weight", "soft small")];
  const w = wide ? 108 : 96, top = 24, tall = 46, near = [w, width - w], middle = width / 2, way = [1, -1], half = wide ? 36 : 34;
  const sent = run.averages && phase > 1, useful = sent && !run.overlaps, kind = useful ? "sent" : "unsent";
  const fresh = phase === 2 || phase === 3 && (epoch || step);
  const arrow = (x1, x2, y) => rule(x1, y, x2, y, kind) + rule(x2, y, x2 - 5 * Math.sign(x2 - x1), y - 5, kind) + rule(x2, y, x2 - 5 * Math.sign(x2 - x1), y + 5, kind);
  const end = (words, color) => out.push(write(width, 15, words, `said ${color} big end`));
  if (sent) {
    for (const rank of RANKS) {
      const edge = middle - half * way[rank];
      out.push(arrow(near[rank] + 4 * way[rank], edge - 4 * way[rank], top + 13), arrow(edge - 4 * way[rank], near[rank] + 4 * way[rank], top + 33));
    }
    const average = write(middle, top + 37, fixed(now[0].used), "average ink b mid");
    out.push(box(middle - half, top, 2 * half, tall, `pill ${kind}`, 'rx="8"'), write(middle, top + 18, "average", "ink small mid"), fresh ? late(0.4, average) : average);
    end(...useful ? ["sent", "ok-ink"] : ["sent for nothing", "bad-ink"]);
  } else if (phase > 1) {
    const y = top + 23;
    for (const rank of RANKS) out.push(rule(near[rank] + 4 * way[rank], y, middle - 14 * way[rank], y, "cut"));
    out.push(rule(middle - 8, y - 8, middle + 8, y + 8, "cross"), rule(middle - 8, y + 8, middle + 8, y - 8, "cross"));
    end("not sent", "bad-ink");
  } else out.push(rule(near[0] + 4, top + 23, near[1] - 4, top + 23, "trail"), phase ? write(width, 15, "not sent yet", "soft end") : "");
  for (const rank of RANKS) {
    const x = rank ? near[1] : 0, own = phase > 0 ? `: ${fixed(now[rank].own)}` : "", used = phase > 1 ? `uses ${fixed(now[rank].used)}` : "";
    const after = used && write(x + w / 2, top + 38, used, "number b");
    out.push(box(x, top, w, tall, `rank${rank}`, 'rx="4"'), write(x + w / 2, top + (own ? 18 : 27.5), `rank ${rank}${own}`, "number"),
      sent && fresh ? late(0.85, after) : after);
  }
  if (sent && fresh) for (const rank of RANKS) {
    const from = near[rank] - 24 * way[rank], letter = (x, y, value, color) => box(x - 22, y - 10, 44, 20, color, 'rx="4"') + write(x, y + 4.5, fixed(value), "ink small mid");
    out.push(goes(middle - from, 0, letter(from, top + 13, now[rank].own, `rank${rank}`)), goes(from - middle, 0.45, letter(middle, top + 33, now[rank].used, `pill ${kind}`)));
  }
  return group("gradient", 0, 0, out);
}

// How far the models of the ranks are from each other after each step so far: the gap between
// two lines that begin as one.
function weight(run, steps, width, tall) {
  const top = 38, middle = top + tall / 2, wide = width > 400, all = run.epochs.flatMap((epoch) => epoch.steps).length, span = width - 58, part = span / all;
  const last = steps.at(-1), x = part * steps.length, y = (step, rank) => middle + (rank - 0.5) * gap(step) / WIDEST * tall;
  const points = (rank) => [[0, middle], ...steps.map((step, i) => [part * (i + 1), y(step, rank)])];
  const out = [write(0, 14, "distance", "ink b"), write(0, 29, "between the two ranks' weights", "soft small"), rule(0, middle, span, middle, "axis")];
  run.epochs.forEach((_, e) => {
    const [from, to] = [e, e + 1].map((edge) => edge * span / EPOCHS);
    out.push(rule(to, top, to, top + tall, "trail"), write((from + to) / 2, top + 14 + tall, `epoch ${e + 1}`, "soft small mid"));
  });
  if (last && gap(last)) {
    out.push(line([...points(0), ...points(1).reverse()], "gap"), write(width, 15, fixed(gap(last)), "apart bad-ink big end"));
    for (const rank of RANKS) {
      const side = (rank - 0.5) * Math.max(2 * Math.abs(y(last, rank) - middle), 14);
      out.push(line(points(rank), `line${rank}`), circle(x, y(last, rank), 4, `rank${rank}`),
        write(x + 8, middle + side + 4, `rank ${rank}`, "ink small halo"));
    }
  } else if (last) {
    out.push(...RANKS.map((rank) => line(points(rank), run.averages ? "met" : "unsent")), write(width, 15, wide ? `0: ${run.averages ? "one model" : "equal"}` : "0", run.averages ? "apart ok-ink big end" : "apart ink big end"));
  }
  return group("weight", 0, 0, out);
}

// The held-out loss after each epoch, and the right run's, hollow, to compare with.
const LOW = 6, HIGH = 18; // of the axis
function chart(run, frame, width, row, wide) {
  const left = 60, x = (loss) => left + (loss - LOW) / (HIGH - LOW) * (width - left - 64), base = 24 + row * EPOCHS, wrong = run.key !== RIGHT;
  const out = [write(0, 14, "held-out loss", "ink b"), write(0, base + 17, "← better", "soft small")];
  out.push(...wrong ? [circle(width - (wide ? 70 : 66), 9, 6, "hollow"), write(width, 14, "right run", "ink small end")] : []);
  const mine = width - (wrong ? 92 : 0); // its legend
  out.push(write(mine, 14, "this run", "ink small end"), circle(mine - (wide ? 62 : 58), 9, 4.5, "dot"));
  for (const tick of [8, 12, 16]) out.push(rule(x(tick), base, x(tick), base + 4, "axis"), write(x(tick), base + 17, tick, "soft small mid"));
  out.push(rule(left, base, width - 64, base, "axis"));
  read(RIGHT).epochs.forEach(({ heldOut: right }, e) => {
    const ended = frame.epoch > e || frame.epoch === e && frame.phase === 4, y = 24 + row * (e + 0.5), ran = run.epochs[e].heldOut;
    const far = percent(run, e), color = far < WORSE ? "ink" : "bad-ink", after = ended && ran < right; // where a number stands
    out.push(write(0, y + 5, `epoch ${e + 1}`, "ink small"));
    const number = (loss, before, kind) => write(x(loss) + (before ? -11 : 11), y + 5, fixed(loss), `${kind} halo${before ? " end" : ""}`);
    if (ended && far) out.push(rule(x(right), y, x(ran), y, far < WORSE ? "link" : "link bad"));
    if (wrong) out.push(circle(x(right), y, 6, "hollow"), ended && !far ? "" : number(right, !after, "ink small"));
    if (ended) out.push(circle(x(ran), y, 4.5, "dot"), number(ran, after, "held-out ink b"));
    if (ended && wrong) out.push(write(width, y + 5, `${far < 0 ? "−" : far ? "+" : ""}${Math.abs(far)} %`, `${color} far b end`));
  });
  return group("losses", 0, 0, out);
}

// [the picture so many pixels wide, what it says in words]
function draw(key, index, room) {
  const run = read(key), frame = frames(run).at(index), wide = room > 700, width = Math.max(room, 328), pad = wide ? 14 : 12;
  const words = tell(run, frame).map(([said]) => said).join(" "), inner = width - 2 * pad, left = wide ? 48 : 49, gaps = left + 12;
  const size = Math.min(26, Math.floor(((wide ? 0.53 : 1) * inner - gaps) / SAMPLES));
  const half = wide ? gaps + SAMPLES * size + 28 : 0, rest = inner - half, tall = lanesTall(size, wide);
  const past = run.epochs.flatMap(({ steps }, e) => steps.filter((_, s) => e < frame.epoch || e === frame.epoch && s <= frame.step));
  const moved = frame.phase > 2 ? past : past.slice(0, -1);
  const y = wide ? pad : tall + pad, fork = wide ? 70 : 36, row = wide ? 27 : 20, below = y + (wide ? 88 : 82), end = below + fork + (wide ? 70 : 64);
  const parts = [[pad, pad, lanes(run, frame, left, size, wide)],
    [pad + half, y, gradient(run, past.at(-1), frame, rest, wide)],
    [pad + half, below, weight(run, moved, rest, fork)],
    [pad + half, end, chart(run, frame, rest, row, wide)]];
  const height = Math.max(end + row * EPOCHS + 40 + pad, tall + 2 * pad);
  return [`<svg xmlns="http://www.w3.org/2000/svg" class="slow-motion${wide ? " wide" : ""}${wide && rest > 400 ? " roomy" : ""}" role="img" aria-label="${words}" width="${width}" height="${height}"`
    + ` viewBox="0 0 ${width} ${height}">${box(0.5, 0.5, width - 1, height - 1, "card", 'rx="8"')}`
    + `${parts.map(([x, top, drawn]) => group("", x, top, [drawn])).join("")}</svg>`, words];
}

function play(figure) {
  const caption = figure.querySelector("[role=status]"), drawing = figure.querySelector(".drawing");
  const [model, sampler, order] = figure.querySelectorAll("[type=checkbox]"), [start, back, step] = figure.querySelectorAll("button"), count = figure.querySelector(".count"), link = figure.querySelector(".moment"), scrub = figure.querySelector("[type=range]");
  // Where a line is off, what it had is struck.
  for (const row of figure.querySelectorAll("label")) {
    const [right, wrong] = [...row.querySelectorAll("code")].map((x) => x.textContent), off = row.querySelector(".off");
    let same = 0;
    while (right[same] === wrong[same]) same++;
    const [gone, now] = wrong.startsWith("pass") ? [right, ""] : [right.slice(same).match(/^[A-Za-z]+_?/)[0], wrong.slice(same)];
    off.innerHTML = `${wrong.slice(0, same)}<del>${gone}</del>${now}`.replaceAll(".", ".<wbr>");
  }
  model.checked = false; // the page begins with a mistake, at the end of its run
  const key = () => [model, order, sampler].map((x) => x.checked ? 0 : 1).join("");
  const pictures = () => frames(read(key()));
  const last = () => pictures().length - 1;
  let index = last(), timer, width;
  const show = (room = drawing.clientWidth, first = "") => {
    const said = tell(read(key()), pictures()[index]), off = key().slice(0, 2);
    if (first) said.push([first]);
    if (index === last() && ["01", "10"].includes(off)) said.push(['<span class="again">Tick the line to repair it.</span>']);
    [drawing.innerHTML] = draw(key(), index, width = room);
    count.textContent = scrub.ariaValueText = `${index + 1} of ${last() + 1}`;
    [scrub.max, scrub.value] = [last() + 1, index + 1];
    caption.innerHTML = said.map(([words, kind]) => kind ? `<strong class="${kind}">${words}</strong>` : words).join(" ");
    [back.ariaDisabled, step.ariaDisabled] = [!index, index === last()]; // they keep the focus
    link.href = `#run=${key()}&step=${index + 1}`;
    label();
  };
  const label = () => {
    caption.ariaLive = timer ? "off" : "polite"; // the next one would cut it off
    start.textContent = timer ? "Pause" : index === last() ? "Replay" : "Play";
  };
  const follow = () => {
    const link = location.hash.match(/^#run=([01])([01])([01])&step=(\d+)$/);
    if (!link) return;
    stop();
    [model, order, sampler].forEach((x, i) => x.checked = link[i + 1] === "0");
    if (order.checked) sampler.checked = true;
    index = Math.min(Math.max(link[4] - 1, 0), last());
    [was, before] = [pictures(), key()];
    show();
    figure.scrollIntoView();
  };
  // The address holds what is shown, to be sent.
  const keep = () => history.replaceState(null, "", link.href);
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
  start.onclick = () => {
    if (timer) return keep(label(stop())); // what flies is not sent anew
    if (index === last()) go(1); // the first
    wait();
    label();
    drawing.scrollIntoView({ block: "nearest" }); // its margins hold what stands above it
  };
  back.onclick = () => index && go(-1, stop());
  step.onclick = () => index < last() && go(1, stop());
  // The picture of the same step in another run, which may have fewer steps in an epoch.
  const like = ({ epoch, step, phase }) => pictures().findLastIndex((x) =>
    x.epoch === epoch && x.phase === phase && (phase === 4 || !(x.step > step)));
  let was = pictures(), before = key();
  scrub.oninput = () => {
    index = scrub.value - 1;
    show(stop());
    keep();
  };
  figure.onchange = ({ target }) => {
    if (target === scrub) return;
    if (target === sampler) order.checked = sampler.checked; // only this sampler has set_epoch
    if (order.checked) sampler.checked = true;
    stop();
    index = index < was.length - 1 ? like(was[index]) : last();
    // Where the switch changes nothing yet, the picture goes on to where it does.
    const from = index, [old, now, all] = [read(before), read(key()), pictures()];
    while (index < last() && seen(old, all[index]) === seen(now, all[index])) index++;
    [was, before] = [all, key()];
    keep();
    show(undefined, index > from ? "Until here, nothing differs." : "");
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
