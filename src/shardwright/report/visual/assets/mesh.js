"use strict";
// The mesh on nodes and links: what each axis splits, and which devices communicate with each other along it.

function meshView() {
  return h("div", {}, PLANS.map((plan, at) => [TWO ? h("h3", {}, planTitle(at)) : null, h("div.mesh", {}, h("div", {}, axisCards(plan)), drawnNodes(plan))]));
}

const WORK = [["batch", "the batch", "--parameters"], ["weights", "the weights", "--activations"], ["other", "the sequence or others", "--gradients"]];

function axisCards(plan) {
  const uses = plan.predicted ? plan.predicted.axes : plan.mesh.map((axis) => ({ axis: axis.name, size: axis.size }));
  const cards = uses.map((use) => {
    const where = use.nodes === undefined ? "" : use.nodes === 1 ? "within a node" : `over ${use.nodes} nodes`;
    const shares = use.batch === undefined ? [] : WORK.filter(([key]) => use[key] >= 0.0005);
    return h("div.axis", { style: { "--c": axisColour(use.axis) } }, h("b", {}, `${use.axis} = ${use.size}`), " ", h("span.quiet", {}, [where, (use.links || []).join(" and ")].filter(Boolean).join(", ")),
      use.batch === undefined ? null : [h("div.stack.thin", { style: { margin: "5px 0 3px", background: "var(--idle)" } }, shares.map(([key, , shade]) => h("i", { style: { width: `${100 * use[key]}%`, background: `var(${shade})` } }))),
        h("div.share", {}, shares.length ? ["splits ", shares.map(([key, text], number) => [number ? ", " : "", text, ` in ${percent(use[key])}`]), " of the arithmetic"] : "its devices repeat the same work")]);
  });
  if (plan.ppRanks > 1) {
    const links = plan.predicted && plan.predicted.links.length ? plan.predicted.links.join(" and ") : "";
    cards.unshift(h("div.axis", { style: { "--c": "var(--ink-3)" } }, h("b", {}, `pp = ${plan.ppRanks}`), " ", h("span.quiet", {}, links), h("div.share", {}, `${plan.stages} stages of the model, schedule ${plan.schedule}`)));
  }
  return [cards.length ? cards : h("p.quiet", {}, "one device"), storedBar(plan)];
}

const STORED = ["--parameters", "--optimizer", "--update", "--activations", "--gradients", "--inputs"];

function storedBar(plan) {
  const every = plan.predicted ? Object.entries(plan.predicted.stored) : [];
  const total = sum(every.map(([, size]) => size));
  if (!total) return null;
  return h("div", {}, h("h3", {}, `Parameters, ${bytes(total)}`), h("div.stack.thin", {}, every.map(([, size], at) => h("i", { style: { flex: `${size} 0 0`, background: `var(${STORED[at % 6]})` } }))),
    h("ul.legend.small", { style: { "margin-top": "8px", gap: "3px 16px" } }, every.filter(([, size]) => size >= 0.0005 * total).map(([how, size], at) => h("li", {}, dot(`var(${STORED[at % 6]})`), h("span", {}, how), h("b", {}, percent(size / total))))));
}

/** Where a device is: its pipeline rank, and its coordinates on the mesh. */
function placesOf(plan) {
  const places = new Map();
  plan.placement.forEach((part, rank) => {
    const devices = part.order || ranges(part.devices);
    devices.forEach((device, number) => {
      const at = {};
      let rest = number;
      for (const axis of [...part.mesh].reverse()) {
        at[axis.name] = rest % axis.size;
        rest = Math.floor(rest / axis.size);
      }
      places.set(device, { rank, at, mesh: part.mesh, stages: part.stages, number });
    });
  });
  return places;
}

function ranges(text) {
  return text.split(",").flatMap((word) => {
    const [first, last] = word.split("-").map(Number);
    return Array.from({ length: (last === undefined ? first : last) - first + 1 }, (_, at) => first + at);
  });
}

/** The devices that differ from one in this axis alone, or hold other stages of the same model. */
function peersOf(places, device, axis) {
  const own = places.get(device);
  return [...places].filter(([, place]) => {
    if (axis === "pp") return place.number === own.number;
    return place.rank === own.rank && Object.keys(own.at).every((name) => name === axis || place.at[name] === own.at[name]);
  }).map(([other]) => other);
}

