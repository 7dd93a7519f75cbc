// Each tensor's decision with the reason and its price.
import { useMemo, useState } from "preact/hooks";
import type { Shown } from "../app";
import { Missing, Swatch, Tag } from "../bits";
import { bytes, seconds, tail } from "../format";
import { Table } from "../table";

const QUIET = new Set(["temporary", "resident", "result"]);

export function Decisions({ report, run }: Shown) {
  const [only, setOnly] = useState<string | null>(null);
  const table = run.decisions, cost = report.steps[run.step].origin;
  const rows = useMemo(() => {
    if (!table) return [];
    const { tensors } = report.steps[run.step], words = report.words;
    return table.tensor.map((row, k) => ({
      name: words[tensors.name[row]], bytes: tensors.bytes[row], decision: words[table.decision[k]], reason: words[table.reason[k]], price: table.price[k], instead: table.instead[k],
      source: words[tensors.source[row]], module: words[tensors.module[row]], shape: words[tensors.shape[row]],
    }));
  }, [table]);
  const counts = useMemo(() => {
    const found = new Map<string, number>();
    for (const row of rows) found.set(row.decision, (found.get(row.decision) ?? 0) + 1);
    return [...found].sort((a, b) => Number(QUIET.has(a[0])) - Number(QUIET.has(b[0])) || b[1] - a[1]);
  }, [rows]);
  const shown = useMemo(() => rows.filter((row) => (only ? row.decision === only : !QUIET.has(row.decision))), [rows, only]);
  if (!table) return <Missing>{run.name} has no plan, so nothing was decided.</Missing>;
  const proof = run.proof;
  return (
    <section>
      <h2>What becomes of each tensor, and why</h2>
      {proof && <p>{proof.method === "plain" ? "Storing everything fits into the budget" : `Found by ${proof.method} in ${seconds(proof.solve_seconds)}`}. {proof.bound_overhead !== null ? `${proof.gap <= 0 ? "Proven optimal" : `${proof.gap < 0.0005 ? "Less than 0.1" : `At most ${(proof.gap * 100).toFixed(1)}`}% of the step is left to gain`} ${proof.words}.` : "Nothing is proven about how fast it could be."}</p>}
      <div class="chips" role="group" aria-label="Decisions">
        <button type="button" aria-pressed={only === null} onClick={() => setOnly(null)}>decided</button>
        {counts.map(([name, n]) => <button key={name} type="button" data-decision={name} aria-pressed={only === name} onClick={() => setOnly(only === name ? null : name)}><Swatch of={name} />{name} {n.toLocaleString("en")}</button>)}
      </div>
      <div style={{ height: "8px" }} />
      <Table
        name="decisions" label="decisions" rows={shown} sort={2} none="Backward needs nothing that forward makes, so there was nothing to decide. The buttons above list the other tensors." text={(row) => `${row.name} ${row.decision} ${row.reason} ${row.module} ${row.source}`}
        columns={[
          { title: "tensor", key: (row) => row.name },
          { title: "decision", key: (row) => row.decision, show: (row) => <Tag of={row.decision} /> },
          { title: "bytes", key: (row) => row.bytes, show: (row) => bytes(row.bytes), right: true },
          { title: "module", key: (row) => row.module, show: (row) => row.module || "–" },
          { title: "price", key: (row) => row.price, show: (row) => (row.price ? seconds(row.price, cost) : row.price === null ? "–" : "0"), right: true, help: "Time that the step spends for it" },
          { title: "reason", key: (row) => row.reason, wide: true },
          { title: "instead", key: (row) => (row.decision === "kept" ? row.instead : null), show: (row) => (row.decision === "kept" && row.instead ? seconds(row.instead, cost) : "–"), right: true, help: "What running its operator again would take" },
          { title: "source line", key: (row) => row.source, full: (row) => row.source || "–", show: (row) => <span title={row.source}>{tail(row.source, 42) || "–"}</span> },
          { title: "shape", key: (row) => row.shape, show: (row) => row.shape || "–" },
        ]}
      />
    </section>
  );
}
