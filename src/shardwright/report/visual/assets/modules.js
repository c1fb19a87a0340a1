"use strict";
// The module tree: equal layers as one, each op with its shape, layout, cost and reshards. Rows are made when opened.

const MOST_CHILDREN = 120;  // of a module that are shown at first
const TREES = [];  // of each plan: its nodes by row

function modulesView() {
  const box = h("div");
  let shown = TWO ? 1 : 0;
  const only = { reshards: false, recomputed: false, changed: false };
  const filters = [["reshards", "with reshards"], ["recomputed", "recomputed"], ...(TWO ? [["changed", "that differ"]] : [])].filter(([key]) => key === "changed" || PLANS.some((plan) => some(plan.tree, (row) => (key === "reshards" ? row.reshards : row.recomputed))));
  PLANS.forEach((plan, at) => TREES.push(new ModuleTree(plan, TWO ? PLANS[1 - at] : null, only)));
  const show = () => { box.replaceChildren(TREES[shown].render()); };
  const buttons = filters.map(([key, text]) => h("button.chip", { type: "button", "aria-pressed": "false", onclick: (event) => {
    only[key] = !only[key];
    event.currentTarget.setAttribute("aria-pressed", String(only[key]));
    show();
  } }, text));
  show();
  ModuleTree.show = (tree) => { shown = TREES.indexOf(tree); show(); };
  return h("div", {}, TWO ? choice(PLANS.map((_, at) => [at, planTitle(at)]), shown, (at) => { shown = at; show(); }, "plan") : null,
    h("div.tools", {}, buttons.length ? [h("span.small.quiet", {}, "only ops"), buttons] : null, h("span.grow"), h("button.chip", { type: "button", onclick: () => TREES[shown].all(true) }, "open all"), h("button.chip", { type: "button", onclick: () => TREES[shown].all(false) }, "close all")), box);
}

function some(node, test) {
  return node.rows.some(test) || node.children.some((child) => some(child, test));
}

function total(row) {
  return row.costs ? row.costs[0] + row.costs[1] + row.costs[2] + row.costs[3] : 0;
}

/** The path of a node, and of its rows the names as search knows them. */
class ModuleTree {
  constructor(plan, other, only) {
    Object.assign(this, { plan, other, only, items: new Map(), limits: new Map(), rows: new Map(), paths: [] });
    this.prepare(plan.tree, "", null);
    this.most = plan.tree.seconds || 1;
    this.open = new Set([plan.tree]);
    let node = plan.tree;
    while (node.children.length === 1 && node.children[0].children.length) { node = node.children[0]; this.open.add(node); }
  }

  prepare(node, path, parent) {
    node.path = path;
    node.parent = parent;
    node.seconds = 0;
    node.parts = [0, 0];
    node.saved = 0;
    for (const row of node.rows) {
      row.node = node;
      row.path = row.parameter !== undefined ? (path ? `${path}.${row.parameter}` : row.parameter) : `${path} / ${row.kind}`.trim();
      this.rows.set(row.id, row);
      this.paths.push([row.path, row.id]);
      if (this.plan.texts) this.spell(row);
      if (row.costs) {
        node.parts[0] += row.costs[0] + row.costs[1];
        node.parts[1] += row.costs[2] + row.costs[3];
      }
    }
    for (const child of node.children) {
      this.prepare(child, path ? `${path}.${child.name}` : child.name, node);
      node.parts[0] += child.parts[0];
      node.parts[1] += child.parts[1];
    }
    node.seconds = node.parts[0] + node.parts[1];
    if (path) this.paths.push([path, node]);
  }

  /** Texts in the place of their numbers. */
  spell(row) {
    const { texts } = this.plan;
    if (row.target !== undefined) row.target = texts[row.target];
    if (row.choice !== undefined) row.choice = texts[row.choice];
    if (row.stored !== undefined) [row.storage, row.sums] = texts[row.stored];
  }

  passes(row) {
    const { only } = this;
    return (!only.reshards || row.reshards) && (!only.recomputed || row.recomputed) && (!only.changed || this.before(row));
  }

  filtered() {
    return this.only.reshards || this.only.recomputed || this.only.changed;
  }

