// The first screen: memory over the step before and after, what it costs, whether gradients were compared.
import { useMemo, useState } from "preact/hooks";
import type { Shown } from "../app";
import { Swatch, momentText } from "../bits";
import { alike, type Axis, unsure, decisionsOf, extent, momentAt, place, timed } from "../data";
import { Field, marked, stepPath } from "../field";
import { bytes, change, count, seconds, share } from "../format";
import type { Report, RunView } from "../types";
import { ShardCards } from "./shards";

export function Overview(shown: Shown) {
  const { report, before, after } = shown;
  const both = before === after ? [after] : [before, after];
  const drawn = both.filter((run) => run.moments.live.length);
  const canTime = drawn.length > 0 && drawn.every(timed);
  const [axis, setAxis] = useState<Axis>("time");
  const used: Axis = canTime ? axis : "runs";
  const most = useMemo(() => Math.max(1, ...(drawn.length ? drawn : both).flatMap((run) => [run.budget_bytes && run.budget_bytes < 4 * peakOf(run) ? run.budget_bytes : 0, peakOf(run), ...(run.curve ? [maximum(run.curve.live)] : [])])) * 1.06, [before, after]);
  const split = report.shards.find((one) => report.runs[one.runs[one.runs.length - 1]] === after);
  const long = Math.max(...drawn.map((run) => extent(run, used)), 0);
  return (
    <>
      {!alike(before, after) && <p class="bad" data-other>{before.name} and {after.name} run different steps: what one takes says nothing about a plan of the other.</p>}
      {unsure(before, after) && <p class="soft" data-unsure>{(before.group ? after : before).name} does not say which step it is of: what it takes is comparable only if that is the step of {(before.group ? before : after).name}.</p>}
      {split ? <ShardCards report={report} split={split} /> : <Cards {...shown} />}
      <section>
        <div class="head">
          <h2>Live bytes over the step</h2>
          {canTime && (
            <div class="chips" role="group" aria-label="Axis">
              {(["time", "runs"] as const).map((one) => <button key={one} type="button" data-axis={one} aria-pressed={used === one} onClick={() => setAxis(one)}>{one === "time" ? "by time" : "by operator run"}</button>)}
            </div>
          )}
        </div>
        <div class="legend" hidden={!drawn.length}>
          <span><span class="swatch" style={{ background: "var(--after)", opacity: 0.6 }} />{drawn.some((run) => run.predicted?.peak_bytes != null) ? "predicted" : "tensors that are known"}</span>
          {drawn.some((run) => run.curve) && <span><span class="line" style={{ color: "var(--measured)" }} />measured, operator by operator{drawn.some((run) => run.curve && !run.curve.aligned) ? "; of eager PyTorch allocation by allocation, placed by bytes that came and went" : ""}</span>}
          {drawn.some((run) => run.measured && !run.curve) && <span><span class="line dash" style={{ color: "var(--measured)" }} />measured peak</span>}
          {after.budget_bytes !== null && <span><span class="line dash" style={{ color: "var(--budget)" }} />budget{after.budget_bytes > most ? ` ${bytes(after.budget_bytes)}, far above what is drawn` : ""}</span>}
          {drawn.some((run) => run.resident_bytes + run.beside_bytes > 0) && <span><span class="swatch" style={{ background: "var(--soft)", opacity: 0.6 }} />there throughout: parameters, inputs{drawn.some((run) => run.beside_bytes > 0) ? ", what is outside the step" : ""}</span>}
          <span class="soft">click a moment to see who is live there</span>
        </div>
        {both.map((run) => (
          <Memory key={run.name} report={report} run={run} axis={used} most={most} long={used === "time" ? long : extent(run, used)} side={run === after && both.length > 1 ? "after" : both.length > 1 ? "before" : "after"} budget={after.budget_bytes} look={shown.look} cost={report.steps[run.step]?.origin ?? ""} />
        ))}
      </section>
      <Summary {...shown} />
      <Runs report={report} />
    </>
  );
}

const maximum = (values: ArrayLike<number>) => { let most = 0; for (let k = 0; k < values.length; k++) if (values[k] > most) most = values[k]; return most; };
const peakOf = (run: RunView) => Math.max(run.predicted?.peak_bytes ?? 0, run.measured?.peak_bytes ?? 0, run.moments.live[run.moments.peak] ?? 0);
const bestPeak = (run: RunView) => run.measured?.peak_bytes ?? run.predicted?.peak_bytes ?? null;
const bestSeconds = (run: RunView, other: RunView) => (run.measured?.seconds != null && (other === run || other.measured?.seconds != null) ? run.measured.seconds : run.predicted?.seconds ?? null);

const listed = (...parts: (string | false | 0 | null | undefined)[]) => parts.filter(Boolean).join("; ");

