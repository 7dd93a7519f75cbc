import assert from "node:assert/strict";
import { test } from "node:test";
import { alike, bisect, categoryOf, cutDims, difference, firstPair, kindsOf, liveAt, moduleTree, momentAt, movedBy, nearest, nodeRows, place, rectText, shownRows, spelt, stacked, unsure } from "../src/data";
import type { Report, ShardView } from "../src/types";

// Two operators: `a` (forward, module m.x) makes tensor 1 from leaf 0; `b` (backward) makes tensor 2 and needs a workspace.
const words = ["", "a", "b", "m.x", "forward", "backward", "parameter", "activation", "leaf0", "t1", "t2", "tensor", "workspace", "relu", "file.py:1", "recomputed", "why"];
const w = (text: string) => words.indexOf(text);
const report: Report = {
  title: "", about: "", words, target: "", tradeoff: null, limits: null, shards: [], notes: [], made_by: "", lowtide: "report", version: 1,
  steps: [{
    name: "step", origin: "measured", operators_in_all: 2,
    operators: {
      name: [w("a"), w("b")], kind: [w("relu"), w("relu")], module: [w("m.x"), w("m.x")], phase: [w("forward"), w("backward")], source: [w("file.py:1"), 0], annotation: [0, 0],
      parent: [-1, -1], differentiates: [-1, 0], inputs: [[0], [1]], outputs: [[1], [2]], seconds: [1, 2], flop: [null, null], counted: [0, 0], moved: [null, null],
    },
    tensors: { name: [w("leaf0"), w("t1"), w("t2")], role: [w("parameter"), w("activation"), w("activation")], shape: [0, 0, 0], source: [0, 0, 0], module: [0, w("m.x"), w("m.x")], maker: [-1, 0, 1], owner: [0, 1, 2], bytes: [100, 40, 8] },
  }],
  runs: [{
    name: "one", step: 0, group: 1, note: "", budget_bytes: null, predicted: null, measured: null, eager: null, resident_bytes: 100, beside_bytes: 0, leaves: [0],
    moments: { operator: [0, 1], live: [140, 153], event: [0, 1], start: [0, 1], again: [0, 0], tile: [], seconds: 3, in_all: 2, peak: 1 },
    curve: null, layout: null, lanes: [], check: null, loops: [], proof: null,
    decisions: { tensor: [1], decision: [w("recomputed")], reason: [w("why")], price: [1], instead: [1], in_all: 1 },
    blocks: { tensor: [1, 2, -1], operator: [0, 1, 1], use: [w("tensor"), w("tensor"), w("workspace")], bytes: [40, 8, 5], birth: [0, 1, 1], death: [2, 2, 2], offset: [], in_all: 3, bytes_left_out: 0, events: 2 },
  }],
};
const run = report.runs[0];

test("the last way is shown beside the first of its step", () => {
  const of = (...groups: number[]) => groups.map((group) => ({ ...run, group }));
  assert.deepEqual(firstPair(of(1, 1, 2, 2, 2)), [2, 4]);
  assert.deepEqual(firstPair(of(1, 1, 1)), [0, 2]);
  assert.deepEqual(firstPair(of(1, 2)), [0, 1]);
  assert.deepEqual(firstPair(of(1, 0)), [0, 1]);
  assert.deepEqual(firstPair(of(0, 1, 1)), [1, 2]); // a way that does not say what it is of comes second
  assert.deepEqual(firstPair(of(1)), [0, 0]);
  assert.deepEqual(firstPair([]), [0, 0]);
  const planned = { ...run, group: 1, proof: {} } as unknown as typeof run;
  assert.deepEqual(firstPair([...of(1), planned, ...of(1)]), [0, 1]);
  const [a, b, c] = of(1, 2, 0);
  assert.ok(!alike(a, b) && alike(a, c) && alike(a, a));
  assert.ok(unsure(a, c) && unsure(c, a) && !unsure(a, b) && !unsure(c, c));
});

test("bisect counts what is not larger", () => {
  assert.equal(bisect([1, 2, 2, 3], 2), 3);
  assert.equal(bisect([1, 2, 2, 3], 0), 0);
  assert.equal(bisect([], 5), 0);
});

test("moments are found by time and by number", () => {
  assert.equal(momentAt(run, 0.5, "time"), 0);
  assert.equal(momentAt(run, 1, "time"), 1);
  assert.equal(momentAt(run, 99, "time"), 1);
  assert.equal(momentAt(run, 1.7, "runs"), 1);
  assert.equal(place(run.moments, 1.5, "time"), 2);
  assert.equal(place(run.moments, 2, "time"), 3);
});