  /** The same op under the other plan, if it is treated otherwise there. */
  before(row) {
    if (!this.other) return null;
    const tree = TREES.find((each) => each.plan === this.other);
    if (!tree.byName) {
      tree.byName = new Map();
      if (this.other.names) this.other.names.forEach((name, at) => { if (this.other.rowOf[at] >= 0) tree.byName.set(name, tree.rows.get(this.other.rowOf[at])); });
      else tree.rows.forEach((each) => tree.byName.set(each.path, each));
    }
    if (!this.nameOf) {
      this.nameOf = new Map();
      if (this.plan.names) this.plan.rowOf.forEach((id, at) => { if (id >= 0 && !this.nameOf.has(id)) this.nameOf.set(id, this.plan.names[at]); });
    }
    const same = tree.byName.get(this.nameOf.get(row.id) || row.path);
    const text = (plan, each) => [each.choice || "", each.storage || "", each.layout === undefined ? "" : layoutText(each.shape, plan.layouts[each.layout]), Boolean(each.recomputed)].join("|");
    if (!same) return this.plan.names && this.other.names ? { missing: true } : null;
    return text(this.plan, row) === text(this.other, same) ? null : same;
  }

  render() {
    this.items.clear();
    const head = h("div.treehead", { "aria-hidden": "true" }, h("div", {}, "module, op or parameter"), h("div", {}, this.plan.layouts ? "shape and layout" : "decision"), h("div", {}, this.plan.layouts ? "shape on a rank" : ""), h("div", {}, this.plan.layouts ? "predicted time in a step" : ""));
    const list = h("ul.tree", { role: "tree", "aria-label": "modules", onkeydown: (event) => this.key(event) }, this.children(this.plan.tree, 0));
    const first = list.querySelector("[role=treeitem]");
    if (first) first.tabIndex = 0;
    this.list = list;
    return h("div", {}, head, list, first ? null : h("p.quiet", { style: { padding: "12px 6px" } }, "no op passes the filter"));
  }

  children(node, level) {
    const inside = [...node.children.filter((child) => !this.filtered() || some(child, (row) => this.passes(row))), ...node.rows.filter((row) => this.passes(row))];
    const most = this.limits.get(node) || MOST_CHILDREN;
    const items = inside.slice(0, most).map((each) => (each.children ? this.node(each, level) : this.row(each, level)));
    if (inside.length > most) items.push(h("li", { role: "treeitem", "aria-level": level + 1, tabindex: "-1" }, h("button.link", { type: "button", tabindex: "-1", style: { margin: `4px 0 8px ${level * 17 + 25}px` }, onclick: () => { this.limits.set(node, most + 2 * MOST_CHILDREN); ModuleTree.show(this); } }, `${count(inside.length - most)} more`)));
    return items;
  }

  node(node, level) {
    const opened = this.open.has(node) || this.filtered();
    const stages = node.stages.length && this.plan.stages > 1 ? (node.stages.length > 1 ? `stages ${node.stages[0]}–${node.stages[node.stages.length - 1]}` : `stage ${node.stages[0]}`) : "";
    const changed = TWO && some(node, (row) => this.before(row));
    const sends = some(node, (row) => row.reshards);
    const head = h("div.row", { onclick: () => this.toggle(node) }, h("div.what", {}, h("span.turn", { "aria-hidden": "true" }, "›"), h("span.module", {}, node.name), node.count > 1 ? h("span.times", {}, `${node.count} equal`) : null,
      stages ? h("span.flag", {}, stages) : null, changed ? h("span.flag.changed", {}, "differs") : null, sends && !opened ? h("span.flag.sends", {}, "reshards") : null), h("div.cell-shape"), h("div.cell-local"), this.cost(node.seconds, node.parts));
    const item = h("li", { role: "treeitem", "aria-expanded": String(opened), "aria-level": level + 1, tabindex: "-1", style: { "--level": level } }, head);
    if (opened) item.append(h("ul", { role: "group" }, this.children(node, level + 1)));
    item.node = node;
    this.items.set(node, item);
    return item;
  }

