// Compute, communication and copy lanes over time.
import { useMemo } from "preact/hooks";
import type { Shown } from "../app";
import { Missing, Phases } from "../bits";
import { bisect } from "../data";
import { Field } from "../field";
import { bytes, seconds } from "../format";
import { colour } from "../theme";

/** What the lane of exchanges and sums is called. */
const TALKS = "communication";

interface Row { name: string; measured: boolean; start: ArrayLike<number>; end: ArrayLike<number>; text: (k: number) => string; tint: (k: number) => string }

export function Lanes({ report, run }: Shown) {
  const step = report.steps[run.step], { operators, tensors } = step, words = report.words;
  const rows = useMemo(() => {
    const found: Row[] = [];
    const phaseTint = (row: number) => colour(words[operators.phase[row]], 0);
    const { moments } = run;
    const moving = (row: number) => `${words[operators.module[row]] ? ` · for ${words[operators.module[row]]}` : ""} · ${bytes(tensors.bytes[operators.outputs[row][0]])} here afterwards`;
    if (moments.start.length && !run.lanes.some((lane) => lane.measured)) {
      const start = moments.start as number[], end = [...start.slice(1), moments.seconds ?? 0];
      const talks = new Set(run.lanes.filter((lane) => lane.name === TALKS).flatMap((lane) => lane.row));
      const own = start.map((_, k) => k).filter((k) => !talks.has(moments.operator[k])), at = (n: number) => own[n];
      found.push({
        name: "compute", measured: false, start: own.map((k) => start[k]), end: own.map((k) => end[k]),
        text: (n) => `${words[operators.name[moments.operator[at(n)]]]} · ${words[operators.kind[moments.operator[at(n)]]]} · ${words[operators.phase[moments.operator[at(n)]]]}${moments.again[at(n)] ? " · run again" : ""}${moments.tile.length && moments.tile[at(n)] >= 0 ? ` · tile ${moments.tile[at(n)] + 1}` : ""}`,
        tint: (n) => (moments.again[at(n)] ? colour("recomputed", 0) : phaseTint(moments.operator[at(n)])),
      });
    }
    for (const lane of run.lanes) {
      found.push({
        name: lane.name, measured: lane.measured, start: lane.start as number[], end: lane.end as number[],
        text: (k) => (lane.what === "operator" ? `${words[operators.name[lane.row[k]]]} · ${words[operators.phase[lane.row[k]]]}${lane.name === TALKS ? moving(lane.row[k]) : ""}` : `${words[tensors.name[lane.row[k]]]} · ${bytes(tensors.bytes[lane.row[k]])}`),
        tint: (k) => (lane.name === TALKS ? colour(TALKS, 0) : lane.what === "operator" ? phaseTint(lane.row[k]) : colour(lane.name.includes("waits") ? "gradient" : "offloaded", 0)),
      });
    }
    return found;
  }, [run]);
  if (!rows.length) return <Missing>No times are known of {run.name}.</Missing>;
  const end = Math.max(...rows.map((row) => Math.max(...[row.end[row.end.length - 1] ?? 0])), run.moments.seconds ?? 0);
  const lengths = rows.map((row) => { let sum = 0; for (let k = 0; k < row.start.length; k++) sum += row.end[k] - row.start[k]; return sum; });
  return (
    <section>
      <h2>Lanes over time</h2>
      <div class="legend">
        <Phases report={report} run={run} />
        {[...(run.moments.again.includes(1) ? [["recomputed", "run again"]] : []), ...(run.lanes.some((lane) => lane.name === TALKS) ? [[TALKS, "exchanges and sums between devices"]] : []), ...(run.lanes.some((lane) => lane.what === "tensor") ? [["offloaded", "copies"]] : [])].map(([of, text]) => <span key={of}><span class="swatch" style={{ background: colour(of, 0) }} />{text}</span>)}
        <span class="soft">drag over a part to zoom in</span>
      </div>
      <Field
        name="lanes" height={70 + rows.length * 62} flip label={`What ${rows.map((row) => row.name).join(", ")} do over ${seconds(end, step.origin)}`}
        x={{ label: step.origin === "unit" ? "cost" : "time", min: 0, max: end || 1, scale: "seconds", format: (value) => seconds(value, step.origin) }}
        y={{ label: "", min: 0, max: rows.length, scale: "number", format: () => "" }}
        depends={[rows]}
        tip={(x, y) => {
          const row = rows[Math.max(0, Math.min(rows.length - 1, Math.floor(y)))], k = bisect(row.start, x) - 1;
          if (k < 0 || row.end[k] < x) return { text: `${row.name}: idle at ${seconds(x, step.origin)}` };
          return { text: `${row.text(k)} · ${seconds(row.end[k] - row.start[k], step.origin)} from ${seconds(row.start[k], step.origin)}` };
        }}
        draw={(pen) => {
          const { at, ink } = pen;
          rows.forEach((row, n) => {
            const y = pen.y(n) + 22, h = Math.max(8, pen.y(n + 1) - pen.y(n) - 28);
            const first = Math.max(0, bisect(row.start, pen.from) - 1);
            let last = -1e9, tint = "";
            for (let k = first; k < row.start.length && row.start[k] <= pen.to; k++) {
              const x = pen.x(row.start[k]), right = pen.x(row.end[k]), paint = row.tint(k);
              if (right - last < 0.5 && paint === tint) continue;
              at.fillStyle = tint = paint;
              at.fillRect(x, y, Math.max(0.6, right - x - (right - x > 4 ? 0.5 : 0)), h);
              last = right;
            }
            at.fillStyle = ink.text; at.textAlign = "left"; at.font = "12px system-ui, sans-serif";
            at.fillText(`${row.name}${row.measured ? " (measured)" : ""}: busy ${seconds(lengths[n], step.origin)}`, pen.left + 6, pen.y(n) + 16);
          });
        }}
      />
    </section>
  );
}
