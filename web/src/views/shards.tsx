// A step over several devices: what each holds and reads, what moves, what that takes, and what other splits would.
import { useMemo, useRef, useState } from "preact/hooks";
import type { Shown } from "../app";
import { Swatch, Tag } from "../bits";
import { cutDims, movedBy, nodeRows, rectText } from "../data";
import { bytes, change, count, plural, seconds, share, tail } from "../format";
import { Table } from "../table";
import { colour } from "../theme";
import type { Report, ShardView } from "../types";

const HEAD = 30, LINE = 19, GAP = 14, HIGH = 560;

/** Boxes of what an operator gives: its shape is theirs. */
const WRITTEN = new Set(["dist_result", "write_rect"]);

const devicesOf = (split: ShardView) => split.mesh.reduce((a, b) => a * b, 1);
const largestOf = (values: number[]) => Math.max(...values);

export function Shards({ report }: Shown) {
  const [which, setWhich] = useState(0);
  const split = report.shards[Math.min(which, report.shards.length - 1)];
  return (
    <>
      {report.shards.length > 1 && (
        <div class="pair"><label>split <select aria-label="The split that is shown" value={which} onChange={(event) => setWhich(Number(event.currentTarget.value))}>{report.shards.map((one, k) => <option key={k} value={k}>{one.name}</option>)}</select></label></div>
      )}
      <ShardCards report={report} split={split} />
      <Devices split={split} />
      <Picture key={which} report={report} split={split} />
      <Moves report={report} split={split} />
      <Tensors report={report} split={split} />
    </>
  );
}

/** The numbers of the first screen. */
export function ShardCards({ report, split }: { report: Report; split: ShardView }) {
  const devices = devicesOf(split), measured = split.measured_bytes.length > 0;
  const run = report.runs[split.runs[split.runs.length - 1]], asked = split.budget_bytes === null && run.budget_bytes !== null; // as a share
  const peak = asked ? run.predicted?.peak_bytes ?? split.split.peak_bytes : split.split.peak_bytes, most = measured ? largestOf(split.measured_bytes) : peak;
  const check = split.check, budget = split.budget_bytes ?? run.budget_bytes;
  return (
    <div class="cards six">
      <div class="card" data-card="peak">
        <div class="what">One device → the largest of {devices}, predicted</div>
        <div class="big">{bytes(split.one.peak_bytes)} → {bytes(peak)}</div>
        <div class="what">{[split.one.peak_bytes ? change(peak / split.one.peak_bytes - 1) : "", measured ? `measured ${bytes(most)} with workspaces, planned ${bytes(largestOf(split.planned_bytes))}` : ""].filter(Boolean).join("; ")}</div>
      </div>
      <div class="card" data-card="budget">
        <div class="what">Budget of a device</div>
        <div class="big">{budget === null ? "none" : bytes(budget)}</div>
        <div class="what">{budget === null ? "storing everything" : most <= budget ? <span class="good">✓ every device stays inside</span> : <span class="bad">✗ a device is above it</span>}</div>
      </div>
      <div class="card" data-card="devices">
        <div class="what">Devices</div>
        <div class="big">{split.mesh.length > 1 ? `${split.mesh.join(" × ")} = ${devices}` : devices}</div>
        <div class="what">connected by {count(split.bytes_per_second, "B/s")}, {seconds(split.latency)}</div>
      </div>
      <div class="card" data-card="wire">
        <div class="what">Sent in a step, by the device that sends most</div>
        <div class="big">{bytes(measured ? largestOf(split.sent_bytes) : split.split.wire_bytes)}</div>
        <div class="what">{plural(split.messages, "exchange")} and sums{measured ? `; ${bytes(split.sent_bytes.reduce((a, b) => a + b, 0))} by all, ${split.sent_bytes.every((size, k) => size === split.planned_sent_bytes[k]) ? "as planned" : "other than planned"}` : ""}</div>
      </div>
      <div class="card" data-card="time">
        <div class="what">Time of a step, estimated</div>
        <div class="big">{seconds(split.split.seconds)}</div>
        <div class="what">{split.bound_seconds > 0 ? `no split below ${seconds(split.bound_seconds)} by these costs` : `one device ${seconds(split.one.seconds)}`}</div>
      </div>
      <div class="card" data-card="gradients">
        <div class="what">Loss, gradients, updates</div>
        <div class="big">{check ? (check.bitwise ? <span class="good">bitwise equal</span> : check.difference === null ? <span class="bad">differ</span> : `within ${check.difference.toExponential(0)}`) : "not compared"}</div>
        <div class="what">{check ? `compared with one device${split.update_difference !== null ? `; updates within ${split.update_difference.toExponential(0)}` : ""}` : <><code>lowtide shard --run</code> compares them</>}</div>
      </div>
    </div>
  );
}

