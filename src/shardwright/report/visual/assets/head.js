"use strict";
// The head, where a step's time goes, the runners-up, the notes.

const PART_COLOURS = {
  compute: "--compute", "blocking communication": "--blocking", "exposed overlapped communication": "--overlapped",
  "bubble and sends": "--inputs", update: "--update", "sync and update": "--update",
};

function meshText(plan) {
  const meshes = [...new Set(plan.placement.map((part) => part.mesh.map((axis) => `${axis.name}=${axis.size}`).join(" × ")))];
  const inside = meshes.join(", ") || "one device";
  return plan.ppRanks > 1 ? `${plan.ppRanks} pipeline ranks, ${plan.stages} stages, ${plan.schedule}, each ${inside}` : `mesh ${inside}`;
}

function headView() {
  const plan = PLANS[0];
  const about = PLANS.map((each, at) => h("p.subtitle", {}, h("span", {}, letter(at), each.policy), h("span", {}, meshText(each)),
    h("span", {}, `${count(each.devices)} device${each.devices > 1 ? "s" : ""}${each.cluster ? ` of ${each.cluster}` : ""}`),
    each.microbatches > 1 ? h("span", {}, `${each.microbatches} microbatches`) : null,
    each.predicted ? h("span", {}, each.predicted.for) : null, h("span", {}, "plan ", h("code", {}, each.name))));
  return h("section", { id: "overview", "aria-label": "overview" }, h("h1", {}, plan.model), about, tiles(), plan.missing ? h("p.hint", {}, plan.missing) : null);
}

function tiles() {
  const known = PLANS.filter((plan) => plan.predicted);
  if (!known.length) return h("p.hint", {}, "This plan has no prediction: it was made without a cluster. Its decisions are below.");
  const kinds = [
    ["Predicted step time", (p) => p.seconds, time, -1, (p) => (p.stopped ? "the search was stopped early" : p.gap === null || p.gap === undefined ? "" : `gap to the bound ${percent(p.gap)}`)],
    ["Predicted tokens/s", (p) => (p.throughput ? p.throughput.tokens : null), count, 1, () => "of all devices"],
    ["Predicted samples/s", (p) => (p.throughput && p.throughput.tokens === null ? p.throughput.samples : null), (value) => digits(value, 4), 1, () => "of all devices"],
    ["Predicted MFU", (p) => (p.throughput ? p.throughput.mfu : null), percent, 1, (p) => `${digits(p.throughput.flops / 1e12)} TFLOP/s per device`],
    ["Predicted peak memory", (p) => p.memory.peak, bytes, -1, (p) => memoryNote(p)],
    ["Predicted bubble", (p) => p.bubble, percent, -1, (p) => `slowest stage ${percent(p.balance - 1)} over the mean`],
  ];
  const shown = kinds.filter(([, value]) => known.some((plan) => value(plan.predicted) !== null && value(plan.predicted) !== undefined));
  return h("div.tiles", {}, shown.map((kind) => tile(...kind)), measuredTile());
}

function memoryNote(p) {
  const share = p.memory.peak / p.limit;
  return [h(`div.gauge${share > 1 ? ".over" : ""}`, {}, h("i", { style: { width: `${Math.min(100, 100 * share)}%` } })),
    share > 1 ? h("b.worse", {}, `does not fit ${bytes(p.limit)}`) : `${percent(share)} of ${bytes(p.limit)}`];
}

function tile(label, value, format, better, note) {
  const [first, second] = PLANS.map((plan) => (plan.predicted ? value(plan.predicted) : null));
  const shown = format(first === null || first === undefined ? 0 : first);
  const [number, ...unit] = shown.split(" ");
  const main = h("div.value", {}, first === null || first === undefined ? "–" : number, unit.length ? h("small", {}, unit.join(" ")) : null);
  let other = null;
  if (TWO) {
    const change = first && second !== null && second !== undefined ? second / first - 1 : null;
    const kind = change === null || Math.abs(change) < 5e-4 ? "" : Math.sign(change) === better ? ".better" : ".worse";
    other = h("div.was", {}, h("span", {}, "B ", second === null || second === undefined ? "–" : format(second)), change === null ? null : h(`span${kind}`, {}, `${change > 0 ? "+" : change < 0 ? "−" : "±"}${percent(Math.abs(change))}`));
  }
  return h("div.tile", {}, h("div.label", {}, label, TWO ? " · A" : ""), main, other, h("div.note", {}, first === null || first === undefined ? "" : note(PLANS[0].predicted)));
}

function measuredTile() {
  const { measured, predicted } = PLANS[0];
  if (!measured || measured.seconds === null) return null;
  const [number, unit] = time(measured.seconds).split(" ");
  const off = predicted ? predicted.seconds / measured.seconds - 1 : null;
  return h("div.tile", {}, h("div.label", {}, "Measured step time"), h("div.value", {}, number, h("small", {}, unit)),
    h("div.note", {}, `median of ${measured.count} steps${off === null ? "" : `; predicted ${percent(Math.abs(off))} too ${off > 0 ? "slow" : "fast"}`}`));
}

// -- where the time goes

