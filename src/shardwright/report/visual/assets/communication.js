"use strict";
// What a device sends in a step, by axis and collective: overlapped and exposed, with bytes.

function howSent(message) {
  if (message.collective === "send") return "between stages";
  return message.overlapped ? "overlapped" : message.when === "update" ? "after backward" : "blocking";
}

function communicationView() {
  const rows = new Map();
  PLANS.forEach((plan, at) => {
    for (const message of plan.predicted ? plan.predicted.sent : []) {
      const key = JSON.stringify([message.axes, message.collective, message.when, howSent(message)]);
      if (!rows.has(key)) rows.set(key, PLANS.map(() => null));
      rows.get(key)[at] = message;
    }
  });
  if (!PLANS.some((plan) => plan.predicted)) return null;
  if (!rows.size) return h("p.quiet", {}, "Nothing is sent.");
  const every = [...rows].map(([key, messages]) => ({ key: JSON.parse(key), messages }));
  every.sort((a, b) => Math.max(...b.messages.map((m) => (m ? m.seconds : 0))) - Math.max(...a.messages.map((m) => (m ? m.seconds : 0))));
  const most = Math.max(...every.flatMap(({ messages }) => messages.map((m) => (m ? m.seconds : 0))));
  const axes = [...new Set(every.flatMap(({ key }) => key[0]))];
  const body = h("tbody");
  const foot = h("tfoot");

  function show(axis) {
    const shown = every.filter(({ key }) => axis === null || key[0].includes(axis));
    body.replaceChildren(...shown.map(({ key, messages }) => communicationRow(key, messages, most)));
    const totals = PLANS.map((_, at) => shown.map(({ messages }) => messages[at]).filter(Boolean));
    foot.replaceChildren(h("tr", {}, h("td", {}, h("b", {}, "in all")), h("td"), h("td"), h("td"),
      numbers(totals, (list) => count(sum(list.map((m) => m.count)))), numbers(totals, (list) => bytes(sum(list.map((m) => m.bytes || 0)))),
      numbers(totals, (list) => time(sum(list.map((m) => m.seconds)))), numbers(totals, (list) => time(sum(list.filter((m) => m.collective !== "send").map((m) => m.seconds - m.hidden))))));
  }
  show(null);
  const head = ["collective", "when", "how", "", "tensors", "sent", "time", "exposed"];
  return h("div", {}, axes.length > 1 ? choice([[null, "all axes"], ...axes.map((axis) => [axis, axis])], null, show, "axis") : null,
    h("div.scroll", { tabindex: "0", role: "group", "aria-label": "table of collectives" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((text, at) => h(at > 3 ? "th.number" : "th", {}, text || h("span.quiet", { style: { "font-weight": 400 } }, "exposed and hidden"))))), body, foot)),
    h("ul.legend.small", {}, h("li", {}, dot("var(--blocking)"), h("span", {}, "blocking: the next op waits for it")), h("li", {}, dot("var(--overlapped)"), h("span", {}, "overlapped, what kernels don't hide")), h("li", {}, dot("color-mix(in srgb, var(--overlapped) 35%, var(--card))"), h("span", {}, "overlapped, hidden"))));
}

function numbers(perPlan, format) {
  return h("td.number", {}, perPlan.map((value, at) => h("div", {}, TWO ? h("span.quiet", {}, `${LETTERS[at]} `) : null, value === null ? "–" : format(value))));
}

function communicationRow([axes, collective, when, how], messages, most) {
  const bars = messages.map((message) => {
    if (!message) return h("div.track", { style: { margin: "4px 0" } });
    const exposed = message.collective === "send" ? 0 : message.seconds - message.hidden;
    const shade = message.overlapped ? "--overlapped" : "--blocking";
    return h("div.track", { style: { margin: "5px 0" } }, h("i", { style: { width: `${(100 * exposed) / most}%`, background: `var(${shade})` } }), h("i", { style: { width: `${(100 * (message.seconds - exposed)) / most}%`, background: `color-mix(in srgb, var(${shade}) 35%, var(--card))` } }));
  });
  return h("tr", {}, h("td", {}, h("b", {}, collective), " ", axes.map((axis) => h("span.state", { style: { color: axisColour(axis) } }, axis))), h("td.quiet", {}, when), h("td.quiet", {}, how),
    h("td", { style: { width: "26%" } }, bars), numbers(messages, (m) => count(m.count)), numbers(messages, (m) => bytes(m.bytes || 0)), numbers(messages, (m) => time(m.seconds)),
    numbers(messages, (m) => (m.collective === "send" ? "in the bubble" : time(m.seconds - m.hidden))));
}
