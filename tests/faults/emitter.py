"""Faults of the emitter: what it writes is not what the program says."""

from .fault import Fault

BODY, LAYERS = "emit/body.py", "emit/layers.py"

EMITTER = (
    Fault(
        "a difference is printed as a sum",
        "ops/arithmetic.py",
        'operator={"Tensor": "-", "Scalar": "-"}',
        'operator={"Tensor": "+", "Scalar": "+"}',
    ),
    Fault(
        "a quotient is printed as a product",
        "ops/arithmetic.py",
        'operator={"Tensor": "/", "Scalar": "/"}',
        'operator={"Tensor": "*", "Scalar": "*"}',
    ),
    Fault("the factor of a difference is dropped", "ops/printing.py", '{sign} {alpha} * {right}"', '{sign} {right}"'),
    Fault("keepdim is dropped", "ops/reductions.py", """[f"keepdim={p['keepdim']}"] if""", "[] if"),
    Fault(
        "cat joins along the first dim",
        "ops/printing.py",
        "p.listed('tensors')}], {p.literal('dim', 0)})",
        "p.listed('tensors')}], {0 * p.literal('dim', 0)})",
    ),
    Fault(
        "attention is not causal",
        "ops/attention.py",
        '", is_causal=True" if p.literal("is_causal") else ""\n    gqa',
        '"" if p.literal("is_causal") else ""\n    gqa',
    ),
    Fault(
        "attention takes values for keys",
        "ops/attention.py",
        "product_attention({p['query']}, {p['key']}, {p['value']}",
        "product_attention({p['query']}, {p['value']}, {p['key']}",
    ),
    Fault("the step of a slice is dropped", "ops/parts.py", '(f":{step}" if step != 1 else "")', '""'),
    Fault("a slice is of the next dim", "ops/parts.py", "[{':, ' * dim}{span}]", "[{':, ' * (dim + 1)}{span}]"),
    Fault(
        "a split is along another dim",
        "ops/parts.py",
        ".split({size}, {p.literal('dim', 0)})",
        ".split({size}, {p.literal('dim', 0) - 1})",
    ),
    Fault(
        "a product takes its weight for its input",
        "ops/matmuls.py",
        'functional("linear", "input", "weight", "bias")',
        'functional("linear", "weight", "input", "bias")',
    ),
    Fault(
        "a bias is dropped",
        "ops/printing.py",
        "[p[key] for key in keys if p.has(key)]",
        "[p[key] for key in keys if p.has(key)][:2]",
    ),
    Fault(
        "another row of a table is padding",
        "ops/lookups.py",
        '", padding_idx={padding}" if',
        '", padding_idx={padding + 1}" if',
    ),
    Fault("padding has the wrong sign", "ops/moves.py", "value={p.show(value)}", "value={p.show(-value)}"),
    Fault(
        "where takes the other branch",
        "ops/pointwise.py",
        "{p['condition']}, {p['self']}, {p['other']}",
        "{p['condition']}, {p['other']}, {p['self']}",
    ),
    Fault("a norm has no weight", "ops/norms.py", '[p["weight"]] if p.has("weight") or', '[] if p.has("weight") or'),
    Fault(
        "a view has a dim more",
        "ops/views.py",
        "{p.first()}.{name}({p.listed(key) or '()'",
        "{p.first()}.{name}(1, {p.listed(key) or '()'",
    ),
    Fault("one of the next dim is selected", "ops/parts.py", "[{':, ' * dim}{index}]", "[{':, ' * (dim + 1)}{index}]"),
    Fault(
        "a sum of losses becomes a mean",
        "ops/losses.py",
        'extra = f", reduction={REDUCTIONS[reduction]}" if reduction != MEAN',
        'extra = f", reduction={REDUCTIONS[reduction]}" if reduction == MEAN',
    ),
    Fault(
        "a cut has its blocks inside out",
        "ops/printing.py",
        'f"({block.outer}, {block.size}, {text})"',
        'f"({text}, {block.size}, {block.outer})"',
    ),
    Fault(
        "a loss does not know that its rows are split",
        "ops/losses.py",
        'shown.append(f"rows={axes_text(rows)}")',
        "pass",
    ),
    Fault(
        "labels are not smoothed",
        "ops/losses.py",
        """shown.append(f"label_smoothing={p['label_smoothing']}")""",
        "pass",
    ),
    Fault(
        "ignored labels count",
        "ops/losses.py",
        '("ignore_index", -100)]',
        '("ignore_index", p.literal("ignore_index"))]',
    ),
    Fault(
        "a loss counts its labels again", "ops/losses.py", """shown.append(f"count={p['count']}")""", """p["count"]"""
    ),
    Fault(
        "a converter cuts the first dim",
        "ops/collectives.py",
        "comm.{function}({x}, {p['dim']}, {group}{extra}{state})",
        "comm.{function}({x}, {0 * p.literal('dim')}, {group}{extra}{state})",
    ),
    Fault(
        "classes have no cut",
        "ops/losses.py",
        """*([] if even else [f"sharding={p['sharding']}"])""",
        """*([] if even or p["sharding"] else [])""",
    ),
    Fault("all ranks draw the mask of one", "ops/random.py", 'f", splits=[{shown}]" if where', '"" if where'),
    Fault(
        "running mean and variance change places",
        "ops/norms.py",
        "{p['running_mean']}, {p['running_var']}",
        "{p['running_var']}, {p['running_mean']}",
    ),
    Fault(
        "statistics are those of a rank's samples",
        BODY,
        'options += [f"over={axes_text(axes)}"] if axes else []',
        "pass",
    ),
    Fault(
        "a batch norm has another momentum",
        BODY,
        '{name}={norm.argument(name)!r}" for',
        '{name}={2 * norm.argument(name)!r}" for',
    ),
    Fault(
        "a batch norm is that of another module",
        BODY,
        'module = "at" if line.module == lead else self.path(str(line.module), lead)',
        "module = self.path('layer1.bn1', lead)",
    ),
    Fault("a chain ends before its last view", BODY, "enumerate(line.ops):", "enumerate(line.ops[:1]):"),
    Fault(
        "a table is looked up by its rows",
        "ops/lookups.py",
        """shown = f"{p['indices']}, {p['weight']}, {axes""",
        """shown = f"{p['weight']}, {p['indices']}, {axes""",
    ),
    Fault(
        "a share has the size of the whole", "emit/sizes.py", "rest //= self.program.mesh.axis(axis).size", "rest //= 1"
    ),
    Fault("a loop carries nothing on", LAYERS, "carried.append((at, place))", "pass"),
    Fault(
        "a loop leaves the last layer out",
        BODY,
        'span = "" if (loop.first,',
        'span = f"[:{loop.last}]" if (loop.first,',
    ),
    Fault(
        "every layer has the weights of one",
        BODY,
        """return "at" + attributes(key[len(lead) + 1 :])""",
        "return self.root + attributes(key)",
    ),
    Fault(
        "buffers are not updated",
        BODY,
        "for key in self.updates.get(name, ()):",
        "for key in self.updates.get(name, ())[1:]:",
    ),
    Fault("what needs no gradient gets one", BODY, "if op.no_grad:", "if op.no_grad and op.autocast:"),
    Fault(
        "ranks draw random numbers of their own",
        BODY,
        "if is_random(op):",
        "if is_random(op) and op.no_grad:",
    ),
    Fault(
        "a unit is not gathered",
        BODY,
        'f"with self.gathered({unit_text(unit, lead)}):"',
        'f"with self.gathered({unit_text(unit + lead, lead)}):"',
    ),
    Fault("a region is not recomputed", BODY, "    if recompute:\n", "    if not recompute:\n"),
    Fault(
        "a word is bound again while its value is read",
        "emit/names.py",
        "self.last.get(self.bound[word], -1) > at",
        "self.last.get(self.bound[word], -1) > at + 9",
    ),
    Fault("a count is not summed over ranks", "emit/prologue.py", "if early.axes else []", "if not early.axes else []"),
    Fault(
        "the largest becomes a sum",
        "ops/collectives.py",
        """comm.all_reduce({p.names[0]}, {axes_text(p.literal('axes'))}, op={p['op']})""",
        """comm.all_reduce({p.names[0]}, {axes_text(p.literal('axes'))})""",
    ),
)