/** Bytes of each process, and what other splits take. */
function Devices({ split }: { split: ShardView }) {
  const most = Math.max(1, ...split.measured_bytes, ...split.planned_bytes, split.budget_bytes ?? 0);
  if (!split.measured_bytes.length && !split.compared.length) return null;
  return (
    <section>
      {split.measured_bytes.length > 0 && (
        <>
          <h2>What each process took</h2>
          <div class="over">
            <table class="plain" data-table="shares">
              <thead><tr><th>device</th><th class="right">planned</th><th class="right">measured</th><th /><th class="right">sent</th><th class="right">planned</th></tr></thead>
              <tbody>{split.measured_bytes.map((size, rank) => (
                <tr key={rank}><td>{rank}</td><td class="right soft">{bytes(split.planned_bytes[rank])}</td><td class="right">{bytes(size)}</td><td><span class="meter" style={{ width: `${Math.max(1, Math.round((size / most) * 140))}px`, background: "var(--after)" }} /></td><td class="right">{bytes(split.sent_bytes[rank])}</td><td class="right soft">{bytes(split.planned_sent_bytes[rank])}</td></tr>
              ))}</tbody>
            </table>
          </div>
        </>
      )}
      {split.compared.length > 0 && (
        <>
          <h2 style={{ marginTop: split.measured_bytes.length ? "18px" : 0 }}>What other splits take</h2>
          <div class="over">
            <table class="plain" data-table="splits">
              <thead><tr><th>split</th><th class="right">estimated time</th><th class="right">a device</th><th class="right">storing everything</th><th class="right">sent</th><th /></tr></thead>
              <tbody>{[split.split, ...split.compared].map((one, k) => (
                <tr key={k} class={k ? "" : "chosen"}><td>{k ? one.name : `this one (${one.name})`}</td><td class="right">{seconds(one.seconds)}{k && split.split.seconds ? ` (${change(one.seconds / split.split.seconds - 1)})` : ""}</td><td class="right">{bytes(one.peak_bytes)}</td><td class="right soft">{bytes(one.plain_bytes)}</td><td class="right">{bytes(one.wire_bytes)}</td><td>{one.fits ? "" : <span class="bad">does not fit</span>}</td></tr>
              ))}</tbody>
            </table>
          </div>
        </>
      )}
    </section>
  );
}

