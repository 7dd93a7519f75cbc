// Operators with achieved FLOP/s and bytes/s, against what the device does at most.
import { useMemo } from "preact/hooks";
import type { Shown } from "../app";
import { Phases, Tag } from "../bits";
import { bisect } from "../data";
import { Field } from "../field";
import { count, seconds, share, tail } from "../format";
import { Table } from "../table";
import { colour } from "../theme";

export function Operators({ report, run }: Shown) {
  const step = report.steps[run.step], { operators, tensors } = step, words = report.words, limits = report.limits, cost = step.origin;
  const rows = useMemo(() => {
    const runs = new Int32Array(operators.name.length);
    for (const row of run.moments.operator) runs[row]++;
    return operators.name.map((name, k) => {
      const time = operators.seconds[k], flop = operators.flop[k], moved = operators.moved[k];
      const useful = cost !== "unit" && time !== null && time > 0;
      const type = words[tensors.shape[operators.outputs[k][0]] ?? 0]?.split(" ").pop() ?? "";
      const rate = useful && flop ? flop / time! : null, traffic = useful && moved ? moved / time! : null;
      const top = limits ? limits.flop_per_second[type] ?? limits.flop_per_second.float32 : null;
      const used = limits && useful ? Math.max(top && rate && operators.counted[k] ? rate / top : 0, traffic ? traffic / limits.bytes_per_second : 0) : null;
      return {
        name: words[name], kind: words[operators.kind[k]], module: words[operators.module[k]], phase: words[operators.phase[k]], source: words[operators.source[k]],
        runs: runs[k], seconds: time, spent: time === null ? null : time * Math.max(1, runs[k]), flop, moved, rate, traffic, used, counted: operators.counted[k] === 1,
        intensity: flop && moved ? flop / moved : null,
      };
    });
  }, [run]);
  const points = useMemo(() => rows.filter((row) => row.rate && row.intensity && row.counted).sort((a, b) => a.intensity! - b.intensity!), [rows]);
  const places = useMemo(() => Float64Array.from(points, (row) => Math.log10(row.intensity!)), [points]);
  const peak = limits ? Math.max(...Object.values(limits.flop_per_second)) : 0;
  const low = Math.min(...points.map((row) => row.rate!)), high = Math.max(peak, ...points.map((row) => row.rate!));
  const left = Math.min(...points.map((row) => row.intensity!)), right = Math.max(...points.map((row) => row.intensity!), limits ? peak / limits.bytes_per_second : 0);
  return (
    <>
      {points.length > 0 && (
        <section>
          <h2>Roofline</h2>
          <p class="soft">{limits ? `${limits.name}: ${Object.entries(limits.flop_per_second).map(([type, rate]) => `${count(rate, "FLOP/s")} in ${type}`).join(", ")}; ${count(limits.bytes_per_second, "B/s")}, as measured.` : <>The limits of the device are not known: run <code>lowtide doctor</code> on the machine of the profile or of the run, and make this page there again. A plan alone does not say which machine that is: give its run or the profile as well.</>} Times are {cost || "not known"}. Only operators whose FLOP are counted are drawn.</p>
          <div class="legend"><Phases report={report} run={run} /></div>
          <Field
            name="roofline" height={330} zooms={false} label={`FLOP per second of ${points.length} operators by FLOP per byte`}
            x={{ label: "FLOP per byte moved", min: left / 1.8, max: right * 2.5, scale: "log", format: (value) => count(value) }}
            y={{ label: "FLOP/s", min: low / 2.5, max: high * 2, scale: "log", format: (value) => count(value) }}
            depends={[points, limits]}
            tip={(x, y) => {
              const middle = bisect(places, Math.log10(x));
              let best = -1, nearest = Infinity;
              for (let k = Math.max(0, middle - 400); k < Math.min(points.length, middle + 400); k++) {
                const distance = Math.hypot(places[k] - Math.log10(x), (Math.log10(points[k].rate!) - Math.log10(y)) * 0.7);
                if (distance < nearest) { nearest = distance; best = k; }
              }
              if (best < 0) return null;
              const row = points[best];
              return { text: `${row.name} (${row.kind}) · ${count(row.rate, "FLOP/s")} · ${count(row.traffic, "B/s")}${row.used !== null ? ` · ${share(row.used)} of the limit` : ""} · ${seconds(row.seconds, cost)}`, x: row.intensity!, y: row.rate! };
            }}
            draw={(pen) => {
              const { at, ink } = pen;
              if (limits) {
                at.lineWidth = 1.5;
                let above = -Infinity, end = 0;
                for (const [type, rate] of Object.entries(limits.flop_per_second).sort((a, b) => b[1] - a[1])) {
                  const ridge = rate / limits.bytes_per_second;
                  at.strokeStyle = ink.budget; at.beginPath();
                  at.moveTo(pen.x(left / 1.8), pen.y((left / 1.8) * limits.bytes_per_second)); at.lineTo(pen.x(ridge), pen.y(rate)); at.lineTo(pen.x(right * 2.5), pen.y(rate)); at.stroke();
                  at.fillStyle = ink.soft; at.font = "12px system-ui, sans-serif"; at.textAlign = "right";
                  const words = `${type} ${count(rate, "FLOP/s")}`, y = pen.y(rate) - 5;
                  if (y - above > 14) { above = y; end = pen.left + pen.width - 6; } // else beside the one before, not over it
                  at.fillText(words, end, y);
                  end -= at.measureText(words).width + 14;
                }
              }
              for (const row of points) {
                at.fillStyle = colour(row.phase, 0); at.globalAlpha = 0.75;
                at.beginPath(); at.arc(pen.x(row.intensity!), pen.y(row.rate!), 3.6, 0, 7); at.fill();
              }
              at.globalAlpha = 1;
            }}
          />
        </section>
      )}
      <section>
        <h2>Operators</h2>
        <Table
          name="operators" label="operators" rows={rows} sort={rows.some((row) => row.seconds) ? 3 : 5} text={(row) => `${row.name} ${row.kind} ${row.module} ${row.source} ${row.phase}`}
          columns={[
            { title: "operator", key: (row) => row.name },
            { title: "kind", key: (row) => row.kind },
            { title: "phase", key: (row) => row.phase, show: (row) => <Tag of={row.phase} /> },
            { title: "time", key: (row) => row.spent, show: (row) => seconds(row.spent, cost), right: true, help: "Of all its runs" },
            { title: "runs", key: (row) => row.runs, right: true },
            { title: "FLOP", key: (row) => row.flop, show: (row) => `${row.counted || !row.flop ? "" : "~"}${count(row.flop)}`, right: true, help: "~: one operation an element, by convention" },
            { title: "moved", key: (row) => row.moved, show: (row) => count(row.moved, "B"), right: true },
            { title: "FLOP/s", key: (row) => row.rate, show: (row) => count(row.rate), right: true },
            { title: "bytes/s", key: (row) => row.traffic, show: (row) => count(row.traffic), right: true },
            ...(limits ? [{ title: "of limit", key: (row: (typeof rows)[0]) => row.used, show: (row: (typeof rows)[0]) => (row.used ? share(row.used) : "–"), right: true, help: "Of the arithmetic or of the memory of the device, whichever is nearer" }] : []),
            { title: "module", key: (row) => row.module, show: (row) => row.module || "–" },
            { title: "source line", key: (row) => row.source, full: (row) => row.source || "–", show: (row) => <span title={row.source}>{tail(row.source, 42) || "–"}</span> },
          ]}
        />
      </section>
    </>
  );
}