  row(row, level) {
    const { layouts } = this.plan;
    const layout = layouts && row.layout !== undefined ? layouts[row.layout] : null;
    const before = this.before(row);
    const flags = [row.times > 1 ? h("span.times", {}, `${count(row.times)}×`) : null, row.recomputed ? h("span.flag", {}, "recomputed") : null, row.constant ? h("span.flag", {}, "computed once") : null,
      row.storage && row.storage !== "replicated" ? h("span.flag", {}, row.storage) : null, before ? h("span.flag.changed", {}, before.missing ? "only here" : "differs") : null,
      (row.reshards || []).map((reshard) => h("span.flag.sends", {}, reshardText(reshard)))];
    const name = row.parameter !== undefined ? h("span.param", {}, row.parameter) : h("span", {}, row.kind);
    const head = h("div.row", { onclick: () => this.toggle(row) }, h("div.what", {}, h("span.turn", { "aria-hidden": "true" }, "›"), name, flags),
      h("div.cell-shape", {}, row.shape ? shape(row.shape, layout) : h("span.quiet", {}, row.choice || row.storage || "")), h("div.cell-local.shape.quiet", {}, row.shape ? `[${(row.local || row.shape).join(", ")}]` : ""), row.costs ? this.cost(total(row), [row.costs[0] + row.costs[1], row.costs[2] + row.costs[3]]) : h("div"));
    const opened = this.open.has(row);
    const item = h("li", { role: "treeitem", "aria-expanded": String(opened), "aria-level": level + 1, tabindex: "-1", style: { "--level": level } }, head);
    if (opened) item.append(facts(this.plan, row, before, this.other));
    item.node = row;
    this.items.set(row, item);
    return item;
  }

  cost(seconds, [compute, sends]) {
    if (!this.plan.layouts) return h("div");
    return h("div.cost", {}, h("span.right", {}, seconds > 0 ? time(seconds) : ""), h("div.track", { title: `kernels ${time(compute)}, blocking communication ${time(sends)}` }, h("i", { style: { width: `${(100 * compute) / this.most}%`, background: "var(--compute)" } }), h("i", { style: { width: `${(100 * sends) / this.most}%`, background: "var(--blocking)" } })));
  }

  toggle(what) {
    if (this.open.has(what)) this.open.delete(what);
    else this.open.add(what);
    this.again(what);
  }

  /** Make the item of a node or a row anew, where it stands. */
  again(what) {
    const old = this.items.get(what);
    if (!old) return;
    const level = Number(old.getAttribute("aria-level")) - 1;
    const item = what.children ? this.node(what, level) : this.row(what, level);
    const focused = old === document.activeElement || old.tabIndex === 0;
    old.replaceWith(item);
    if (focused) item.tabIndex = 0;
    if (focused && document.activeElement === document.body) item.focus({ preventScroll: true });
  }

  all(open) {
    const each = (node) => { if (open) this.open.add(node); else this.open.delete(node); node.children.forEach(each); };
    this.open = new Set();
    if (open) each(this.plan.tree);
    ModuleTree.show(this);
  }

  /** Open what leads to a row or a node, and scroll to it. */
  reveal(what) {
    for (const key of Object.keys(this.only)) this.only[key] = false;
    document.querySelectorAll("#modules .tools [aria-pressed]").forEach((button) => button.setAttribute("aria-pressed", "false"));
    this.open.add(what);
    for (let node = what.node || what.parent, child = what; node; child = node, node = node.parent) {
      this.open.add(node);
      const at = child.children ? node.children.indexOf(child) : node.children.length + node.rows.indexOf(child);
      if (at >= (this.limits.get(node) || MOST_CHILDREN)) this.limits.set(node, at + MOST_CHILDREN);
    }
    ModuleTree.show(this);
    const item = this.items.get(what);
    if (!item) return;
    this.list.querySelectorAll("[tabindex='0']").forEach((each) => { each.tabIndex = -1; });
    item.tabIndex = 0;
    item.firstElementChild.classList.add("found");
    item.scrollIntoView({ block: "center" });
    item.focus({ preventScroll: true });
  }