export function Memory(props: { report: Report; run: RunView; axis: Axis; most: number; long: number; side: "before" | "after"; budget: number | null; look: Shown["look"]; cost: string }) {
  const { report, run, axis, side } = props;
  const { moments, curve } = run;
  const total = moments.live.length;
  if (!total) {
    return <div><h3>{run.name}</h3><p class="soft">{run.note ? `${run.note[0].toUpperCase()}${run.note.slice(1)}.` : "What it does over time is not known."}{bestPeak(run) === null ? "" : ` Peak: ${bytes(bestPeak(run))}.`}</p></div>;
  }
  const where = (k: number) => place(moments, k, axis), end = extent(run, axis);
  return (
    <div>
      <h3><span class="tag"><span class="swatch" style={{ background: `var(--${side})` }} />{run.name}</span> <span class="soft small">{[run.predicted?.peak_bytes != null && `predicted peak ${bytes(run.predicted.peak_bytes)}`, run.measured?.peak_bytes != null && `measured ${bytes(run.measured.peak_bytes)}`].filter(Boolean).join(", ")}</span></h3>
      <Field
        name={`memory-${side}`} height={210} label={`Live bytes of ${run.name}; the peak is ${bytes(peakOf(run))}`}
        x={{ label: axis === "time" ? (props.cost === "unit" ? "cost" : "time") : "operator runs", min: 0, max: props.long, scale: axis === "time" ? "seconds" : "whole", format: axis === "time" ? (value) => seconds(value, props.cost) : (value) => count(value) }}
        y={{ label: "live bytes", min: 0, max: props.most, scale: "bytes", format: bytes }}
        depends={[run, axis, props.budget]}
        move={(x, by) => where(Math.max(0, Math.min(total - 1, momentAt(run, x, axis) + by))) + 1e-12}
        tip={(x) => { const k = momentAt(run, Math.min(x, end), axis); return { text: momentText(report, run, k) + measuredText(run, k), x: where(k), y: moments.live[k] }; }}
        pick={(x) => props.look(side, momentAt(run, Math.min(x, end), axis))}
        draw={(pen) => {
          const { at, ink } = pen, tint = side === "before" ? ink.before : ink.after;
          const first = Math.max(0, momentAt(run, pen.from, axis)), after = Math.min(total, momentAt(run, Math.min(pen.to, end), axis) + 2);
          at.beginPath();
          at.moveTo(pen.x(where(first)), pen.y(0));
          stepPath(pen, where, (k) => moments.live[k], { count: total, end, first, after, join: true });
          at.lineTo(pen.x(after < total ? where(after) : end), pen.y(0));
          at.closePath();
          at.fillStyle = tint; at.globalAlpha = 0.45; at.fill();
          at.globalAlpha = 1;
          const base = run.resident_bytes + run.beside_bytes;
          at.fillStyle = ink.soft; at.globalAlpha = 0.35;
          at.fillRect(pen.x(0), pen.y(base), pen.x(end) - pen.x(0), pen.y(0) - pen.y(base)); at.globalAlpha = 1;
          if (curve) {
            at.beginPath();
            stepPath(pen, (k) => where(curve.at[k]), (k) => curve.live[k], { count: curve.live.length, end });
            at.strokeStyle = ink.measured; at.lineWidth = 1.2; at.stroke();
          } else if (run.measured?.peak_bytes != null) marked(pen, run.measured.peak_bytes, `measured peak ${bytes(run.measured.peak_bytes)}`, ink.measured, "left");
          if (props.budget !== null && props.budget <= props.most) marked(pen, props.budget, `budget ${bytes(props.budget)}`, ink.budget);
        }}
      />
    </div>
  );
}

function measuredText(run: RunView, k: number): string {
  if (!run.curve?.aligned) return "";
  let low = 0, high = run.curve.at.length;
  while (low < high) { const middle = (low + high) >> 1; if (run.curve.at[middle] <= k + 0.5) low = middle + 1; else high = middle; }
  return low ? ` · measured ${bytes(run.curve.live[low - 1])}` : "";
}