/** Operators and variables with the boxes that a device reads and writes, as document 002 draws them. */
function Picture({ report, split }: { report: Report; split: ShardView }) {
  const { nodes, ranks } = split, words = report.words;
  const [rank, setRank] = useState(0);
  const [phase, setPhase] = useState("");
  const [folded, setFolded] = useState<ReadonlySet<string>>(() => new Set(nodes.name.length > 300 && new Set(nodes.module).size > 4 ? nodes.module.map((k) => words[k]) : []));
  const [chosen, setChosen] = useState(-1);
  const [scrolled, setScrolled] = useState(0);
  const box = useRef<HTMLDivElement>(null);
  const modules = useMemo(() => nodes.module.map((k) => words[k]), [nodes]);
  const phases = useMemo(() => [...new Set(nodes.phase.map((k) => words[k]))], [nodes]);
  const rows = useMemo(() => nodeRows(modules, (k) => !phase || words[nodes.phase[k]] === phase, (module) => !folded.has(module)), [modules, phase, folded]);
  const places = useMemo(() => {
    const found = [0];
    for (const row of rows) found.push(found[found.length - 1] + (row.node < 0 ? HEAD : HEAD + LINE * nodes.label[row.node].length + GAP));
    return found;
  }, [rows]);
  if (!nodes.name.length) return null;
  const first = Math.max(0, places.findIndex((y) => y > scrolled - 300) - 1), last = places.findIndex((y) => y > scrolled + HIGH + 300);
  const toggle = (module: string) => { const next = new Set(folded); if (!next.delete(module)) next.add(module); setFolded(next); };
  const onKey = (event: KeyboardEvent) => {
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (event.target !== box.current || (!by && event.key !== "Enter")) return;
    const next = Math.max(0, Math.min(rows.length - 1, chosen + by));
    if (event.key === "Enter" && rows[next]?.node < 0) toggle(rows[next].module);
    setChosen(next);
    if (places[next] < box.current!.scrollTop) box.current!.scrollTop = places[next];
    else if (places[next + 1] > box.current!.scrollTop + HIGH) box.current!.scrollTop = places[next + 1] - HIGH;
    event.preventDefault();
  };
  return (
    <section>
      <h2>The step on each device</h2>
      <p class="small soft">An operator says which box it reads and computes, a variable which box of it is read and written here: <code>Rect([from], [to])</code>. Bars show the part of each dimension that is cut.</p>
      <div class="bar">
        <div class="chips" role="group" aria-label="Device">
          {ranks.map((one, k) => <button key={one} type="button" data-device={one} aria-pressed={k === rank} onClick={() => setRank(k)}>device {one}</button>)}
        </div>
        <div class="chips" role="group" aria-label="Phase">
          {["", ...phases].map((one) => <button key={one} type="button" data-phase={one || "all"} aria-pressed={one === phase} onClick={() => { setPhase(one); setChosen(-1); box.current!.scrollTop = 0; }}>{one || "all"}</button>)}
        </div>
        <div class="chips" role="group" aria-label="Fold">
          <button type="button" data-fold="all" onClick={() => setFolded(new Set(modules))}>fold all</button>
          <button type="button" data-fold="none" onClick={() => setFolded(new Set())}>open all</button>
        </div>
        <span class="soft" role="status">{plural(rows.reduce((sum, row) => sum + (row.node < 0 ? row.count : 0), 0), "node")}{nodes.in_all > nodes.name.length ? ` of ${nodes.in_all.toLocaleString("en")}` : ""}</span>
      </div>
      <div class="nodes" ref={box} tabIndex={0} data-nodes={rows.length} aria-label="Operators and variables; arrow keys move, Enter folds" style={{ maxHeight: `${HIGH}px` }} onKeyDown={onKey} onScroll={(event) => setScrolled(event.currentTarget.scrollTop)}>
        <div style={{ height: `${places[rows.length]}px`, position: "relative" }}>
          {rows.slice(first, last < 0 ? rows.length : last).map((row, k) => {
            const at = first + k, top = { top: `${places[at]}px` };
            if (row.node < 0) return <button key={`m${at}`} type="button" class={`module${at === chosen ? " chosen" : ""}`} style={top} onClick={() => toggle(row.module)} aria-expanded={!folded.has(row.module)}>{folded.has(row.module) ? "▸" : "▾"} {row.module || "no module"} <span class="soft">{row.count}</span></button>;
            return <Drawn key={`n${row.node}`} report={report} split={split} node={row.node} rank={rank} top={places[at]} chosen={at === chosen} pick={() => setChosen(at === chosen ? -1 : at)} />;
          })}
        </div>
      </div>
      {chosen >= 0 && rows[chosen]?.node >= 0 && <Everywhere report={report} split={split} node={rows[chosen].node} />}
    </section>
  );
}

