// Live bytes by category over the step.
import { useMemo, useState } from "preact/hooks";
import type { Shown } from "../app";
import { Missing, Swatch, momentText } from "../bits";
import { type By, extent, momentAt, place, stacked, timed } from "../data";
import { Field, stepPath } from "../field";
import { bytes, count, seconds, share } from "../format";
import { colour } from "../theme";

const WORDS: Record<By, string> = { role: "role", module: "module", phase: "phase", annotation: "annotation", decision: "decision" };

export function Categories(shown: Shown) {
  const { report, run, which, look } = shown;
  const [by, setBy] = useState<By>("role");
  const [depth, setDepth] = useState(1);
  const step = report.steps[run.step];
  const annotated = useMemo(() => step.operators.annotation.some((word) => word > 0), [step]);
  const stack = useMemo(() => (run.moments.live.length ? stacked(report, run, by, depth) : { names: [], layers: [] }), [run, by, depth]);
  const { moments } = run, total = moments.live.length;
  const tops = useMemo(() => {
    const found: Float64Array[] = [];
    for (const layer of stack.layers) found.push(found.length ? layer.map((size, k) => size + found[found.length - 1][k]) : layer);
    return found;
  }, [stack]);
  if (!total) return <Missing>Live bytes over time are not known of {run.name}.</Missing>;
  const axis = timed(run) ? "time" : "runs", end = extent(run, axis), where = (k: number) => place(moments, k, axis);
  const names = (["role", "module", "phase", ...(run.decisions ? ["decision"] : []), ...(annotated ? ["annotation"] : [])] as By[]);
  const most = Math.max(moments.live[moments.peak], 1) * 1.06;
  return (
    <section>
      <h2>Live bytes by {WORDS[by]}</h2>
      <div class="chips" role="group" aria-label="Categories">
        {names.map((name) => <button key={name} type="button" data-by={name} aria-pressed={by === name} onClick={() => setBy(name)}>{WORDS[name]}</button>)}
        {by === "module" && <label class="tag">depth <input type="range" min={1} max={5} value={depth} style={{ width: "90px" }} onInput={(event) => setDepth(Number(event.currentTarget.value))} /> {depth}</label>}
      </div>
      <Field
        name="categories" height={300} label={`Live bytes of ${run.name} by ${WORDS[by]}`}
        x={{ label: axis === "time" ? "time" : "operator runs", min: 0, max: end, scale: axis === "time" ? "seconds" : "whole", format: axis === "time" ? (value) => seconds(value, step.origin) : (value) => count(value) }}
        y={{ label: "live bytes", min: 0, max: most, scale: "bytes", format: bytes }}
        depends={[stack, tops]}
        move={(x, steps) => where(Math.max(0, Math.min(total - 1, momentAt(run, x, axis) + steps))) + 1e-12}
        pick={(x) => look(which, momentAt(run, x, axis))}
        tip={(x, y) => {
          const k = momentAt(run, x, axis), layer = tops.findIndex((top) => y <= top[k]);
          const what = layer >= 0 ? `${stack.names[layer]}: ${bytes(stack.layers[layer][k])} of ` : "";
          return { text: what + momentText(report, run, k), x: where(k), y: layer >= 0 ? tops[layer][k] : moments.live[k] };
        }}
        draw={(pen) => {
          const first = momentAt(run, pen.from, axis), after = Math.min(total, momentAt(run, pen.to, axis) + 2);
          for (let n = tops.length - 1; n >= 0; n--) {
            pen.at.beginPath();
            pen.at.moveTo(pen.x(where(first)), pen.y(0));
            stepPath(pen, where, (k) => tops[n][k], { count: total, end, first, after, join: true });
            pen.at.lineTo(pen.x(after < total ? where(after) : end), pen.y(0));
            pen.at.closePath();
            pen.at.fillStyle = colour(stack.names[n], n);
            pen.at.fill();
          }
        }}
      />
      <h3>At the peak</h3>
      <div class="legend" data-legend="categories">
        {stack.names.map((name, n) => ({ name, n, size: stack.layers[n][moments.peak] })).sort((a, b) => b.size - a.size).map(({ name, n, size }) => (
          <span key={name}><Swatch of={name} number={n} /><b>{name}</b> {bytes(size)} ({share(size / moments.live[moments.peak])})</span>
        ))}
      </div>
    </section>
  );
}