function drawnNodes(plan) {
  const places = placesOf(plan);
  const nodes = plan.nodes ? plan.nodes.nodes : [{ device: "", first: 0, count: Math.min(plan.devices, 1024), inside: "", network: "" }];
  const size = nodes.some((node) => node.count > 1) ? Math.min(8, Math.max(...nodes.map((node) => node.count))) : 1;
  const axes = [...(plan.ppRanks > 1 ? ["pp"] : []), ...plan.mesh.filter((axis) => axis.size > 1).map((axis) => axis.name)];
  const buttons = new Map();
  const few = plan.devices <= 64;
  const total = plan.ppRanks;
  let axis = axes[0], device = 0;

  const about = h("p.small.quiet", { "aria-live": "polite", style: { "min-height": "42px" } });

  function update() {
    const peers = new Set(places.has(device) && axis ? peersOf(places, device, axis) : []);
    for (const [rank, button] of buttons) {
      button.classList.toggle("peer", peers.has(rank) && rank !== device);
      button.classList.toggle("self", rank === device);
      button.classList.toggle("faded", peers.size > 1 && !peers.has(rank));
      button.style.setProperty("--p", axis === "pp" ? "var(--ink)" : axisColour(axis));
    }
    const place = places.get(device);
    if (!place) return;
    const where = [...(total > 1 ? [`pipeline rank ${place.rank} (stage${place.stages.length > 1 ? "s" : ""} ${place.stages.join(", ")})`] : []), ...Object.entries(place.at).map(([name, number]) => `${name} ${number}`)];
    about.textContent = `Device ${device}: ${where.join(", ") || "the only one"}.` + (peers.size > 1 ? ` Along ${axis} it communicates with ${listed([...peers].filter((rank) => rank !== device))}.` : "");
  }

  const grid = h("div.nodes", { style: { "grid-template-columns": `repeat(auto-fill, minmax(${few ? Math.max(130, Math.min(size, 8) * 30) : 84}px, 1fr))` } }, nodes.map((node, number) => h("div.node", {},
    h("div.name", {}, h("span", {}, few && node.device ? `node ${number} · ${node.device}` : `node ${number}`), few ? h("span", {}, node.inside) : null),
    h("div.devices", { style: { "grid-template-columns": `repeat(${few ? size : Math.min(size, 8)}, minmax(0, ${few ? 34 : 40}px))`, gap: few ? "3px" : "2px" } },
      Array.from({ length: node.count }, (_, at) => node.first + at).map((rank) => {
        const place = places.get(rank);
        const share = place && total > 1 ? place.rank / Math.max(1, total - 1) : 0.35;
        const button = h("button.device", {
          type: "button", tabindex: rank === 0 ? "0" : "-1", "data-rank": rank, "aria-label": `device ${rank}`,
          style: { "--d": `color-mix(in oklab, var(--backward) ${Math.round(34 + 60 * share)}%, var(--card))`, "--on": share > 0.45 ? "#fff" : "var(--ink)", "border-radius": few ? "" : "3px", "border-width": few ? "" : "1.5px" },
          onmouseenter: () => { device = rank; update(); }, onfocus: () => { device = rank; update(); },
          onkeydown: (event) => {
            const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: size, ArrowUp: -size }[event.key];
            const next = step && buttons.get(rank + step);
            if (next) { event.preventDefault(); next.focus(); }
          },
        }, few ? String(rank) : "");
        buttons.set(rank, button);
        return button;
      })))));
  const more = plan.nodes && plan.nodes.count > nodes.length ? h("p.small.quiet", {}, `and ${plan.nodes.count - nodes.length} more nodes like these`) : null;
  const network = plan.nodes && plan.nodes.count > 1 ? h("div.wire", {}, [...new Set(nodes.map((node) => node.network))].join(", "), " between nodes, ", [...new Set(nodes.map((node) => node.inside))].join(", "), " inside") : null;
  const unknown = plan.nodes ? null : h("p.small.quiet", {}, plan.cluster ? `The cluster ${plan.cluster} is not known here, so nodes and links are not drawn.` : "The plan names no cluster, so nodes and links are not drawn.");
  update();
  return h("div", {}, axes.length ? choice(axes.map((name) => [name, `along ${name}`]), axis, (name) => { axis = name; update(); }, "the axis along which devices communicate") : null, about, grid, network, more, unknown);
}

function listed(ranks) {
  return ranks.length > 12 ? `${ranks.slice(0, 6).join(", ")} … ${ranks[ranks.length - 1]} (${ranks.length})` : ranks.join(", ");
}