function Drawn(props: { report: Report; split: ShardView; node: number; rank: number; top: number; chosen: boolean; pick: () => void }) {
  const { report, split, node, rank } = props, { nodes } = split, words = report.words;
  const kind = words[nodes.kind[node]], shape = nodes.shape[node], variable = kind === "variable";
  return (
    <div class={`node ${variable ? "variable" : "operator"}${props.chosen ? " chosen" : ""}`} style={{ top: `${props.top}px`, borderColor: variable ? undefined : colour(words[nodes.phase[node]], 0) }} data-node={words[nodes.name[node]]} onClick={props.pick}>
      <div class="title"><b>{words[nodes.name[node]]}</b> <span class="soft">{variable || kind === words[nodes.name[node]] ? "" : `${kind} `}{shape.length ? `${variable ? "dim" : "result_dim"}=[${shape.join(" ")}]` : ""}</span></div>
      {nodes.label[node].map((label, k) => {
        const flat = nodes.box[node][k][rank];
        return (
          <div class="rect" key={k}>
            <span class="text"><code>{words[label]}={rectText(flat)}</code></span>
            {(variable || WRITTEN.has(words[label]) ? cutDims(flat, shape) : []).map(({ dim, lo, hi }) => <span key={dim} class="strip" title={`dimension ${dim}: ${share(lo)} to ${share(hi)}`}><span class="soft">{dim}</span><span class="track"><span style={{ left: `${lo * 100}%`, width: `${Math.max(2, (hi - lo) * 100)}%` }} /></span></span>)}
          </div>
        );
      })}
    </div>
  );
}

/** The boxes of one node on all devices that are shown. */
function Everywhere({ report, split, node }: { report: Report; split: ShardView; node: number }) {
  const { nodes, ranks } = split, words = report.words;
  return (
    <div data-everywhere>
      <h3>{words[nodes.name[node]]} on each device</h3>
      <div class="over">
        <table class="plain">
          <thead><tr><th>device</th>{nodes.label[node].map((label) => <th key={label}>{words[label]}</th>)}</tr></thead>
          <tbody>{ranks.map((rank, k) => <tr key={rank}><td>{rank}</td>{nodes.label[node].map((label, n) => <td key={label}><code>{rectText(nodes.box[node][n][k])}</code></td>)}</tr>)}</tbody>
        </table>
      </div>
    </div>
  );
}

const named = (report: Report, split: ShardView, tensor: number) => (tensor < 0 ? "–" : report.words[report.steps[split.step].tensors.name[tensor]]);

function Moves({ report, split }: { report: Report; split: ShardView }) {
  const { moves, ranks } = split, words = report.words, { operators } = report.steps[split.step];
  const totals = useMemo(() => movedBy(report, split), [split]);
  const rows = useMemo(() => moves.how.map((how, k) => ({
    how: words[how], phase: words[moves.phase[k]], tensor: named(report, split, moves.tensor[k]), sent: moves.sent[k], most: largestOf([0, ...moves.sent[k]]), seconds: moves.seconds[k],
    operator: moves.operator[k] < 0 ? "" : words[operators.name[moves.operator[k]]], module: moves.operator[k] < 0 ? "" : words[operators.module[moves.operator[k]]], source: moves.operator[k] < 0 ? "" : words[operators.source[moves.operator[k]]],
    where: [moves.dim[k] >= 0 ? `dimension ${moves.dim[k]}` : "", split.mesh.length > 1 ? `axis ${moves.axis[k]}` : ""].filter(Boolean).join(", "),
  })), [split]);
  return (
    <section>
      <h2>What moves between devices</h2>
      {!rows.length && <p class="soft">Nothing moves.</p>}
      {rows.length > 0 && (
        <>
          <div class="legend">{totals.map(([how, size], k) => <span key={how}><Swatch of={how} number={k} />{how} {bytes(size)}</span>)}<span class="soft">by the device that sends most of it</span></div>
          <Table
            name="moves" label="moves" rows={rows} sort={4} text={(row) => `${row.how} ${row.phase} ${row.tensor} ${row.operator} ${row.module} ${row.source}`}
            columns={[
              { title: "what moves", key: (row) => row.how },
              { title: "tensor", key: (row) => row.tensor, show: (row) => (row.phase === "backward" ? `gradient of ${row.tensor}` : row.tensor) },
              { title: "for", key: (row) => row.operator, show: (row) => row.operator || "the end of backward" },
              { title: "phase", key: (row) => row.phase },
              { title: "bytes", key: (row) => row.most, show: (row) => bytes(row.most), right: true, help: "By the device that sends most" },
              { title: "time", key: (row) => row.seconds, show: (row) => seconds(row.seconds), right: true, help: "Estimated by the speed of the connection" },
              { title: "where", key: (row) => row.where, show: (row) => row.where || "–" },
              { title: "by device", key: (row) => row.most, show: (row) => row.sent.map((size, k) => `${ranks[k]}: ${bytes(size)}`).join(", "), wide: true },
              { title: "source line", key: (row) => row.source, full: (row) => row.source || "–", show: (row) => <span title={row.source}>{tail(row.source, 42) || "–"}</span> },
            ]}
          />
        </>
      )}
    </section>
  );
}

