"use strict";
// What all views use: the data, elements, formats, colours. Text from a plan goes onto the page as text, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PLANS = DATA.plans;
const TWO = PLANS.length > 1;
const LETTERS = ["A", "B"];

/** An element. Attributes with `on` are listeners; children are elements or text. */
function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [what, how] of Object.entries(value)) element.style.setProperty(what, how);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An element of SVG. */
function s(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// -- formats: those of sw.explain

function digits(value, count = 3) {
  if (Math.abs(value) >= 10 ** count) return value.toFixed(0);
  return String(Number(value.toPrecision(count)));
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (Math.abs(seconds) < 1e-12) return "0";
  for (const [size, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
    if (Math.abs(seconds) >= size) return Math.abs(seconds) < 100 * size ? `${digits(seconds / size)} ${unit}` : `${(seconds / size).toFixed(0)} ${unit}`;
  return `${digits(seconds * 1e6, 2)} µs`;
}

function bytes(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" || Math.abs(size) >= 100 ? `${size.toFixed(0)} ${unit}` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

function percent(part) {
  return Math.abs(part) < 0.0995 ? `${(100 * part).toFixed(1)} %` : `${(100 * part).toFixed(0)} %`;
}

function count(number) {
  return Math.round(number).toLocaleString("en-US");
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** A dotted name that may break behind its dots. */
function breakable(name) {
  return name.split(/(?<=[./_])/).flatMap((part, at) => (at ? [h("wbr"), part] : [part]));
}

// -- colours

function axisNames() {
  const names = PLANS.flatMap((plan) => plan.placement.flatMap((part) => part.mesh.map((axis) => axis.name)));
  return [...new Set([...names, ...PLANS.flatMap((plan) => (plan.predicted ? plan.predicted.sent : []).flatMap((item) => item.axes))])];
}
const AXES = axisNames();

function axisColour(name) {
  const at = AXES.indexOf(name);
  return `var(--axis-${(at < 0 ? 5 : at) % 6})`;
}

/** The computed value of a colour, for canvases. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// -- parts that several views have

function dot(shade) {
  return h("i.dot", { style: { "--c": shade }, "aria-hidden": "true" });
}

/** The letter of a plan, if there are two. */
function letter(at) {
  return TWO ? h("b", {}, `${LETTERS[at]} `) : null;
}

function planTitle(at) {
  const plan = PLANS[at];
  return `${LETTERS[at]}: ${plan.policy}, plan ${plan.name}`;
}

/** A shape with the axes that shard its dims, in their colours. */
function shape(sizes, layout) {
  const parts = [];
  sizes.forEach((size, at) => {
    if (at) parts.push(", ");
    const axes = layout ? layout.dims[at] || [] : [];
    const mark = axes.length ? { "border-color": axisColour(axes[0]) } : {};
    parts.push(h("span.dim", { style: mark }, String(size)));
    for (const axis of axes) parts.push(h("sub", { style: { color: axisColour(axis) } }, axis));
  });
  const states = layout ? layout.rest.map(([axis, state]) => h("span.state", { style: { color: axisColour(axis) } }, state === "P" ? `Σ ${axis}` : `R ${axis}`)) : [];
  return h("span.shape", { title: layoutText(sizes, layout) }, "[", ...parts, "]", ...states);
}

function layoutText(sizes, layout) {
  if (!layout) return `[${sizes.join(", ")}]`;
  const dims = sizes.map((size, at) => ((layout.dims[at] || []).length ? `${size} sharded over ${layout.dims[at].join(", ")}` : String(size)));
  const rest = layout.rest.map(([axis, state]) => (state === "P" ? `a partial sum over ${axis}` : `replicated over ${axis}, its gradient a partial sum`));
  return [`[${dims.join(", ")}]`, ...rest].join("; ");
}

// -- tooltip

const TIP = h("div.tip.hidden", { role: "status" });

function showTip(event, ...content) {
  if (!content.length) return hideTip();
  TIP.replaceChildren(...content.flat(Infinity).filter(Boolean));
  TIP.classList.remove("hidden");
  const box = TIP.getBoundingClientRect();
  TIP.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  TIP.style.top = `${event.clientY + 18 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : event.clientY + 18}px`;
  return undefined;
}

function hideTip() {
  TIP.classList.add("hidden");
}

function tipRow(label, value, shade) {
  return h("div.tiprow", {}, h("span", {}, shade ? dot(shade) : null, label), h("span", {}, value));
}

// -- sections and what redraws when the theme or the size changes

const SECTIONS = [];
const REDRAW = [];

/** A section of the report; `body` makes its content, and null leaves it out. */
function section(id, title, about, body) {
  const content = body();
  if (!content) return;
  SECTIONS.push({
    id,
    title,
    element: h("section", { id, "aria-labelledby": `${id}-title` }, h("div.card", {}, h("div.title", {}, h("h2", { id: `${id}-title` }, title), about ? h("p", {}, about) : null), content)),
  });
}

/** What is made when it comes near the part of the page that is seen. */
function lazily(height, make) {
  const box = h("div", { style: { "min-height": `${height}px` } });
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    box.replaceChildren(make());
    box.style.minHeight = "";
  }, { rootMargin: "500px" });
  observer.observe(box);
  return box;
}

function redraw() {
  for (const draw of REDRAW) draw();
}

/** A canvas in device pixels, and its context in CSS pixels. */
function fitted(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

/** Round places of a scale. */
function ticks(low, high, most) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const marks = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) marks.push(at);
  return marks;
}

/** Buttons of which one is pressed. */
function choice(options, chosen, pick, label) {
  const buttons = options.map(([value, text]) =>
    h("button.chip", { type: "button", "aria-pressed": String(value === chosen), onclick: () => {
      buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(options[at][0] === value)));
      pick(value);
    } }, text));
  return h("div.chips", { role: "group", "aria-label": label }, buttons);
}
