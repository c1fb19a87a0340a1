"use strict";
// The timeline of every pipeline rank: steps of the schedule, and inside of them ops, with collectives on a lane below.
// Drawn on a canvas: only what is visible, details where they are wide enough.

const STEP_NAMES = { P: "prologue", F: "forward", B: "backward", W: "weight gradients", U: "sync and update" };
const STEP_COLOURS = { P: "inputs", F: "forward", B: "backward", W: "weight", U: "update" };
const STEP_PHASES = { F: "forward", B: "backward", U: "update" };
const BLOCK_COLOURS = ["compute", "blocking", "overlapped", "overlapped", "update"];
const WINDOW = { start: 0, end: 1 };  // that all timelines show, as fractions of the longest

function timelineView() {
  const known = PLANS.map((plan, at) => [plan, at]).filter(([plan]) => plan.timeline);
  if (!known.length) return null;
  const longest = Math.max(...known.map(([plan]) => plan.timeline.total));
  const selected = h("div.selected", { "aria-live": "polite" }, "Click a step or an op for what it is. Scroll with Ctrl to zoom, drag to move.");
  const plots = known.map(([plan, at]) => new TimelinePlot(plan, longest, (...content) => selected.replaceChildren(...content.flat(Infinity).filter(Boolean)), planTitle(at)));
  const all = (change) => { change(); plots.forEach((plot) => plot.draw()); };
  plots.forEach((plot) => { plot.all = all; });
  const button = (text, label, change) => h("button.icon", { type: "button", "aria-label": label, title: label, onclick: () => all(change) }, text);
  const stages = known.some(([plan]) => plan.timeline.lanes.some((lane) => lane.kinds.includes("W")));
  return h("div", {}, h("div.tools", {}, button("+", "zoom in", () => zoom(0.5, 0.5)), button("−", "zoom out", () => zoom(2, 0.5)), button("Whole step", "show the whole step", () => { WINDOW.start = 0; WINDOW.end = 1; }),
    known.some(([plan]) => plan.timeline.details && plan.timeline.drawn > 1) ? button("One microbatch", "zoom to the first forward", () => zoomToFirst(known[0][0], longest)) : null),
  known.map(([plan, at], number) => [TWO ? h("h3", {}, planTitle(at)) : null, plots[number].element, drawnNote(plan)]),
  h("ul.legend", {}, ["F", "B", ...(stages ? ["W"] : []), "U"].map((kind) => h("li", {}, dot(`var(--${STEP_COLOURS[kind]})`), h("span", {}, STEP_NAMES[kind]))),
    known.some(([plan]) => plan.timeline.details) ? [["compute", "kernels"], ["blocking", "blocking communication"], ["overlapped", "overlapped communication"]].map(([shade, text]) => h("li", {}, dot(`var(--${shade})`), h("span", {}, text))) : null,
    h("li", {}, dot("var(--idle)"), h("span", {}, "idle"))),
  selected);
}

function drawnNote(plan) {
  const { drawn, microbatches, accumulate, splitsWeights, details } = plan.timeline;
  const notes = [
    drawn < microbatches ? `drawn with ${drawn} of ${microbatches} microbatches` : "",
    accumulate > 1 ? `the schedule runs ${accumulate} times, then the update` : "",
    splitsWeights && details ? "what is inside of B and W is not drawn, since backward is in two steps" : "",
  ].filter(Boolean);
  return notes.length ? h("p.small.quiet", {}, notes.join("; ")) : null;
}

function zoom(factor, centre) {
  const span = WINDOW.end - WINDOW.start, at = WINDOW.start + span * centre;
  const next = Math.max(2e-5, Math.min(1, span * factor));
  WINDOW.start = Math.max(0, Math.min(1 - next, at - next * centre));
  WINDOW.end = WINDOW.start + next;
}

