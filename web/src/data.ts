// What views ask of the document. Pure functions: tests are in test/.
import type { Column, Moments, Report, RunView, ShardView, StepTables } from "./types";

/** How many values of a sorted array are at most `x`. */
export function bisect(values: ArrayLike<number | null>, x: number): number {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] as number) <= x) low = middle + 1; else high = middle;
  }
  return low;
}

/** Whether two ways may run the same step; it is not known of all. */
export const alike = (a: RunView, b: RunView): boolean => !a.group || !b.group || a.group === b.group;

/** Whether the one says which step it runs and the other does not. */
export const unsure = (a: RunView, b: RunView): boolean => !a.group !== !b.group;

/** What is shown first: the last plan, or the last way, beside the first of the same step. */
export function firstPair(runs: RunView[]): [number, number] {
  const planned = runs.reduce((last, run, k) => (run.proof === null ? last : k), -1);
  const after = planned < 0 ? Math.max(0, runs.length - 1) : planned, before = runs.findIndex((run, k) => k !== after && run.group === runs[after].group);
  return [before < 0 ? Math.max(0, runs.findIndex((run, k) => k !== after && alike(run, runs[after]))) : before, after];
}

export type Axis = "time" | "runs";

/** Whether moments have times. */
export const timed = (run: RunView): boolean => run.moments.start.length > 0 && (run.moments.seconds ?? 0) > 0;

/** How long the axis of a run is. */
export function extent(run: RunView, axis: Axis): number {
  return axis === "time" ? run.moments.seconds ?? 0 : run.moments.live.length;
}

/** Where a moment begins on the axis; positions between moments are allowed. */
export function place(moments: Moments, at: number, axis: Axis): number {
  if (axis === "runs") return at;
  const k = Math.min(Math.floor(at), moments.start.length - 1);
  if (k < 0) return 0;
  const from = moments.start[k] as number;
  const to = k + 1 < moments.start.length ? (moments.start[k + 1] as number) : moments.seconds ?? from;
  return from + (at - k) * (to - from);
}

/** The moment at a place of the axis. */
export function momentAt(run: RunView, x: number, axis: Axis): number {
  const count = run.moments.live.length;
  const k = axis === "runs" ? Math.floor(x) : bisect(run.moments.start, x) - 1;
  return Math.max(0, Math.min(count - 1, k));
}

export interface Live { tensor: number; operator: number; bytes: number; use: string; leaf: boolean }

/** Who is live at an event, largest first; leaves are among them. */
export function liveAt(report: Report, run: RunView, event: number): Live[] {
  const { birth, death, bytes, tensor, operator, use } = run.blocks;
  const found: Live[] = [];
  for (let k = 0; k < bytes.length; k++) {
    if (birth[k] <= event && event < death[k] && bytes[k]) {
      found.push({ tensor: tensor[k], operator: operator[k], bytes: bytes[k], use: report.words[use[k]], leaf: false });
    }
  }
  const sizes = report.steps[run.step].tensors.bytes;
  for (const row of run.leaves) if (sizes[row]) found.push({ tensor: row, operator: -1, bytes: sizes[row], use: "leaf", leaf: true });
  return found.sort((a, b) => b.bytes - a.bytes || a.tensor - b.tensor);
}

/** The name of a block: its tensor's, or what it is for. */
export function nameOf(report: Report, run: RunView, one: Live): string {
  const { tensors, operators } = report.steps[run.step];
  const who = one.operator >= 0 ? report.words[operators.name[one.operator]] : "the step";
  if (one.tensor < 0) return `${one.use} of ${who}`;
  const name = report.words[tensors.name[one.tensor]];
  return one.use === "tensor" || one.use === "leaf" ? name : `${name} (${one.use})`;
}

/** Where a block comes from: the line of its tensor, or of the operator that takes it. */
export function sourceOf(report: Report, run: RunView, one: Live): string {
  const { tensors, operators } = report.steps[run.step];
  const own = one.tensor >= 0 ? tensors.source[one.tensor] : 0;
  const makers = one.tensor >= 0 ? tensors.maker[one.tensor] : one.operator;
  const maker = makers >= 0 ? makers : one.operator;
  return report.words[own || (maker >= 0 ? operators.source[maker] : 0)];
}