function timeView() {
  const known = PLANS.map((plan, at) => [plan, at]).filter(([plan]) => plan.predicted);
  if (!known.length) return null;
  const longest = Math.max(...known.map(([plan]) => plan.predicted.seconds));
  const bars = known.map(([plan, at]) => h("div.stackrow", {},
    TWO ? h("div.caption", {}, h("span", {}, planTitle(at)), h("span", {}, time(plan.predicted.seconds))) : null,
    h("div.stack", { role: "img", "aria-label": plan.predicted.parts.map((part) => `${part.name} ${time(part.seconds)}`).join(", "), style: { width: `${(100 * plan.predicted.seconds) / longest}%` } },
      plan.predicted.parts.filter((part) => part.seconds > 0).map((part) => h("i", {
        style: { width: `${(100 * part.seconds) / plan.predicted.seconds}%`, background: `var(${PART_COLOURS[part.name]})` },
        onmousemove: (event) => showTip(event, h("b", {}, part.name), tipRow("predicted", time(part.seconds)), tipRow("of the step", percent(part.seconds / plan.predicted.seconds))), onmouseleave: hideTip,
      })))));
  const names = [...new Set(known.flatMap(([plan]) => plan.predicted.parts.map((part) => part.name)))];
  const legend = h("ul.legend", {}, names.map((name) => h("li", {}, dot(`var(${PART_COLOURS[name]})`), h("span", {}, name), known.map(([plan, at]) => {
    const part = plan.predicted.parts.find((item) => item.name === name);
    return part ? h("b", {}, `${TWO ? `${LETTERS[at]} ` : ""}${time(part.seconds)}`, h("span", {}, ` ${percent(part.seconds / plan.predicted.seconds)}`)) : null;
  }))));
  return h("div", {}, bars, legend, known.map(([plan, at]) => h("div.columns", {}, expensive("Most expensive ops", plan, plan.predicted.ops, at), expensive("Most expensive reshards", plan, plan.predicted.edges, at))));
}

function expensive(title, plan, parts, at) {
  const most = Math.max(...parts.map((part) => part.seconds), 1e-12);
  return h("div", {}, h("h3", {}, TWO ? `${title}, plan ${LETTERS[at]}` : title), parts.length ? h("div", {}, h("table.parts", {}, h("tbody", {}, parts.map((part) => h("tr", {},
    h("td.wrap", {}, breakable(part.name), part.sends ? h("div.small.quiet", {}, part.sends) : null),
    h("td", { style: { width: "22%" } }, h("div.track", {}, h("i", { style: { width: `${(100 * part.seconds) / most}%`, background: part.sends ? "var(--blocking)" : "var(--compute)" } }))),
    h("td.number", {}, `${count(part.count)}×`), h("td.number", {}, time(part.seconds)), h("td.number.quiet", {}, percent(part.seconds / plan.predicted.seconds))))))) : h("p.quiet", {}, "none"));
}

// -- runners-up

const OUTCOMES = { bounded: "pruned by its bound", "not solved": "not solved in time", "does not fit": "does not fit", slower: "" };

function racersView() {
  const known = PLANS.map((plan, at) => [plan, at]).filter(([plan]) => plan.predicted && plan.others.length);
  if (!known.length) return null;
  return h("div", {}, known.map(([plan, at]) => race(plan, at)));
}

function race(plan, at) {
  const best = plan.predicted.seconds;
  const every = [{ text: "this plan", seconds: best, outcome: "chosen" }, ...plan.others];
  const times = every.map((other) => (other.outcome === "slower" || other.outcome === "chosen" ? other.seconds : other.bound)).filter((value) => value);
  const low = Math.min(...times), sorted = [...times].sort((a, b) => a - b);
  const high = Math.max(low * 1.02, Math.min(sorted[sorted.length - 1], low * 2));
  const place = (value) => `${3 + 92 * Math.min(1, (value - low) / (high - low))}%`;
  const rows = every.map((other) => {
    const solved = other.outcome === "slower" || other.outcome === "chosen";
    const value = solved ? other.seconds : other.bound;
    const change = value ? value / best - 1 : null;
    const words = other.outcome === "chosen" ? time(best) : other.outcome === "does not fit" ? (other.memory ? `needs ${bytes(other.memory)}` : "does not fit")
      : solved ? `${percent(change)} slower` : change === null ? "" : change >= 0 ? `at least ${percent(change)} slower` : `at most ${percent(-change)} faster`;
    const marks = value && other.outcome !== "does not fit" ? [solved ? null : h("em", { style: { left: place(value), right: "0" } }), h(`i${solved ? "" : ".open"}${other.outcome === "chosen" ? ".best" : ""}`, { style: { left: place(value) } })] : null;
    return [h("div.wrap", {}, other.text, OUTCOMES[other.outcome] ? h("span.quiet", {}, ` ${OUTCOMES[other.outcome]}`) : null), h("div.lane", { "aria-hidden": "true" }, marks), h("div.right.nowrap", {}, words)];
  });
  const searched = plan.predicted.tried === null || plan.predicted.tried === undefined ? null : h("p.small.quiet", {}, `${count(plan.predicted.tried)} plans with stages or microbatches were tried, ${count(plan.predicted.pruned)} pruned by their bounds.`);
  return h("div", {}, TWO ? h("h3", {}, planTitle(at)) : null, h("div.race", {}, rows), searched);
}

function notesView() {
  const known = PLANS.filter((plan) => plan.notes.length);
  if (!known.length) return null;
  return h("div", {}, PLANS.map((plan, at) => (plan.notes.length ? [TWO ? h("h3", {}, planTitle(at)) : null, h("ul.notes", {}, plan.notes.map((note) => h("li", {}, note)))] : null)));
}
