"use strict";
// Puts the report together: its head with search and theme, the sections, keys.

function storedTheme() {
  try { return localStorage.getItem("shardwright-theme"); } catch { return null; }  // a frame in a notebook has no storage
}

function setTheme(theme, keep) {
  document.documentElement.dataset.theme = theme;
  if (keep) try { localStorage.setItem("shardwright-theme", theme); } catch { /* it is for this page alone then */ }
  redraw();
}

const DARK = matchMedia("(prefers-color-scheme: dark)");
setTheme(storedTheme() || (DARK.matches ? "dark" : "light"), false);
DARK.addEventListener("change", () => { if (!storedTheme()) setTheme(DARK.matches ? "dark" : "light", false); });

function switchTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true);
}

// -- search

const MOST_RESULTS = 40;

function matches(text) {
  const wanted = text.trim().toLowerCase();
  const results = [];
  const known = new Set();
  const add = (plan, tree, label, what) => {
    const key = `${PLANS.indexOf(plan)} ${typeof what === "number" ? what : what.path}`;
    if (known.has(key) || results.length >= MOST_RESULTS) return;
    known.add(key);
    results.push({ plan, label, what });
  };
  TREES.forEach((tree) => {
    const { plan } = tree;
    for (const [path, what] of tree.paths) if (path.toLowerCase().includes(wanted)) add(plan, tree, path, what);
    if (plan.names) plan.names.forEach((name, at) => { if (plan.rowOf[at] >= 0 && name.toLowerCase().includes(wanted)) add(plan, tree, name, plan.rowOf[at]); });
  });
  return results;
}

function searchBox() {
  const list = h("div.results.hidden", { id: "results", role: "listbox", "aria-label": "ops and modules" });
  const input = h("input", { type: "search", placeholder: "Find an op or module", "aria-label": "find an op or module", autocomplete: "off", spellcheck: "false", role: "combobox", "aria-controls": "results", "aria-expanded": "false", "aria-autocomplete": "list" });
  let results = [], at = 0;

  function show() {
    list.replaceChildren(...(results.length ? results.map(({ plan, label }, number) => h("div.result", { role: "option", id: `result-${number}`, "aria-selected": String(number === at), onclick: () => go(number) }, TWO ? h("b", {}, `${LETTERS[PLANS.indexOf(plan)]} `) : null, label)) : [h("div.result.quiet", { role: "option", "aria-selected": "false" }, "nothing has this name")]));
    const open = input.value.trim() !== "";
    list.classList.toggle("hidden", !open);
    input.setAttribute("aria-expanded", String(open));
    if (open && results.length) input.setAttribute("aria-activedescendant", `result-${at}`);
    else input.removeAttribute("aria-activedescendant");
  }
  function go(number) {
    const result = results[number];
    close();
    if (result) reveal(result.plan, result.what);
  }
  function close() {
    list.classList.add("hidden");
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }
  input.addEventListener("input", () => { results = input.value.trim() ? matches(input.value) : []; at = 0; show(); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      at = Math.max(0, Math.min(results.length - 1, at + (event.key === "ArrowDown" ? 1 : -1)));
      show();
      const current = document.getElementById(`result-${at}`);
      if (current) current.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter") go(at);
    else if (event.key === "Escape") { close(); input.blur(); }
  });
  input.addEventListener("blur", () => setTimeout(close, 180));
  return { input, element: h("div.search", {}, input, h("kbd", { "aria-hidden": "true" }, "/"), list) };
}

// -- keys

const KEYS = [["/", "find an op or module"], ["j k", "next and previous section"], ["t", "light or dark"], ["+ − ← → 0", "zoom and move the timeline it is on"], ["← → ↑ ↓ Enter", "move in the modules, open and close"], ["?", "this list"]];

function keysDialog() {
  const dialog = h("dialog", { "aria-label": "keys" }, h("h2", {}, "Keys"), h("table", {}, h("tbody", {}, KEYS.map(([key, text]) => h("tr", {}, h("td.nowrap", {}, key.split(" ").map((each) => [h("kbd", {}, each), " "])), h("td", {}, text))))), h("button.chip", { type: "button", onclick: () => dialog.close() }, "Close"));
  return dialog;
}

function logo() {
  const square = (x, y, opacity) => s("rect", { x, y, width: 8, height: 8, rx: 2, fill: "var(--accent)", opacity });
  return s("svg", { width: 20, height: 20, viewBox: "0 0 20 20", "aria-hidden": "true" }, square(1, 1, 1), square(11, 1, 0.55), square(1, 11, 0.55), square(11, 11, 0.25));
}

function start() {
  const search = searchBox(), dialog = keysDialog();
  const main = document.getElementById("main");
  main.append(headView());
  section("differences", "Differences", "A is the first plan, B the second.", differenceView);
  section("time", "Where a step's time goes", "Predicted, of a mean device.", timeView);
  section("mesh", "Mesh", "What each axis splits, and the links it crosses.", meshView);
  section("communication", "Communication", "What a device sends in a step, as predicted. Tensors are counted; those of parameters travel in buckets.", communicationView);
  section("memory", "Memory", "Predicted memory of a device, by what it is for.", memoryView);
  section("timeline", "Timeline", "A predicted step, by pipeline rank.", timelineView);
  section("modules", "Modules", "Every op and parameter; equal layers are one.", modulesView);
  section("code", "Source and generated code", "Click a line to see what it became. Marked lines communicate.", codeView);
  section("runners-up", "Runners-up", "Predicted step time; an open dot is a lower bound of what was not solved to the end.", racersView);
  section("notes", "Notes", "", notesView);
  const links = [{ id: "overview", title: "Overview" }, ...SECTIONS].map(({ id, title }) => h("a", { href: `#${id}` }, title === "Where a step's time goes" ? "Time" : title === "Source and generated code" ? "Code" : title));
  document.getElementById("top").append(h("div.bar", {}, h("div.brand", {}, logo(), h("span.wide", {}, "shardwright"), h("span.quiet.model", {}, TWO ? `${PLANS[0].name} and ${PLANS[1].name}` : `${PLANS[0].model} · ${PLANS[0].policy}`)), h("div.grow.wide"), search.element,
    h("button.icon.wide", { type: "button", "aria-label": "keys", title: "keys", onclick: () => dialog.showModal() }, "?"), h("button.icon", { type: "button", "aria-label": "light or dark", title: "light or dark", onclick: switchTheme }, "◐")), h("nav", { "aria-label": "sections" }, links));
  main.append(...SECTIONS.map((each) => each.element));
  document.body.append(TIP, dialog);
  redraw();
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const sections = [...main.querySelectorAll("section")];
    const next = (step) => {
      const current = sections.findIndex((each) => each.getBoundingClientRect().bottom > 130);
      const goal = sections[Math.max(0, Math.min(sections.length - 1, current + step))];
      if (goal) goal.scrollIntoView();
    };
    const action = { "/": () => search.input.focus(), t: switchTheme, j: () => next(1), k: () => next(-1), "?": () => dialog.showModal() }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) links.forEach((link) => {
      const current = link.getAttribute("href") === `#${entry.target.id}`;
      link.setAttribute("aria-current", String(current));
      if (current) link.parentElement.scrollLeft = link.offsetLeft - link.parentElement.offsetLeft - 60;
    });
  }, { rootMargin: "-130px 0px -70% 0px" });
  main.querySelectorAll("section").forEach((each) => observer.observe(each));
  if (location.hash.length > 1) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  document.documentElement.dataset.ready = "true";
}

start();