export type By = "role" | "module" | "phase" | "annotation" | "decision";

/** What became of each tensor. */
export function decisionsOf(report: Report, run: RunView): Map<number, { decision: string; reason: string; price: number | null; instead: number | null }> {
  const found = new Map();
  const table = run.decisions;
  if (table) table.tensor.forEach((row, k) => found.set(row, {
    decision: report.words[table.decision[k]], reason: report.words[table.reason[k]], price: table.price[k], instead: table.instead[k],
  }));
  return found;
}

/** The first parts of a module's path. */
export function prefix(path: string, depth: number): string {
  const parts = path.split(/[./]/);
  return parts.slice(0, depth).join(".");
}

/** The category of a block or of a leaf, in words. */
export function categoryOf(report: Report, run: RunView, by: By, depth: number): (one: Live) => string {
  const { tensors, operators } = report.steps[run.step];
  const words = report.words;
  const decided = by === "decision" ? decisionsOf(report, run) : null;
  return (one) => {
    const maker = one.operator >= 0 ? one.operator : one.tensor >= 0 ? tensors.maker[one.tensor] : -1;
    switch (by) {
      case "role":
        if (one.use === "workspace" || one.tensor < 0) return one.use === "tensor" ? "activation" : one.use;
        return words[tensors.role[one.tensor]] === "activation" && maker >= 0 && words[operators.phase[maker]] === "backward" ? "made by backward" : words[tensors.role[one.tensor]];
      case "module": {
        const path = one.tensor >= 0 ? words[tensors.module[one.tensor]] : maker >= 0 ? words[operators.module[maker]] : "";
        return prefix(path, depth) || "no module";
      }
      case "phase":
        return one.leaf ? "before the step" : maker >= 0 ? `taken in ${words[operators.phase[maker]]}` : "other";
      case "annotation":
        return (maker >= 0 && words[operators.annotation[maker]]) || "not annotated";
      case "decision":
        return one.leaf ? "resident" : decided!.get(one.tensor)?.decision ?? (one.use === "tensor" ? "temporary" : one.use);
    }
  };
}

export interface Stack { names: string[]; layers: Float64Array[] }

/** Bytes of each category at every moment, the largest categories first; small ones are added up. */
export function stacked(report: Report, run: RunView, by: By, depth: number, most = 9): Stack {
  const { birth, death, bytes, tensor, operator, use, events } = run.blocks;
  const category = categoryOf(report, run, by, depth);
  const changes = new Map<string, Float64Array>();
  const totals = new Map<string, number>();
  const put = (name: string, from: number, to: number, size: number) => {
    let change = changes.get(name);
    if (!change) changes.set(name, (change = new Float64Array(events + 2)));
    change[from] += size;
    change[Math.min(to, events + 1)] -= size;
    totals.set(name, (totals.get(name) ?? 0) + size * Math.max(1, to - from));
  };
  for (let k = 0; k < bytes.length; k++) {
    if (!bytes[k]) continue;
    const one = { tensor: tensor[k], operator: operator[k], bytes: bytes[k], use: report.words[use[k]], leaf: false };
    put(category(one), birth[k], death[k], bytes[k]);
  }
  const sizes = report.steps[run.step].tensors.bytes;
  for (const row of run.leaves) put(category({ tensor: row, operator: -1, bytes: sizes[row], use: "leaf", leaf: true }), 0, events + 1, sizes[row]);
  if (run.beside_bytes) put("outside the step", 0, events + 1, run.beside_bytes);
  const order = [...totals.keys()].sort((a, b) => totals.get(b)! - totals.get(a)!);
  const shown = order.length > most ? order.slice(0, most - 1) : order;
  const at = run.moments.event;
  const layers = shown.map((name) => sums(changes.get(name)!, at));
  if (order.length > most) {
    const rest = new Float64Array(events + 2);
    for (const name of order.slice(most - 1)) changes.get(name)!.forEach((size, k) => (rest[k] += size));
    layers.push(sums(rest, at));
    shown.push(`${order.length - most + 1} others`);
  }
  const still = layers.map((layer) => layer.every((size) => size === layer[0])); // what never changes lies below
  const ranks = shown.map((_, k) => k).sort((a, b) => Number(still[b]) - Number(still[a]) || a - b);
  return { names: ranks.map((k) => shown[k]), layers: ranks.map((k) => layers[k]) };
}