function Cards({ before, after, report }: Shown) {
  const several = before !== after, same = alike(before, after);
  const peak = [bestPeak(before), bestPeak(after)], time = [bestSeconds(before, after), bestSeconds(after, before)];
  // eager PyTorch was measured in turns with each plan: the pair counts, and not the first of several
  if (several && same && before.check === null && before.measured?.seconds != null && after.measured && after.eager?.seconds != null) time[0] = after.eager.seconds;
  const cost = report.steps[after.step]?.origin ?? "";
  const measuredPeaks = before.measured?.peak_bytes != null && after.measured?.peak_bytes != null;
  const measuredTimes = before.measured?.seconds != null && after.measured?.seconds != null;
  const check = after.check;
  const fits = after.budget_bytes !== null && peak[1] !== null ? peak[1] <= after.budget_bytes : null;
  return (
    <div class="cards">
      <div class="card" data-card="peak">
        <div class="what">Peak memory, {after.measured?.peak_bytes != null ? (measuredPeaks || !several ? "measured" : "predicted, then measured") : "predicted"}</div>
        <div class="big">{several ? `${bytes(peak[0])} → ${bytes(peak[1])}` : bytes(peak[1])}</div>
        <div class="what">{listed(several && same && peak[0] && peak[1] !== null && change(peak[1] / peak[0] - 1), after.measured?.peak_bytes && after.predicted?.peak_bytes != null && `predicted ${bytes(after.predicted.peak_bytes)}, off by ${share(Math.abs(after.predicted.peak_bytes / after.measured.peak_bytes - 1))}`)}</div>
      </div>
      <div class="card" data-card="budget">
        <div class="what">Budget</div>
        <div class="big">{after.budget_bytes === null ? "none" : bytes(after.budget_bytes)}</div>
        <div class="what">{fits === null ? (after.proof ? "" : "no plan is shown") : fits ? <span class="good">✓ the peak stays inside</span> : <span class="bad">✗ the peak is above it</span>}</div>
      </div>
      <div class="card" data-card="time">
        <div class="what">Time of a step, {measuredTimes || (!several && after.measured?.seconds != null) ? "measured" : cost === "measured" ? "sum of measured operators" : cost ? `${cost} costs` : "predicted"}</div>
        <div class="big">{several ? `${seconds(time[0], cost)} → ${seconds(time[1], cost)}` : seconds(time[1], cost)}</div>
        <div class="what">{listed(several && same && time[0] && time[1] !== null && change(time[1] / time[0] - 1), after.proof && (measuredTimes || !several) && `predicted ${change(after.proof.overhead)}`, after.proof && after.proof.bound_overhead !== null && `${measuredTimes ? "none predicted" : "no plan"} below ${change(after.proof.bound_overhead)}`)}</div>
      </div>
      <div class="card" data-card="gradients">
        <div class="what">Loss, gradients, buffers</div>
        <div class="big">{check ? (check.bitwise ? <span class="good">bitwise equal</span> : check.difference === null ? <span class="bad">differ</span> : `within ${check.difference.toExponential(0)}`) : "not compared"}</div>
        <div class="what">{check ? "compared with eager PyTorch" : after.proof && after.measured ? "eager PyTorch ran out of memory" : <><code>lowtide run</code> compares them</>}</div>
      </div>
    </div>
  );
}

function Summary({ report, after, go }: Shown) {
  const decided = useMemo(() => {
    const found = new Map<string, { count: number; bytes: number; price: number }>();
    const sizes = report.steps[after.step].tensors.bytes;
    for (const [row, one] of decisionsOf(report, after)) {
      const sum = found.get(one.decision) ?? { count: 0, bytes: 0, price: 0 };
      sum.count++; sum.bytes += sizes[row]; sum.price += one.price ?? 0;
      found.set(one.decision, sum);
    }
    return found;
  }, [after]);
  if (!decided.size) return null;
  const cost = report.steps[after.step].origin, total = after.predicted?.seconds ?? 0;
  const order = ["kept", "recomputed", "offloaded", "tiled", "fused", "in place"].filter((name) => decided.has(name));
  return (
    <section>
      <h2>What the plan does with tensors</h2>
      <div class="legend">
        {order.map((name) => {
          const one = decided.get(name)!;
          return <span key={name}><Swatch of={name} />{one.count.toLocaleString("en")} {name} ({bytes(one.bytes)}{one.price > 0 ? `, ${seconds(one.price, cost)}${total ? ` or ${share(one.price / total)} of the step` : ""}` : ""})</span>;
        })}
      </div>
      {after.proof?.decisions && <p>{after.proof.decisions}.</p>}
      <p><button type="button" onClick={() => go("decisions")}>Each tensor, with the reason</button> <button type="button" onClick={() => go("peak")}>Who is live at the peak</button></p>
    </section>
  );
}

function Runs({ report }: { report: Report }) {
  if (report.runs.length < 2) return null;
  return (
    <section>
      <h2>Ways to run the step</h2>
      <div class="over">
        <table class="plain" data-table="runs">
          <thead><tr><th>way</th><th class="right">budget</th><th class="right">predicted peak</th><th class="right">measured peak</th><th class="right">predicted time</th><th class="right">measured time</th><th>loss, gradients, buffers</th></tr></thead>
          <tbody>{report.runs.map((run, k) => {
            const cost = report.steps[run.step]?.origin ?? "";
            return (
              <tr key={k}>
                <td>{run.name}{run.note && <div class="soft small">{run.note}</div>}</td><td class="right">{bytes(run.budget_bytes)}</td>
                <td class="right soft">{bytes(run.predicted?.peak_bytes)}</td><td class="right">{bytes(run.measured?.peak_bytes)}</td>
                <td class="right soft">{seconds(run.predicted?.seconds, cost)}</td><td class="right">{seconds(run.measured?.seconds)}</td>
                <td>{run.check ? (run.check.bitwise ? "bitwise equal" : run.check.difference === null ? "differ" : `within ${run.check.difference.toExponential(0)}`) : "–"}</td>
              </tr>
            );
          })}</tbody>
        </table>
      </div>
    </section>
  );
}