function shift(part) {
  const span = WINDOW.end - WINDOW.start;
  WINDOW.start = Math.max(0, Math.min(1 - span, WINDOW.start + span * part));
  WINDOW.end = WINDOW.start + span;
}

function zoomToFirst(plan, longest) {
  const lane = plan.timeline.lanes[0];
  WINDOW.start = lane.starts[0] / longest;
  WINDOW.end = Math.min(1, (lane.ends[0] * 1.02) / longest);
}

class TimelinePlot {
  constructor(plan, longest, say, title) {
    this.plan = plan;
    this.line = plan.timeline;
    this.longest = longest;
    this.say = say;
    this.hits = [];
    this.pointers = new Map();
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": `timeline of ${title}: ${this.line.lanes.length} lanes, ${time(this.line.total * 1e-6)}; plus and minus zoom, arrow keys move, 0 shows all` });
    this.element = h("div.plot", {}, this.canvas);
    this.all = (change) => { change(); this.draw(); };
    this.listen();
    REDRAW.push(() => this.draw());
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.all(() => zoom(Math.exp(event.deltaY * 0.004), this.fraction(event)));
      else this.all(() => shift(((event.shiftKey ? event.deltaY : event.deltaX) || 0) / this.inner));
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.all(() => zoom(0.25, this.fraction(event))));
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, event.clientX);
      this.moved = 0;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    const up = (event) => {
      if (this.pointers.delete(event.pointerId) && this.moved < 4 && event.type === "pointerup") this.pick(event);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("keydown", (event) => {
      const change = { "+": () => zoom(0.5, 0.5), "=": () => zoom(0.5, 0.5), "-": () => zoom(2, 0.5), ArrowLeft: () => shift(-0.15), ArrowRight: () => shift(0.15), 0: () => zoom(1e9, 0.5) }[event.key];
      if (change) { event.preventDefault(); this.all(change); }
    });
  }

  fraction(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left - this.gutter) / this.inner));
  }

  move(event) {
    if (!this.pointers.has(event.pointerId)) {
      const hit = this.hit(event);
      if (hit) showTip(event, ...this.describe(hit));
      else hideTip();
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    const before = this.pointers.get(event.pointerId);
    this.pointers.set(event.pointerId, event.clientX);
    this.moved += Math.abs(event.clientX - before);
    if (others.length) {
      const was = Math.max(8, Math.abs(before - others[0])), is = Math.max(8, Math.abs(event.clientX - others[0]));
      this.all(() => zoom(was / is, this.fraction(event)));
    } else this.all(() => shift((before - event.clientX) / this.inner));
  }

  hit(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    for (let at = this.hits.length - 1; at >= 0; at--) {
      const [left, top, width, height] = this.hits[at];
      if (x >= left - 1 && x <= left + width + 1 && y >= top && y < top + height) return this.hits[at][4];
    }
    return null;
  }

  describe({ lane, step, kind, start, end, detail, block }) {
    const { plan } = this;
    if (detail) {
      const name = plan.names[detail.names[block]], op = plan.names[detail.ops[block]];
      return [h("b", {}, name), op && op !== name ? tipRow("for", op) : null, tipRow("predicted", time(detail.lengths[block] * 1e-6)),
        tipRow("kind", ["kernels", "blocking", "overlapped", "exposed", "update"][detail.kinds[block]])].filter(Boolean);
    }
    const about = kind === "U" ? STEP_NAMES.U : `${STEP_NAMES[kind]}${plan.stages > 1 ? ` of stage ${lane.stage[step]}` : ""}${this.line.drawn > 1 ? `, microbatch ${lane.microbatch[step]}` : ""}`;
    return [h("b", {}, about), tipRow(lane.name, ""), tipRow("predicted", time((end - start) * 1e-6)), tipRow("starts at", time(start * 1e-6))];
  }

  pick(event) {
    const hit = this.hit(event);
    if (!hit) return;
    const content = this.describe(hit).flatMap((item) => [...(item.classList.contains("tiprow") ? [" · ", ...[...item.childNodes].flatMap((child) => [child.textContent, " "])] : [item])]);
    const row = hit.detail ? this.plan.rowOf[hit.detail.ops[hit.block]] : -1;
    this.say(...content, row !== undefined && row >= 0 ? [" ", h("button.link", { type: "button", onclick: () => reveal(this.plan, row) }, "show in modules")] : null);
  }

  draw() {
    const { line } = this;
    const narrow = this.element.clientWidth < 560;
    this.gutter = line.lanes.length > 1 ? (narrow ? 30 : 118) : 0;
    this.inner = this.element.clientWidth - this.gutter;
    const from = WINDOW.start * this.longest, span = (WINDOW.end - WINDOW.start) * this.longest;
    const perUnit = this.inner / span;
    const typical = line.lanes[0].ends.length ? median(line.lanes[0].ends.map((end, at) => end - line.lanes[0].starts[at])) : 0;
    const open = line.details && typical * perUnit > 130;
    const block = line.lanes.length > 20 ? 16 : 24;
    const rows = open ? { block, ops: line.lanes.length > 8 ? 20 : 34, sends: line.lanes.length > 8 ? 10 : 16 } : { block, ops: 0, sends: 0 };
    const laneHeight = rows.block + (open ? rows.ops + rows.sends + 4 : 0) + 6;
    const height = 26 + laneHeight * line.lanes.length;
    const { context: c, width } = fitted(this.canvas, height);
    this.hits = [];
    c.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    c.textBaseline = "middle";
    const shades = Object.fromEntries([...Object.values(STEP_COLOURS), ...BLOCK_COLOURS, "compute-2", "idle", "ink", "ink-3", "line", "card", "page"].map((name) => [name, colour(name)]));
    c.fillStyle = shades["ink-3"];
    c.textAlign = "center";
    for (const mark of ticks(from, from + span, Math.max(2, Math.floor(this.inner / 110)))) {
      const x = this.gutter + (mark - from) * perUnit;
      c.fillStyle = shades.line;
      c.fillRect(Math.round(x), 18, 1, height - 18);
      c.fillStyle = shades["ink-3"];
      if (x > this.gutter + 14 && x < width - 24) c.fillText(time(mark * 1e-6), x, 9);
    }
    line.lanes.forEach((lane, at) => this.drawLane(c, lane, 24 + at * laneHeight, { from, span, perUnit, rows, open, narrow, shades, width }));
  }

  drawLane(c, lane, top, view) {
    const { from, span, perUnit, rows, shades, narrow, width } = view;
    c.save();
    c.beginPath();
    c.rect(this.gutter, top, this.inner, 400);
    c.clip();
    c.fillStyle = shades.idle;
    c.fillRect(this.gutter, top, this.inner, rows.block);
    const last = { x: -1 };
    const steps = lane.starts.length;
    const step = (at, kind, start, end) => {
      if (end < from || start > from + span) return;
      const x = this.gutter + (start - from) * perUnit, w = (end - start) * perUnit;
      if (w < 0.4 && x - last.x < 0.5) return;
      last.x = x;
      c.fillStyle = shades[STEP_COLOURS[kind]];
      const several = lane.stages.length > 1 && kind !== "U";
      if (several) c.globalAlpha = 1 - 0.45 * (lane.stages.indexOf(lane.stage[at]) / (lane.stages.length - 1));
      const gap = w > 6 ? 1 : w > 2 ? 0.5 : 0;
      c.fillRect(x, top, Math.max(0.6, w - gap), rows.block);
      c.globalAlpha = 1;
      this.hits.push([x, top, w, rows.block, { lane, step: at, kind, start, end }]);
      this.label(c, kind, at, lane, x, w, top + rows.block / 2, shades);
      const detail = view.open && this.detail(lane, at, kind);
      if (detail) this.drawDetail(c, detail, x, (end - start), start, top + rows.block + 2, view, { lane, step: at, kind, start, end });
    };
    for (let at = 0; at < steps; at++) step(at, lane.kinds[at], lane.starts[at], lane.ends[at]);
    if (lane.update[1] > 0) step(steps, "U", lane.update[0], lane.update[0] + lane.update[1]);
    c.restore();
    if (this.gutter) {
      c.fillStyle = shades["ink-3"];
      c.textAlign = "left";
      c.fillText(narrow ? lane.name.replace("pipeline rank ", "") : lane.name, 0, top + rows.block / 2);
      if (view.open && !narrow && lane.devices) c.fillText(`devices ${lane.devices}`, 0, top + rows.block + 12, this.gutter - 6);
    }
    return width;
  }

  detail(lane, at, kind) {
    const phase = STEP_PHASES[kind];
    if (!this.line.details || !phase || (this.line.splitsWeights && kind !== "F")) return null;
    return this.line.details[kind === "U" ? lane.stages[0] : lane.stage[at]][phase];
  }

  label(c, kind, at, lane, x, w, y, shades) {
    const text = kind === "U" ? "update" : this.line.drawn > 1 ? String(lane.microbatch[at]) : STEP_NAMES[kind];
    const visible = Math.min(x + w, this.gutter + this.inner) - Math.max(x, this.gutter);
    if (visible < c.measureText(text).width + 3) return;
    c.fillStyle = kind === "F" || kind === "W" ? "#10202e" : "#ffffff";
    if (kind === "W") c.fillStyle = "#ffffff";
    c.textAlign = "center";
    c.fillText(text, Math.max(x, this.gutter) + visible / 2, y + 0.5);
    return shades;
  }

  drawDetail(c, detail, left, length, start, top, view, about) {
    const { perUnit, rows, shades, from, span } = view;
    const scale = detail.seconds > 0 ? length / (detail.seconds * 1e6) : 1;
    let lastX = -1, lastRow = -1;
    for (let at = 0; at < detail.starts.length; at++) {
      const begin = start + detail.starts[at] * scale, size = detail.lengths[at] * scale;
      if (begin + size < from || begin > from + span) continue;
      const x = this.gutter + (begin - from) * perUnit, w = size * perUnit;
      const below = detail.kinds[at] === 2 ? 1 : 0;
      if (w < 0.35 && x - lastX < 0.5 && lastRow === below) continue;
      lastX = x;
      lastRow = below;
      const y = below ? top + rows.ops + 2 : top, tall = below ? rows.sends : rows.ops;
      c.fillStyle = detail.kinds[at] === 0 && at % 2 ? shades["compute-2"] : shades[BLOCK_COLOURS[detail.kinds[at]]];
      c.fillRect(x, y, Math.max(0.5, w - (w > 3 ? 0.75 : 0)), tall);
      this.hits.push([x, y, Math.max(1, w), tall, { ...about, detail, block: at }]);
      if (w > 26) this.detailLabel(c, detail, at, x, w, y + tall / 2);
    }
  }

  detailLabel(c, detail, at, x, w, y) {
    const name = this.plan.names[detail.names[at]];
    const [path, kind] = name.includes("/ ") ? [name.split(" / ")[0].split(".").pop(), name.split("/ ").pop()] : [name, ""];
    const room = Math.min(x + w, this.gutter + this.inner) - Math.max(x, this.gutter) - 6;
    const text = [kind && path && path !== name ? `${path} ${kind}` : kind || name, kind || name].find((words) => c.measureText(words).width <= room);
    if (!text) return;
    c.fillStyle = BLOCK_COLOURS[detail.kinds[at]] === "overlapped" ? "#241a05" : "#ffffff";
    c.textAlign = "center";
    c.fillText(text, Math.max(x, this.gutter) + room / 2 + 3, y + 0.5);
  }
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