function Tensors({ report, split }: { report: Report; split: ShardView }) {
  const { decisions } = split, words = report.words, { tensors } = report.steps[split.step];
  const [only, setOnly] = useState<string | null>(null);
  const rows = useMemo(() => decisions.tensor.map((row, k) => ({
    name: words[tensors.name[row]], bytes: tensors.bytes[row], part: decisions.part[k], decision: words[decisions.decision[k]], cut: words[decisions.cut[k]], reason: words[decisions.reason[k]],
    price: decisions.price[k], instead: decisions.instead[k], module: words[tensors.module[row]], source: words[tensors.source[row]], shape: words[tensors.shape[row]],
  })), [split]);
  const counts = useMemo(() => {
    const found = new Map<string, number>();
    for (const row of rows) found.set(row.decision, (found.get(row.decision) ?? 0) + 1);
    return [...found].sort((a, b) => b[1] - a[1]);
  }, [rows]);
  const shown = useMemo(() => (only ? rows.filter((row) => row.decision === only) : rows), [rows, only]);
  return (
    <section>
      <h2>What each tensor is on the devices, and why</h2>
      <p class="small soft">Tensors of forward, parameters, buffers and the batch; backward follows them.</p>
      <div class="chips" role="group" aria-label="Decisions">
        <button type="button" aria-pressed={only === null} onClick={() => setOnly(null)}>all</button>
        {counts.map(([name, n]) => <button key={name} type="button" data-decision={name} aria-pressed={only === name} onClick={() => setOnly(only === name ? null : name)}><Swatch of={name} />{name} {n.toLocaleString("en")}</button>)}
      </div>
      <div style={{ height: "8px" }} />
      <Table
        name="sharded" label="tensors on the devices" rows={shown} sort={2} text={(row) => `${row.name} ${row.decision} ${row.cut} ${row.reason} ${row.module} ${row.source}`}
        columns={[
          { title: "tensor", key: (row) => row.name },
          { title: "decision", key: (row) => row.decision, show: (row) => <Tag of={row.decision} /> },
          { title: "whole", key: (row) => row.bytes, show: (row) => bytes(row.bytes), right: true },
          { title: "on a device", key: (row) => row.part, show: (row) => bytes(row.part), right: true, help: "On the largest device" },
          { title: "cut", key: (row) => row.cut, show: (row) => row.cut || "–" },
          { title: "price", key: (row) => row.price, show: (row) => (row.price ? seconds(row.price) : "0"), right: true, help: "Time in which it moves between devices, estimated" },
          { title: "reason", key: (row) => row.reason, wide: true },
          { title: "module", key: (row) => row.module, show: (row) => row.module || "–" },
          { title: "source line", key: (row) => row.source, full: (row) => row.source || "–", show: (row) => <span title={row.source}>{tail(row.source, 42) || "–"}</span> },
          { title: "shape", key: (row) => row.shape, show: (row) => row.shape || "–" },
        ]}
      />
    </section>
  );
}
