// Who is live at the peak, or at another moment, with the source line.
import { useMemo } from "preact/hooks";
import type { Shown } from "../app";
import { Meter, Missing, Tag, momentText } from "../bits";
import { categoryOf, decisionsOf, liveAt, nameOf, sourceOf } from "../data";
import { bytes, share, tail } from "../format";
import { Table } from "../table";

export function Peak({ report, run, which, moment, look }: Shown) {
  const { moments } = run;
  const at = moment ?? moments.peak;
  const rows = useMemo(() => {
    if (!moments.live.length) return [];
    const tables = report.steps[run.step].tensors, decided = decisionsOf(report, run), words = report.words, role = categoryOf(report, run, "role", 1);
    return liveAt(report, run, moments.event[Math.min(at, moments.event.length - 1)]).map((one) => ({
      bytes: one.bytes, name: nameOf(report, run, one), source: sourceOf(report, run, one),
      role: role(one), shape: one.tensor >= 0 ? words[tables.shape[one.tensor]] : "",
      module: one.tensor >= 0 ? words[tables.module[one.tensor]] : "", decision: decided.get(one.tensor)?.decision ?? "", reason: decided.get(one.tensor)?.reason ?? "",
    }));
  }, [run, at]);
  if (!moments.live.length) return <Missing>Who is live over time is not known of {run.name}.</Missing>;
  const k = Math.min(at, moments.live.length - 1), total = moments.live[k], listed = rows.reduce((sum, row) => sum + row.bytes, 0);
  const rest = total - listed;
  return (
    <section>
      <h2>{moment === null || at === moments.peak ? "Who is live at the peak" : "Who is live at this moment"}: {bytes(total)}</h2>
      <p>{momentText(report, run, k)}{rest > 0 && run.beside_bytes > 0 ? `; ${bytes(rest)} of it outside the step` : rest > 0 ? `; ${bytes(rest)} in blocks that are too small to be listed` : ""}</p>
      <div class="chips pair" role="group" aria-label="Moment">
        <button type="button" onClick={() => look(which, Math.max(0, k - 1))} disabled={k === 0}>← before</button>
        <button type="button" onClick={() => look(which, null)} aria-pressed={at === moments.peak}>the peak</button>
        <button type="button" onClick={() => look(which, Math.min(moments.live.length - 1, k + 1))} disabled={k === moments.live.length - 1}>after →</button>
      </div>
      <Table
        name="live" label="live tensors" rows={rows} sort={0} text={(row) => `${row.name} ${row.module} ${row.source} ${row.role} ${row.decision}`}
        columns={[
          { title: "bytes", key: (row) => row.bytes, show: (row) => bytes(row.bytes), right: true },
          { title: "share", key: (row) => row.bytes, show: (row) => <><Meter part={row.bytes / total} of={row.role} /> {share(row.bytes / total)}</> },
          { title: "tensor", key: (row) => row.name, wide: true },
          { title: "source line", key: (row) => row.source, full: (row) => row.source || "–", show: (row) => <span title={row.source}>{tail(row.source, 42) || "–"}</span> },
          { title: "module", key: (row) => row.module, show: (row) => row.module || "–" },
          { title: "role", key: (row) => row.role, show: (row) => <Tag of={row.role} /> },
          { title: "shape", key: (row) => row.shape, show: (row) => row.shape || "–" },
          ...(run.decisions ? [{ title: "decision", key: (row: (typeof rows)[0]) => row.decision, show: (row: (typeof rows)[0]) => (row.decision ? <span title={row.reason}><Tag of={row.decision} /></span> : "–") }] : []),
        ]}
      />
    </section>
  );
}
