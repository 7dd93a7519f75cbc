// Tiles of a loop: where they lie, what they read beyond their share, what one takes.
import type { Shown } from "../app";
import { Missing } from "../bits";
import { Field } from "../field";
import { bytes, count } from "../format";
import { PALETTE } from "../theme";
import type { LoopView } from "../types";

export function Tiles({ report, run }: Shown) {
  if (!run.loops.length) return <Missing>{run.name} runs nothing in tiles.</Missing>;
  return <>{run.loops.map((loop, k) => <Loop key={k} report={report} run={run} loop={loop} number={k} />)}</>;
}

function Loop({ report, run, loop, number }: { report: Shown["report"]; run: Shown["run"]; loop: LoopView; number: number }) {
  const { operators } = report.steps[run.step];
  const by = (sizes: number[]) => sizes.join("×");
  const ranked = loop.axes.map((length, axis) => ({ axis, length, cuts: new Set(loop.lo.map((lo) => lo[axis])).size })).sort((a, b) => b.cuts - a.cuts).filter((one, k) => k === 0 || one.cuts > 1).slice(0, 2).sort((a, b) => a.axis - b.axis);
  const columns = ranked[ranked.length - 1], rows = ranked.length > 1 ? ranked[0] : null;
  const wholeRows = rows ? rows.length : 1;
  const box = (k: number) => ({ x0: loop.lo[k][columns.axis], x1: loop.hi[k][columns.axis], y0: rows ? loop.lo[k][rows.axis] : 0, y1: rows ? loop.hi[k][rows.axis] : 1 });
  const shapes = [...new Set(loop.lo.map((lo, k) => by(lo.map((value, axis) => loop.hi[k][axis] - value))))];
  return (
    <section>
      <h2>{loop.lo.length} tiles of {by(loop.axes)}: {report.words[operators.name[loop.operator]]}</h2>
      <p>Each is {shapes.slice(0, 4).join(" or ")}; {loop.body_bytes.length > 1 ? `${loop.body_bytes.length} programs run them` : "one program runs them all"}. A tile takes up to {bytes(Math.max(...loop.body_bytes))} besides what goes in.</p>
      <Field
        name={`tiles-${number}`} height={rows ? 320 : 120} flip zooms={false} label={`${loop.lo.length} tiles`}
        x={{ label: `axis ${columns.axis}`, min: 0, max: columns.length, scale: "whole", format: (value) => count(value) }}
        y={{ label: rows ? `axis ${rows.axis}` : "", min: 0, max: wholeRows, scale: "whole", format: rows ? (value) => count(value) : () => "" }}
        depends={[loop]}
        tip={(x, y) => {
          const k = loop.lo.findIndex((_, n) => { const one = box(n); return one.x0 <= x && x < one.x1 && one.y0 <= y && y < one.y1; });
          if (k < 0) return null;
          return { text: `tile ${k + 1}: ${loop.lo[k].map((lo, axis) => `${lo} to ${loop.hi[k][axis]}`).join(", ")} · ${loop.body_operators[loop.body[k]]} operators · up to ${bytes(loop.body_bytes[loop.body[k]])}` };
        }}
        draw={(pen) => {
          const { at } = pen;
          for (let k = 0; k < loop.lo.length; k++) {
            const one = box(k), x = pen.x(one.x0), y = pen.y(one.y0), w = pen.x(one.x1) - x, h = pen.y(one.y1) - y;
            at.fillStyle = PALETTE[loop.body[k] % PALETTE.length]; at.globalAlpha = 0.6; at.fillRect(x, y, w, h); at.globalAlpha = 1;
            at.strokeStyle = pen.ink.panel; at.lineWidth = 1.5; at.strokeRect(x, y, w, h);
            if (w > 22 && h > 16) { at.fillStyle = pen.ink.text; at.textAlign = "center"; at.textBaseline = "middle"; at.font = "12px system-ui, sans-serif"; at.fillText(String(k + 1), x + w / 2, y + h / 2); }
          }
          at.textBaseline = "alphabetic";
        }}
      />
      {loop.reads.length > 0 && (
        <>
          <h3>What tiles read</h3>
          <div class="over">
            <table class="plain" data-table="reads">
              <thead><tr><th>input</th><th class="right">whole</th><th class="right">largest part</th><th class="right">halo</th><th class="right">read</th></tr></thead>
              <tbody>{loop.reads.map((read) => (
                <tr key={read.name}><td>{read.name}</td><td class="right">{by(read.whole)}</td><td class="right">{by(read.part)}</td><td class="right">{read.halo.some(Boolean) ? read.halo.map((one) => `+${one}`).join(" ") : "none"}</td><td class="right">{read.times.toFixed(2)} times</td></tr>
              ))}</tbody>
            </table>
          </div>
        </>
      )}
    </section>
  );
}
