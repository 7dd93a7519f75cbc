// What every budget costs in time, with the bound and the planners of others; pick one and copy the line of code.
import { useState } from "preact/hooks";
import type { Shown } from "../app";
import { Code } from "../bits";
import { nearest, spelt } from "../data";
import { Field } from "../field";
import { bytes, change, seconds, share } from "../format";
import { PALETTE } from "../theme";

export function Tradeoff({ report, after }: Shown) {
  const curve = report.tradeoff!;
  const start = after?.budget_bytes ?? curve.budget_bytes[Math.floor(curve.budget_bytes.length / 2)];
  const [picked, setPicked] = useState(nearest(curve.budget_bytes, start));
  const left = Math.min(curve.floor_bytes || Infinity, curve.smallest_bytes, ...curve.peak_bytes) * 0.92;
  const times = [...curve.seconds, curve.plain_seconds, ...curve.rivals.flatMap((one) => one.seconds)];
  const high = Math.max(...curve.seconds.map((value) => value * 1.25), Math.min(Math.max(...times) * 1.03, Math.max(...curve.seconds) * 1.6));
  const low = Math.min(...times, ...(curve.bound_seconds.filter((value) => value !== null) as number[]));
  const floor = low - (high - low) * 0.08;
  const points = curve.budget_bytes.map((budget, k) => ({ what: "Lowtide", x: budget, y: curve.seconds[k], k }));
  const others = curve.rivals.flatMap((one) => one.peak_bytes.map((peak, k) => ({ what: one.name, x: peak, y: one.seconds[k], k: -1 })));
  const over = (value: number) => change(value / curve.plain_seconds - 1);
  const budget = curve.budget_bytes[picked], text = spelt(budget);
  const target = report.target || "train.py:step";
  const quoted = /^[\w.,:=/-]+$/.test(target) ? target : `'${target.replaceAll("'", "'\\''")}'`;
  return (
    <section>
      <h2>What every budget costs in time</h2>
      <div class="legend">
        <span><span class="swatch" style={{ background: "var(--after)" }} />plans of Lowtide</span>
        {curve.bound_seconds.some((value) => value !== null) && <span><span class="line dash" style={{ color: "var(--soft)" }} />no plan is faster (proven bound)</span>}
        {curve.rivals.map((one, k) => <span key={one.name}><span class="swatch" style={{ background: PALETTE[(k + 1) % PALETTE.length], borderRadius: "50%" }} />{one.name}</span>)}
        {curve.floor_bytes > 0 && <span><span class="line" style={{ color: "var(--budget)" }} />no plan exists to the left</span>}
      </div>
      <Field
        name="tradeoff" height={340} zooms={false} label={`Time of a step for ${curve.budget_bytes.length} budgets from ${bytes(Math.min(...curve.budget_bytes))} to ${bytes(Math.max(...curve.budget_bytes))}`}
        x={{ label: "budget", min: left, max: Math.max(curve.plain_bytes, ...curve.budget_bytes) * 1.03, scale: "bytes", format: bytes }}
        y={{ label: "time of a step", min: floor, max: high, scale: "seconds", format: (value) => seconds(value, curve.cost) }}
        depends={[picked]}
        move={(x, by) => { const k = nearest(curve.budget_bytes, x), next = Math.max(0, Math.min(curve.budget_bytes.length - 1, k - Math.sign(by))); setPicked(next); return curve.budget_bytes[next]; }}
        pick={(x) => setPicked(nearest(curve.budget_bytes, x))}
        tip={(x, y, near) => {
          const distance = (one: { x: number; y: number }) => ((one.x - x) / near.x) ** 2 + ((one.y - y) / near.y) ** 2;
          const best = [...points, ...others].reduce((a, b) => (distance(b) < distance(a) ? b : a));
          return { text: `${best.what}: ${bytes(best.x)} (${share(best.x / curve.plain_bytes)} of the plain peak) in ${seconds(best.y, curve.cost)}, ${over(best.y)}`, x: best.x, y: best.y };
        }}
        draw={(pen) => {
          const { at, ink } = pen;
          at.lineWidth = 1.5;
          if (curve.floor_bytes > 0) { at.strokeStyle = ink.budget; at.beginPath(); at.moveTo(pen.x(curve.floor_bytes), pen.top); at.lineTo(pen.x(curve.floor_bytes), pen.top + pen.height); at.stroke(); }
          const bound = curve.budget_bytes.map((x, k) => [x, curve.bound_seconds[k]] as const).filter((one) => one[1] !== null);
          at.strokeStyle = ink.soft; at.setLineDash([5, 4]); at.beginPath();
          bound.forEach(([x, y], k) => (k ? at.lineTo(pen.x(x), pen.y(y!)) : at.moveTo(pen.x(x), pen.y(y!)))); at.stroke(); at.setLineDash([]);
          curve.rivals.forEach((one, n) => {
            at.fillStyle = PALETTE[(n + 1) % PALETTE.length];
            one.peak_bytes.forEach((x, k) => { at.beginPath(); at.arc(pen.x(x), pen.y(one.seconds[k]), 4, 0, 7); at.fill(); });
          });
          at.strokeStyle = at.fillStyle = ink.after; at.lineWidth = 2; at.beginPath();
          points.forEach((one, k) => (k ? at.lineTo(pen.x(one.x), pen.y(one.y)) : at.moveTo(pen.x(one.x), pen.y(one.y)))); at.stroke();
          for (const one of points) { at.beginPath(); at.rect(pen.x(one.x) - 3, pen.y(one.y) - 3, 6, 6); at.fill(); }
          at.strokeStyle = ink.text; at.beginPath(); at.arc(pen.x(budget), pen.y(curve.seconds[picked]), 8, 0, 7); at.stroke();
        }}
      />
      <label>Pick a budget: <b data-picked={budget}>{bytes(budget)}</b>, {share(budget / curve.plain_bytes)} of the plain peak
        <input type="range" min={0} max={curve.budget_bytes.length - 1} value={curve.budget_bytes.length - 1 - picked} onInput={(event) => setPicked(curve.budget_bytes.length - 1 - Number(event.currentTarget.value))} aria-label="Budget" />
      </label>
      <p>The plan takes {bytes(curve.peak_bytes[picked])} and {seconds(curve.seconds[picked], curve.cost)} ({over(curve.seconds[picked])}){curve.bound_seconds[picked] !== null ? `; no plan takes less than ${seconds(curve.bound_seconds[picked], curve.cost)} (${over(curve.bound_seconds[picked]!)})` : ""}.</p>
      <Code name="python" text={`step = lowtide.fit(loss_of, model, batch, budget="${text}")`} />
      <Code name="command" text={`lowtide run ${quoted} --budget ${text}`} />
      {curve.budget_bytes.length < 3 && <><p>Only {curve.budget_bytes.length === 1 ? "one budget is" : "two budgets are"} known. For all of them, give this file to <code>lowtide report</code> as well:</p><Code name="sweep" text={`lowtide plan ${quoted} --sweep -o sweep.json`} /></>}
      <p class="soft small">Plain: {bytes(curve.plain_bytes)} in {seconds(curve.plain_seconds, curve.cost)}. Smallest budget with a known plan: {bytes(curve.smallest_bytes)}{curve.floor_bytes ? `; none exists below ${bytes(curve.floor_bytes)}` : ""}. {curve.words && `${curve.words[0].toUpperCase()}${curve.words.slice(1)}. `}Costs are {curve.cost}; rivals are planned with the same costs.</p>
    </section>
  );
}
