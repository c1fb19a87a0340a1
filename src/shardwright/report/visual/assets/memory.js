"use strict";
// Memory over the step as stacked areas, with the op under the pointer; without a model the parts at the peak.

const KINDS = ["parameters", "optimizer", "inputs", "gradients", "activations", "buffers"];

function memoryView() {
  const known = PLANS.map((plan, at) => [plan, at]).filter(([plan]) => plan.predicted);
  if (!known.length) return null;
  const top = Math.max(...known.map(([plan]) => Math.max(plan.predicted.memory.peak, ...(plan.curves ? plan.curves.ranks.map((rank) => rank.peak) : []))));
  return h("div", {}, known.map(([plan, at]) => [TWO ? h("h3", {}, planTitle(at)) : null, peakBar(plan, top), plan.curves ? memoryPlot(plan, top) : stageMemory(plan, top)]), memoryLegend());
}

function memoryLegend() {
  const first = PLANS.find((plan) => plan.predicted);
  return h("ul.legend", {}, KINDS.map((kind) => h("li", {}, dot(`var(--${kind})`), h("span", {}, kind), PLANS.map((plan, at) => (plan.predicted && (TWO || plan === first) ? h("b", {}, TWO ? `${LETTERS[at]} ` : "", bytes(plan.predicted.memory[kind])) : null)))));
}

function peakBar(plan, top) {
  const p = plan.predicted, scale = Math.max(top, p.limit);
  const room = p.limit - p.memory.peak;
  return h("div.stackrow", {}, h("div.caption", {}, h("span", {}, "predicted peak ", h("b", {}, bytes(p.memory.peak)), ` in ${p.at.phase}`, p.at.op ? [", at ", h("code.wrap", {}, p.at.op.replace(/^[ /]+|[ /]+$/g, ""))] : null),
    h("span.nowrap", {}, room >= 0 ? `headroom ${bytes(room)}` : h("b.worse", {}, `${bytes(-room)} over the limit`))),
  h("div", { style: { position: "relative", background: "var(--idle)", "border-radius": "6px" } }, h("div.stack", { role: "img", "aria-label": KINDS.map((kind) => `${kind} ${bytes(p.memory[kind])}`).join(", "), style: { width: `${(100 * p.memory.peak) / scale}%`, height: "22px" } },
    KINDS.filter((kind) => p.memory[kind]).map((kind) => h("i", { style: { flex: `${p.memory[kind]} 0 0`, background: `var(--${kind})` }, onmousemove: (event) => showTip(event, h("b", {}, kind), tipRow("at the peak", bytes(p.memory[kind]))), onmouseleave: hideTip }))),
  h("i", { title: `limit ${bytes(p.limit)}`, style: { position: "absolute", left: `calc(${(100 * p.limit) / scale}% - 2px)`, top: "-3px", bottom: "-3px", width: "2px", background: "var(--ink)" } })));
}

function stageMemory(plan) {
  const { stages, limit } = plan.predicted;
  if (stages.length < 2) return null;
  return h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, ["stage", "devices", "modules", "", "peak of its device"].map((text, at) => h(at === 4 ? "th.number" : "th", {}, text || h("span", {}, "of the limit"))))), h("tbody", {}, stages.map((stage, at) => h("tr", {}, h("td", {}, String(at)), h("td", {}, stage.devices), h("td.wrap", {}, stage.layers),
    h("td", { style: { width: "30%" } }, h("div.track", {}, h("i", { style: { width: `${Math.min(100, (100 * stage.memory) / limit)}%`, background: "var(--accent)" } }))), h("td.number", {}, bytes(stage.memory)))))));
}