  key(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item || event.target !== item) return;
    const visible = [...this.list.querySelectorAll("[role=treeitem]")];
    const at = visible.indexOf(item), expanded = item.getAttribute("aria-expanded") === "true";
    const go = (next) => { if (next) { item.tabIndex = -1; next.tabIndex = 0; next.focus(); } };
    const keys = {
      ArrowDown: () => go(visible[at + 1]), ArrowUp: () => go(visible[at - 1]), Home: () => go(visible[0]), End: () => go(visible[visible.length - 1]),
      ArrowRight: () => (expanded ? go(visible[at + 1]) : this.toggle(item.node)), ArrowLeft: () => (expanded ? this.toggle(item.node) : go(item.parentElement.closest("[role=treeitem]"))),
      Enter: () => this.toggle(item.node), " ": () => this.toggle(item.node),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }
}

function reshardText(reshard) {
  const part = (list) => [...new Set(list.map(([collective, axes]) => `${collective} ${axes.join(", ")}`))].join("; ") || "–";
  return `${part(reshard.forward)} / ${part(reshard.backward)}`;
}

function facts(plan, row, before, other) {
  const { layouts } = plan;
  const shown = (sizes, layout) => shape(sizes, layouts ? layouts[layout] : null);
  const source = row.source === undefined ? null : plan.sources[row.source];
  const c = row.costs;
  const costs = c ? [["kernels", c[0] + c[1], `forward ${time(c[0])}, backward ${time(c[1])}`], ["blocking communication", c[2] + c[3], `forward ${time(c[2])}, backward ${time(c[3])}`], ["overlapped communication", c[4] + c[5], `forward ${time(c[4])}, backward ${time(c[5])}`], ["update", c[6], time(c[6])]].filter(([, seconds]) => seconds > 0) : [];
  const items = [
    row.target ? ["op", h("code", {}, row.target)] : null,
    row.times > 1 ? ["equal ones", `${count(row.times)}; costs are of all of them`] : null,
    row.shape ? ["shape", [shown(row.shape, row.layout), h("span.quiet", {}, ` ${row.dtype}, on a rank [${(row.local || row.shape).join(", ")}]`)]] : null,
    row.choice ? ["split on", row.choice] : null,
    (row.inputs || []).length ? ["inputs", row.inputs.map((number) => { const [word, sizes, layout] = plan.inputs[number]; return h("div", {}, `${word} `, shown(sizes, layout)); })] : null,
    row.storage ? ["stored", row.storage] : null,
    row.sums ? ["gradient", row.sums === "frozen" ? "none: it is frozen" : `summed over ${row.sums}`] : null,
    row.bytes ? ["on a rank", `${bytes(row.bytes[0])} of the parameter, ${bytes(row.bytes[1])} of its gradient${row.times > 1 ? " (of each)" : ""}`] : null,
    ...(row.reshards || []).map((reshard) => ["reshard", h("div", {}, h("b", {}, reshard.value), " ", reshardText(reshard), h("span.quiet", {}, ` (forward / backward), ${time(reshard.seconds)}: from ${states(layouts[reshard.from])} to ${states(layouts[reshard.to])}`))]),
    ...costs.map(([name, , text]) => [`predicted ${name}`, text]),
    c && c[7] > 0 ? ["saved for backward", bytes(c[7])] : null,
    source ? ["source", [source[0], " ", h("code", {}, source[1])]] : null,
    before && !before.missing && before.shape ? [`under plan ${LETTERS[PLANS.indexOf(other)]}`, [shape(before.shape, other.layouts ? other.layouts[before.layout] : null), ` ${before.choice || before.storage || ""}`]] : before && !before.missing ? [`under plan ${LETTERS[PLANS.indexOf(other)]}`, before.choice || before.storage || "replicated"] : null,
  ].filter(Boolean);
  return h("dl.facts", {}, items.map(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]));
}

function states(layout) {
  const dims = layout.dims.map((axes) => axes.join(" ") || ".");
  const rest = layout.rest.map(([axis, state]) => `${axis}: ${state === "P" ? "partial sum" : "replicate"}`);
  return `[${dims.join(", ")}]${rest.length ? ` (${rest.join(", ")})` : ""}`;
}

/** Show a row of a plan's tree. */
function reveal(plan, id) {
  const tree = TREES.find((each) => each.plan === plan);
  tree.reveal(typeof id === "number" ? tree.rows.get(id) : id);
}
