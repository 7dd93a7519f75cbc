import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, change, count, seconds, share, tail, ticks } from "../src/format";

test("numbers are told in their units", () => {
  assert.equal(bytes(1536), "1.50 KiB");
  assert.equal(bytes(512), "512 B");
  assert.equal(bytes(null), "–");
  assert.equal(bytes(28.1 * 2 ** 20), "28.1 MiB");
  assert.equal(seconds(0.0227), "22.7 ms");
  assert.equal(seconds(12, "unit"), "12 units");
  assert.equal(seconds(0), "0 s");
  assert.equal(count(8.1e10, "FLOP/s"), "81.0 GFLOP/s");
  assert.equal(change(0.135), "+14%");
  assert.equal(change(-0.75), "−75%");
  assert.equal(share(0.0001), "<0.1%");
  assert.equal(tail("/a/long/path.py:12", 8), "…h.py:12");
});

test("ticks are round and inside", () => {
  for (const scale of ["bytes", "number", "seconds", "log"] as const) {
    for (const [low, high] of [[1, 1000], [3, 77_000_000], [0.5, 2]]) {
      const found = ticks(low, high, 6, scale);
      for (const value of found) assert.ok(value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9), `${scale} ${low} ${high} ${value}`);
      assert.ok(found.length <= 14);
    }
  }
  assert.deepEqual(ticks(0, 2 * 2 ** 20, 4, "bytes"), [0, 2 ** 19, 2 ** 20, 3 * 2 ** 19, 2 ** 21]);
  assert.deepEqual(ticks(1, 1e6, 6, "log"), [1, 100, 1e4, 1e6]);
  assert.deepEqual(ticks(5, 5, 6, "number"), []);
});