function memoryPlot(plan, top) {
  const canvas = h("canvas", { tabindex: "0", role: "img" });
  const worst = plan.curves.ranks.reduce((best, rank, at) => (rank.peak > plan.curves.ranks[best].peak ? at : best), 0);
  const picked = h("p.small.quiet", { "aria-live": "polite", style: { "min-height": "21px", margin: "6px 0 0" } });
  const limit = plan.predicted.limit;
  let rank = plan.curves.ranks[worst], marked = -1;
  const height = 260, bottom = 26, gutter = 62;

  function layers() {
    const constant = (kind) => rank.names.map(() => rank[kind]);
    return KINDS.map((kind) => (Array.isArray(rank[kind]) ? rank[kind] : constant(kind)));
  }

  function draw() {
    const { context: c, width } = fitted(canvas, height);
    const high = (limit < 1.6 * top ? Math.max(top, limit) : top) * 1.06;
    if (width <= gutter + 8) return;
    const inner = width - gutter - 2, plotted = height - bottom - 8;
    const x = (at) => gutter + (inner * at) / Math.max(1, rank.names.length), y = (value) => 8 + plotted * (1 - value / high);
    c.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    c.textBaseline = "middle";
    const unit = 2 ** (10 * Math.floor(Math.log2(high) / 10));
    for (const mark of ticks(0, high / unit, 5)) {
      c.fillStyle = colour("line");
      c.fillRect(gutter, Math.round(y(mark * unit)), inner, 1);
      c.fillStyle = colour("ink-3");
      c.textAlign = "right";
      c.fillText(bytes(mark * unit), gutter - 8, y(mark * unit));
    }
    const columns = Math.min(rank.names.length, Math.ceil(inner));
    const values = layers();
    const base = new Float64Array(columns), peaks = columnSamples(values, columns);
    KINDS.forEach((kind, number) => {
      c.beginPath();
      const tops = base.map((from, at) => from + values[number][peaks[at]]);
      for (let at = 0; at < columns; at++) {
        const left = gutter + (inner * at) / columns, right = gutter + (inner * (at + 1)) / columns;
        if (!at) c.moveTo(left, y(tops[0]));
        c.lineTo(left, y(tops[at]));
        c.lineTo(right, y(tops[at]));
      }
      for (let at = columns - 1; at >= 0; at--) {
        c.lineTo(gutter + (inner * (at + 1)) / columns, y(base[at]));
        c.lineTo(gutter + (inner * at) / columns, y(base[at]));
      }
      c.fillStyle = colour(kind);
      c.fill();
      base.set(tops);
    });
    const phases = ["forward", "backward", "update"].map((name, at) => [name, rank.phases.indexOf(at)]).filter(([, at]) => at >= 0);
    c.textAlign = "left";
    if (plan.curves.by === "op") phases.forEach(([name, at], number) => {
      if (at) { c.fillStyle = colour("card"); c.fillRect(Math.round(x(at)), 8, 1, plotted); }
      const end = number + 1 < phases.length ? phases[number + 1][1] : rank.names.length;
      c.fillStyle = colour("ink-3");
      if (x(end) - x(at) > 54) c.fillText(name, x(at) + 4, height - bottom / 2);
    });
    else { c.fillStyle = colour("ink-3"); c.fillText("steps of the schedule, then the update", gutter + 4, height - bottom / 2); }
    if (limit <= high) {
      c.fillStyle = colour("ink");
      for (let left = gutter; left < gutter + inner; left += 9) c.fillRect(left, y(limit) - 1, 5, 1.5);
      c.textAlign = "right";
      c.fillText(`limit ${bytes(limit)}`, gutter + inner - 4, y(limit) - 9);
    }
    if (marked >= 0) { c.fillStyle = colour("ink"); c.fillRect(Math.round(x(marked + 0.5)), 8, 1.5, plotted); }
  }

  /** The highest sample of each column of pixels. */
  function columnSamples(values, columns) {
    const total = (at) => sum(values.map((list) => list[at]));
    return Array.from({ length: columns }, (_, column) => {
      const first = Math.floor((column * rank.names.length) / columns), last = Math.max(first + 1, Math.floor(((column + 1) * rank.names.length) / columns));
      let best = first;
      for (let at = first + 1; at < last; at++) if (total(at) > total(best)) best = at;
      return best;
    });
  }

  function describe(at) {
    const phase = ["forward", "backward", "update"][rank.phases[at]];
    const values = layers().map((list) => list[at]);
    return { name: plan.names[rank.names[at]], phase, values, total: sum(values) };
  }

  function mark(at, event) {
    marked = Math.max(0, Math.min(rank.names.length - 1, at));
    const { name, phase, values, total } = describe(marked);
    picked.textContent = `${phase}, ${name}: ${bytes(total)}`;
    if (event) showTip(event, h("b", {}, name), tipRow(phase, bytes(total)), [...KINDS].reverse().map((kind, number) => tipRow(kind, bytes(values[KINDS.length - 1 - number]), `var(--${kind})`)));
    draw();
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    mark(Math.floor(((event.clientX - box.left - gutter) / (box.width - gutter - 2)) * rank.names.length), event);
  });
  canvas.addEventListener("pointerleave", () => { marked = -1; hideTip(); draw(); });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 25, PageUp: -25 }[event.key];
    if (step) { event.preventDefault(); mark(marked + step); }
  });
  function name() {
    canvas.setAttribute("aria-label", `memory of ${rank.name} over a step, ${bytes(rank.peak)} at most; arrow keys go from ${plan.curves.by === "op" ? "op to op" : "step to step"}`);
  }
  name();
  REDRAW.push(draw);
  const ranks = plan.curves.ranks.length > 1 ? h("div.tools", {}, h("label.small", {}, "memory of ", h("select", { onchange: (event) => { rank = plan.curves.ranks[Number(event.target.value)]; marked = -1; name(); draw(); } },
    plan.curves.ranks.map((each, at) => h("option", { value: at, selected: at === worst }, `${each.name} (${bytes(each.peak)})`))))) : null;
  return h("div", { style: { "margin-top": "16px" } }, ranks, h("div.plot", {}, canvas), picked);
}