function sums(change: Float64Array, at: Column): Float64Array {
  const running = new Float64Array(change.length);
  let total = 0;
  for (let k = 0; k < change.length; k++) running[k] = total += change[k];
  return Float64Array.from(at, (event) => running[event]);
}

export interface Difference { name: string; source: string; module: string; before: number; after: number; was: string; is: string }

/** Tensors by name: bytes at the peak of one run and at the peak of another, and what became of them. */
export function difference(report: Report, a: RunView, b: RunView): Difference[] {
  const found = new Map<string, Difference>();
  for (const [side, run] of [["before", a], ["after", b]] as const) {
    const decided = decisionsOf(report, run);
    const event = run.moments.event[run.moments.peak];
    const tables = report.steps[run.step].tensors;
    const entry = (name: string, source: string, module: string) => {
      let one = found.get(name);
      if (!one) found.set(name, (one = { name, source, module, before: 0, after: 0, was: "", is: "" }));
      return one;
    };
    if (event !== undefined) {
      for (const one of liveAt(report, run, event)) {
        const module = one.tensor >= 0 ? report.words[tables.module[one.tensor]] : "";
        entry(nameOf(report, run, one), sourceOf(report, run, one), module)[side] += one.bytes;
      }
    }
    for (const [row, { decision }] of decided) {
      const name = report.words[tables.name[row]];
      const one = found.get(name) ?? (decision === "recomputed" || decision === "offloaded" ? entry(name, report.words[tables.source[row]], report.words[tables.module[row]]) : null);
      if (one) one[side === "before" ? "was" : "is"] = decision;
    }
  }
  return [...found.values()].sort((x, y) => Math.abs(y.after - y.before) - Math.abs(x.after - x.before) || y.before - x.before);
}

export interface KindTotal { kind: string; runsBefore: number; runsAfter: number; secondsBefore: number; secondsAfter: number }

/** Runs and seconds by kind of operator, in both. */
export function kindsOf(report: Report, a: RunView, b: RunView): KindTotal[] {
  const found = new Map<string, KindTotal>();
  for (const [which, run] of [["Before", a], ["After", b]] as const) {
    const { operators } = report.steps[run.step];
    const { operator, start, seconds } = run.moments;
    operator.forEach((row, k) => {
      const kind = report.words[operators.kind[row]];
      let one = found.get(kind);
      if (!one) found.set(kind, (one = { kind, runsBefore: 0, runsAfter: 0, secondsBefore: 0, secondsAfter: 0 }));
      one[`runs${which}`]++;
      if (start.length) one[`seconds${which}`] += ((k + 1 < start.length ? start[k + 1] : seconds) as number) - (start[k] as number);
    });
  }
  return [...found.values()].sort((x, y) => Math.abs(y.secondsAfter - y.secondsBefore) - Math.abs(x.secondsAfter - x.secondsBefore) || y.runsAfter - x.runsAfter);
}

export interface Node {
  path: string; label: string; depth: number; first: number; children: Node[];
  forward: number[]; backward: number[]; operator: number;
}

/** Modules as a tree in program order, with the operators of forward and of backward; operators are its leaves. */
export function moduleTree(report: Report, step: StepTables): Node {
  const { module, phase, parent, name, differentiates } = step.operators;
  const make = (path: string, label: string, depth: number, first: number): Node => ({ path, label, depth, first, children: [], forward: [], backward: [], operator: -1 });
  const root = make("", step.name || "the step", 0, 0);
  const known = new Map<string, Node>([["", root]]);
  const inside = new Map<number, Node>();
  for (let row = 0; row < name.length; row++) {
    const ahead = report.words[phase[row]] === "forward", partner = ahead ? undefined : inside.get(differentiates[row]);
    if (partner && parent[row] < 0) { // beside the operator of forward that it belongs to
      partner.backward.push(row);
      continue;
    }
    let home = root;
    if (parent[row] >= 0 && inside.has(parent[row])) home = inside.get(parent[row])!;
    const path = report.words[module[row]];
    let at = home.path;
    if (path && parent[row] < 0) {
      for (const word of path.split(/[./]/)) {
        at = at ? `${at}.${word}` : word;
        let next = known.get(at);
        if (!next) {
          known.set(at, (next = make(at, word, home.depth + 1, row)));
          home.children.push(next);
        }
        home = next;
      }
    }
    const leaf = make(`${home.path}#${row}`, report.words[name[row]], home.depth + 1, row);
    leaf.operator = row;
    (ahead ? leaf.forward : leaf.backward).push(row);
    home.children.push(leaf);
    inside.set(row, leaf);
  }
  gather(root);
  return root;
}

