"use strict";
// The model's source beside the generated code; a line of the one marks its lines of the other.

const KEYWORDS = /\b(def|class|return|for|in|with|if|else|elif|import|from|not|and|or|is|None|True|False|self|lambda|raise|while|yield|as)\b/;
const TOKENS = new RegExp(`(#.*$)|("(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*')|${KEYWORDS.source}|\\b(comm\\.\\w+|runtime\\.\\w+)`, "g");

function codeView() {
  const known = PLANS.filter((plan) => plan.code && plan.code.generated.length);
  if (!known.length) return null;
  return h("div", {}, known.map((plan) => [TWO ? h("h3", {}, planTitle(PLANS.indexOf(plan))) : null, lazily(596, () => codePanes(plan))]));
}

function coloured(text) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(TOKENS)) {
    if (match.index > last) parts.push(text.slice(last, match.index));
    parts.push(h(match[1] ? "span.c" : match[4] ? "span.m" : match[3] ? "span.k" : "span", {}, match[0]));
    last = match.index + match[0].length;
  }
  parts.push(text.slice(last));
  return parts;
}

function codePanes(plan) {
  const { sources, generated } = plan.code;
  let program = 0, file = 0;
  const left = h("div.lines", { tabindex: "0", role: "group", "aria-label": "source of the model" });
  const right = h("div.lines", { tabindex: "0", role: "group", "aria-label": "generated code" });

  function mark(key, from) {
    for (const pane of [left, right]) {
      const lines = [...pane.querySelectorAll(".codeline")];
      lines.forEach((line) => line.classList.toggle("on", line.dataset.to === key));
      const first = lines.find((line) => line.dataset.to === key);
      if (pane !== from && first) pane.scrollTop = first.offsetTop - pane.offsetTop - pane.clientHeight / 3;
    }
  }

  function follow(event) {
    const line = event.target.closest(".codeline[data-to]");
    if (!line) return;
    const pane = event.currentTarget, wanted = Number(line.dataset.to.split(":")[0]);
    if (pane === right && wanted !== file) { file = wanted; select.value = String(file); fillSources(); }
    mark(line.dataset.to, pane);
  }

  function codeline(number, text, to) {
    return h(`div.codeline${/\bcomm\.|runtime\.replicate_/.test(text.split("#")[0]) ? ".sends" : ""}`, { "data-to": to }, h("span.n", {}, String(number)), h("span.t", {}, coloured(text)));
  }

  function fillSources() {
    const used = new Set(generated.flatMap((each) => each.lines.filter((line) => line.length > 1 && line[1] === file).map((line) => line[2])));
    left.replaceChildren(...(sources[file] ? sources[file].runs.flatMap((run, at) => [at ? h("div.gapline", { "aria-hidden": "true" }, "⋯") : null, ...run.lines.map((text, row) => codeline(run.first + row, text, used.has(run.first + row) ? `${file}:${run.first + row}` : null))]).filter(Boolean) : []));
    if (!left.childElementCount) left.append(h("p.quiet", { style: { padding: "8px 14px" } }, "The source is not at hand."));
  }

  function fillGenerated() {
    right.replaceChildren(...generated[program].lines.map(([text, from, line], row) => codeline(row + 1, text, from === undefined ? null : `${from}:${line}`)));
  }

  const pick = (list, label, change) => (list.length > 1 ? h("select", { "aria-label": label, onchange: (event) => change(Number(event.target.value)) }, list.map((name, at) => h("option", { value: at }, name))) : h("span", {}, list[0] || ""));
  const select = pick(sources.map((each) => each.file), "file of the model", (at) => { file = at; fillSources(); });
  const stage = pick(generated.map((each) => each.title), "generated file", (at) => { program = at; fillGenerated(); });
  left.addEventListener("click", follow);
  right.addEventListener("click", follow);
  fillSources();
  fillGenerated();
  return h("div.code", {}, h("div.pane", {}, h("div.name", {}, h("b", {}, "Your model"), select), left), h("div.pane", {}, h("div.name", {}, h("b", {}, "Generated"), stage), right));
}
