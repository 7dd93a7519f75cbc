// The difference of two ways to run the step: who is live at each peak, what was decided, where the time goes.
import { useMemo } from "preact/hooks";
import type { Shown } from "../app";
import { Missing, Tag } from "../bits";
import { difference, kindsOf } from "../data";
import { bytes, change, seconds, tail } from "../format";
import { Table } from "../table";

const signed = (value: number, text: string) => (value > 0 ? `+${text}` : value < 0 ? `−${text}` : "0");

/** Differences that come from rounding are none. */
const noise = (value: number, of: number) => (Math.abs(value) < 1e-5 * of ? 0 : value);

export function Compare({ report, before, after }: Shown) {
  const rows = useMemo(() => difference(report, before, after), [before, after]);
  const kinds = useMemo(() => kindsOf(report, before, after), [before, after]);
  if (before === after) return <Missing>Choose two different ways above to see how they differ.</Missing>;
  if (!before.moments.live.length || !after.moments.live.length) return <Missing>What is live over time is not known of {before.moments.live.length ? after.name : before.name}.</Missing>;
  const peaks = [before, after].map((run) => run.moments.live[run.moments.peak]);
  const cost = report.steps[after.step].origin, timed = before.moments.start.length > 0 && after.moments.start.length > 0;
  return (
    <>
      <section>
        <h2>Who is live at the peak of each</h2>
        <p>{before.name}: {bytes(peaks[0])}. {after.name}: {bytes(peaks[1])}, {change(peaks[1] / peaks[0] - 1)}.</p>
        <Table
          name="difference" label="differences" rows={rows} sort={3} up text={(row) => `${row.name} ${row.module} ${row.source} ${row.was} ${row.is}`}
          columns={[
            { title: "tensor", key: (row) => row.name, wide: true },
            { title: "before", key: (row) => row.before, show: (row) => (row.before ? bytes(row.before) : "–"), right: true },
            { title: "after", key: (row) => row.after, show: (row) => (row.after ? bytes(row.after) : "–"), right: true },
            { title: "change", key: (row) => row.after - row.before, show: (row) => signed(row.after - row.before, bytes(Math.abs(row.after - row.before))), right: true },
            ...(rows.some((row) => row.was) ? [{ title: "was", key: (row: (typeof rows)[0]) => row.was, show: (row: (typeof rows)[0]) => (row.was ? <Tag of={row.was} /> : "–") }] : []),
            ...(rows.some((row) => row.is) ? [{ title: "decision", key: (row: (typeof rows)[0]) => row.is, show: (row: (typeof rows)[0]) => (row.is ? <Tag of={row.is} /> : "–") }] : []),
            { title: "module", key: (row) => row.module, show: (row) => row.module || "–" },
            { title: "source line", key: (row) => row.source, full: (row) => row.source || "–", show: (row) => <span title={row.source}>{tail(row.source, 42) || "–"}</span> },
          ]}
        />
      </section>
      <section>
        <h2>Runs{timed ? " and time" : ""} by kind of operator</h2>
        <Table
          name="kinds" label="kinds of operators" rows={kinds} sort={timed ? 6 : 3} text={(row) => row.kind}
          columns={[
            { title: "kind", key: (row) => row.kind },
            { title: "runs before", key: (row) => row.runsBefore, right: true },
            { title: "runs after", key: (row) => row.runsAfter, right: true },
            { title: "more runs", key: (row) => row.runsAfter - row.runsBefore, show: (row) => signed(row.runsAfter - row.runsBefore, String(Math.abs(row.runsAfter - row.runsBefore))), right: true },
            ...(timed ? [
              { title: "time before", key: (row: (typeof kinds)[0]) => row.secondsBefore, show: (row: (typeof kinds)[0]) => seconds(row.secondsBefore, cost), right: true },
              { title: "time after", key: (row: (typeof kinds)[0]) => row.secondsAfter, show: (row: (typeof kinds)[0]) => seconds(row.secondsAfter, cost), right: true },
              { title: "more time", key: (row: (typeof kinds)[0]) => row.secondsAfter - row.secondsBefore, show: (row: (typeof kinds)[0]) => signed(noise(row.secondsAfter - row.secondsBefore, row.secondsAfter), seconds(Math.abs(row.secondsAfter - row.secondsBefore), cost)), right: true },
            ] : []),
          ]}
        />
      </section>
    </>
  );
}