function gather(node: Node): void {
  for (const child of node.children) {
    gather(child);
    if (child.operator >= 0 && node.operator >= 0) continue; // what a loop or a group runs is inside of it
    for (const row of child.forward) node.forward.push(row);
    for (const row of child.backward) node.backward.push(row);
  }
}

/** The rows of a tree as they are shown, with those open that are named. */
export function shownRows(root: Node, open: ReadonlySet<string>): Node[] {
  const found: Node[] = [];
  const visit = (node: Node) => {
    for (const child of node.children) {
      found.push(child);
      if (open.has(child.path)) visit(child);
    }
  };
  visit(root);
  return found;
}

/** `Rect([0, 7], [4, 16])`, as document 002 writes it; `None` where there is none. */
export function rectText(flat: Column | null): string {
  if (!flat) return "None";
  const half = flat.length / 2;
  return `Rect([${flat.slice(0, half).join(", ")}], [${flat.slice(half).join(", ")}])`;
}

/** A part of each dimension that is shorter than the whole, from 0 to 1; a Rect of other dimensions has none. */
export function cutDims(flat: Column | null, shape: Column): { dim: number; lo: number; hi: number }[] {
  const found: { dim: number; lo: number; hi: number }[] = [];
  if (flat?.length !== 2 * shape.length) return found;
  const half = shape.length;
  for (let dim = 0; dim < half; dim++) {
    const whole = shape[dim] || 1;
    if (flat[half + dim] - flat[dim] < shape[dim]) found.push({ dim, lo: flat[dim] / whole, hi: flat[half + dim] / whole });
  }
  return found;
}

/** A row of the list of nodes: a module, or a node by its number. */
export interface NodeRow { module: string; node: number; count: number }

/** Nodes in order under their modules; those of folded modules are left out. */
export function nodeRows(modules: string[], shown: (node: number) => boolean, open: (module: string) => boolean): NodeRow[] {
  const found: NodeRow[] = [];
  let head: NodeRow | null = null;
  modules.forEach((module, node) => {
    if (!shown(node)) return;
    if (!head || head.module !== module) found.push((head = { module, node: -1, count: 0 }));
    head.count++;
    if (open(module)) found.push({ module, node, count: 1 });
  });
  return found;
}

/** Bytes that leave the device that sends most, by how they move, largest first. */
export function movedBy(report: Report, split: ShardView): [string, number][] {
  const { how, sent } = split.moves, found = new Map<string, Column>();
  how.forEach((word, k) => {
    const name = report.words[word], sums = found.get(name) ?? split.ranks.map(() => 0);
    sent[k].forEach((size, rank) => (sums[rank] += size));
    found.set(name, sums);
  });
  return [...found].map(([name, sums]): [string, number] => [name, Math.max(...sums)]).sort((a, b) => b[1] - a[1]);
}

/** The budget of a curve that is nearest to some bytes. */
export function nearest(values: Column, x: number): number {
  let best = 0;
  values.forEach((value, k) => { if (Math.abs(value - x) < Math.abs(values[best] - x)) best = k; });
  return best;
}

/** A budget as code spells it: whole MiB that are not less than what is needed. */
export function spelt(budget: number): string {
  const mib = budget / 2 ** 20;
  if (mib >= 64) return `${Math.ceil(mib)}MiB`;
  const kib = Math.ceil(budget / 1024);
  if (kib % 1024 === 0) return `${kib / 1024}MiB`;
  return kib >= 64 ? `${kib}KiB` : `${budget}`;
}