test("who is live adds up to the bytes of the moment", () => {
  for (const k of [0, 1]) {
    const live = liveAt(report, run, run.moments.event[k]);
    assert.equal(live.reduce((sum, one) => sum + one.bytes, 0), run.moments.live[k]);
  }
  assert.deepEqual(liveAt(report, run, 1).map((one) => one.bytes), [100, 40, 8, 5]);
});

test("categories add up at every moment", () => {
  for (const by of ["role", "module", "phase", "annotation", "decision"] as const) {
    const { layers } = stacked(report, run, by, 1);
    run.moments.live.forEach((live, k) => assert.equal(layers.reduce((sum, layer) => sum + layer[k], 0), live, by));
  }
  const few = stacked(report, run, "role", 1, 2);
  assert.equal(few.names.length, 2);
  assert.ok(few.names.some((name) => /others$/.test(name)));
  assert.equal(stacked(report, run, "role", 1).names[0], "parameter");
});

test("a category says what a block is", () => {
  const role = categoryOf(report, run, "role", 1), live = liveAt(report, run, 1);
  assert.deepEqual(live.map(role), ["parameter", "activation", "made by backward", "workspace"]);
  assert.deepEqual(live.map(categoryOf(report, run, "decision", 1)), ["resident", "recomputed", "temporary", "workspace"]);
  assert.deepEqual(live.map(categoryOf(report, run, "module", 1))[1], "m");
});

test("two runs differ by what is live at their peaks", () => {
  const other = { ...run, blocks: { ...run.blocks, bytes: [40, 0, 5] } };
  const found = difference(report, run, other);
  assert.equal(found.find((one) => one.name === "t2")!.after, 0);
  assert.equal(found.find((one) => one.name === "t2")!.before, 8);
  assert.equal(found[0].name, "t2");
  const [kind] = kindsOf(report, run, run);
  assert.deepEqual([kind.kind, kind.runsBefore, kind.secondsAfter], ["relu", 2, 3]);
});

test("modules are a tree, with backward beside forward", () => {
  const tree = moduleTree(report, report.steps[0]);
  assert.deepEqual(shownRows(tree, new Set()).map((node) => node.label), ["m"]);
  const rows = shownRows(tree, new Set(["m", "m.x"]));
  assert.deepEqual(rows.map((node) => node.label), ["m", "x", "a"]);
  assert.deepEqual(rows[0].backward, [1]);
  assert.deepEqual(rows[2].backward, [1]);
});

test("budgets are spelt so that they are not too small", () => {
  assert.equal(spelt(100 * 2 ** 20), "100MiB");
  assert.equal(spelt(100 * 2 ** 20 + 1), "101MiB");
  assert.equal(spelt(5_000_000), "4883KiB");
  assert.equal(spelt(24 * 2 ** 20), "24MiB");
  assert.equal(spelt(100), "100");
  assert.equal(nearest([100, 50, 10], 58), 1);
});

test("a Rect is written as document 002 writes it", () => {
  assert.equal(rectText([0, 7, 4, 16]), "Rect([0, 7], [4, 16])");
  assert.equal(rectText([]), "Rect([], [])");
  assert.equal(rectText(null), "None");
});

test("only dimensions that are cut have a bar", () => {
  assert.deepEqual(cutDims([0, 8, 4, 16], [4, 16]), [{ dim: 1, lo: 0.5, hi: 1 }]);
  assert.deepEqual(cutDims([0, 0, 4, 16], [4, 16]), []);
  assert.deepEqual(cutDims(null, [4, 16]), []);
  assert.deepEqual(cutDims([0, 8], [4, 16]), []);
});

test("nodes stand under their modules, and folded ones are left out", () => {
  const rows = nodeRows(["a", "a", "b", "a"], (k) => k !== 1, (module) => module !== "b");
  assert.deepEqual(rows, [
    { module: "a", node: -1, count: 1 }, { module: "a", node: 0, count: 1 }, { module: "b", node: -1, count: 1 },
    { module: "a", node: -1, count: 1 }, { module: "a", node: 3, count: 1 },
  ]);
});

test("what moves is added up for each device, and the largest counts", () => {
  const split = { ranks: [0, 3], moves: { how: [1, 2, 1], sent: [[1, 5], [2, 2], [3, 0]] } } as unknown as ShardView;
  assert.deepEqual(movedBy(report, split), [["a", 5], ["b", 2]]);
});
