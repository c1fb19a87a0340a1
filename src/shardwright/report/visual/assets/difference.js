"use strict";
// Two plans: which decisions differ, what both are predicted to cost, what each part of the model is worth.

function differenceView() {
  const difference = DATA.difference;
  if (!difference) return null;
  const head = (...names) => h("thead", {}, h("tr", {}, names.map((name, at) => h(at > 1 && names.length > 4 ? "th.number" : "th", {}, name))));
  const { rows, totals, parts } = difference;
  const table = (head_, body) => h("div.scroll", { tabindex: "0", role: "group", "aria-label": "table" }, h("table", {}, head_, h("tbody", {}, body)));
  const change = (a, b, format) => (b === a ? "" : `${b > a ? "+" : "−"}${format(Math.abs(b - a))}`);
  const most = 12;
  let all = false;
  const decisions = h("div");
  const fill = () => decisions.replaceChildren(table(head("what", "name", "plan A", "plan B"), (all ? rows : rows.slice(0, most)).map(([what, name, a, b]) => h("tr", {}, h("td.quiet", {}, what), h("td.wrap.mono", {}, breakable(name)), h("td.wrap", {}, a), h("td.wrap", {}, b)))),
    !all && rows.length > most ? h("button.link", { type: "button", onclick: () => { all = true; fill(); } }, `and ${rows.length - most} more`) : "");
  fill();
  return h("div", {}, totals.length ? [h("h3", {}, "Predicted cost"), table(head("", "plan A", "plan B", "difference", ""), totals.map(([what, a, b, isBytes]) => {
    const format = isBytes ? bytes : time;
    return h("tr", {}, h("td", {}, what), h("td.number", {}, format(a)), h("td.number", {}, format(b)), h(`td.number${b > a ? ".worse" : b < a ? ".better" : ""}`, {}, change(a, b, format)), h("td.number.quiet", {}, a ? change(0, b / a - 1, percent) : ""));
  }))] : null,
  parts.length ? [h("h3", {}, "Change in a step of plan A with only this part taken from plan B"), table(head("part", "ops", "parameters", "time", "memory"), parts.map(([name, ops, stored, seconds, memory]) => h("tr", {}, h("td.mono", {}, name), h("td.number", {}, String(ops)), h("td.number", {}, String(stored)), h("td.number", {}, change(0, seconds, time) || "the same"), h("td.number", {}, change(0, memory, bytes) || "the same"))))] : null,
  difference.whyNot ? h("p.small.quiet", {}, difference.whyNot) : null,
  h("h3", {}, rows.length ? `${rows.length} decisions differ` : "The plans make the same decisions"), rows.length ? decisions : null);
}
