// The graph as a ladder: forward runs down on the left, backward up on the right, what is saved crosses between.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Shown } from "../app";
import { Swatch } from "../bits";
import { decisionsOf, moduleTree, type Node, shownRows } from "../data";
import { bytes, plural, seconds } from "../format";
import { colour, ink } from "../theme";

const ROW = 26, HEAD = 30;

interface Edge { from: number; to: number; bytes: number; decision: string; kind: "forward" | "saved" | "backward"; count: number }

export function GraphView({ report, run }: Shown) {
  const step = report.steps[run.step], { operators, tensors } = step, words = report.words;
  const tree = useMemo(() => moduleTree(report, step), [step]);
  const [open, setOpen] = useState<ReadonlySet<string>>(() => firstOpen(tree));
  const [chosen, setChosen] = useState(0);
  const [tip, setTip] = useState("");
  const [size, setSize] = useState(0);
  const [theme, setTheme] = useState(0);
  const box = useRef<HTMLDivElement>(null), canvas = useRef<HTMLCanvasElement>(null);
  const rows = useMemo(() => shownRows(tree, open), [tree, open]);
  const decided = useMemo(() => decisionsOf(report, run), [run]);
  /** For every operator the row that stands for it. */
  const rowOf = useMemo(() => {
    const found = new Int32Array(operators.name.length).fill(-1);
    rows.forEach((node, k) => { for (const list of [node.forward, node.backward]) for (const row of list) found[row] = k; });
    for (let row = 0; row < found.length; row++) if (operators.parent[row] >= 0 && found[row] < 0) found[row] = found[operators.parent[row]];
    return found;
  }, [rows]);
  const edges = useMemo(() => {
    const found = new Map<string, Edge>();
    operators.inputs.forEach((inputs, row) => {
      if (operators.parent[row] >= 0) return;
      for (const tensor of inputs) {
        const owner = tensors.owner[tensor], maker = tensors.maker[tensor];
        if (maker < 0 || operators.parent[maker] >= 0) continue;
        const ahead = (k: number) => words[operators.phase[k]] === "forward";
        const kind = ahead(maker) ? (ahead(row) ? "forward" : "saved") : "backward";
        const from = rowOf[maker], to = rowOf[row];
        if (kind !== "saved" && (from === to || from < 0 || to < 0)) continue;
        const decision = kind === "saved" ? decided.get(owner)?.decision ?? "kept" : "";
        const key = `${from} ${to} ${kind} ${decision} ${kind === "saved" ? owner : ""}`;
        const one = found.get(key);
        if (one) one.count++;
        else found.set(key, { from, to, kind, decision, bytes: tensors.bytes[owner], count: 1 });
      }
    });
    const merged = new Map<string, Edge>();
    for (const one of found.values()) {
      const key = `${one.from} ${one.to} ${one.kind} ${one.decision}`, same = merged.get(key);
      if (same) { same.bytes += one.bytes; same.count += one.count; } else merged.set(key, { ...one });
    }
    return [...merged.values()].sort((a, b) => a.bytes - b.bytes);
  }, [rowOf, decided]);

  useEffect(() => {
    const watch = new ResizeObserver((seen) => setSize(Math.floor(seen[0].contentRect.width)));
    watch.observe(box.current!);
    const changed = () => setTheme((n) => n + 1);
    addEventListener("lowtide-theme", changed);
    return () => { watch.disconnect(); removeEventListener("lowtide-theme", changed); };
  }, []);

  const high = Math.min(620, rows.length * ROW + HEAD + 8);
  const paint = () => {
    if (!size || !canvas.current) return;
    const ratio = devicePixelRatio || 1, at = canvas.current.getContext("2d")!, colours = ink(), scrolled = box.current!.scrollTop;
    canvas.current.width = size * ratio; canvas.current.height = high * ratio;
    at.setTransform(ratio, 0, 0, ratio, 0, 0);
    const narrow = size < 560, label = Math.round(size * (narrow ? 0.44 : 0.36));
    const ahead = label + 14, arcs = narrow ? 20 : 70, box1 = ahead + arcs, wide = Math.max(26, Math.round((size - box1 - arcs - 14) * 0.24)), box2 = size - arcs - wide - 8;
    const middle = (k: number) => HEAD + k * ROW + ROW / 2 - scrolled;
    at.font = "12px system-ui, sans-serif"; at.textBaseline = "middle";
    at.save(); at.beginPath(); at.rect(0, HEAD, size, high - HEAD); at.clip();
    for (const edge of edges) {
      const y0 = middle(edge.from), y1 = middle(edge.to);
      if (Math.max(y0, y1) < 0 || Math.min(y0, y1) > high) continue;
      at.lineWidth = Math.min(6, 0.8 + Math.log2(1 + edge.bytes / 65536) / 3);
      if (edge.kind === "saved") {
        at.strokeStyle = colour(edge.decision, 0); at.globalAlpha = 0.8;
        at.beginPath(); at.moveTo(box1 + wide, y0);
        at.bezierCurveTo(box1 + wide + 40, y0, box2 - 40, y1, box2, y1); at.stroke();
      } else if (Math.abs(edge.from - edge.to) > 1) {
        at.strokeStyle = colours.soft; at.globalAlpha = 0.45;
        const x = edge.kind === "forward" ? box1 : box2 + wide, out = Math.min(arcs - 6, 8 + Math.abs(edge.from - edge.to) * 3) * (edge.kind === "forward" ? -1 : 1);
        at.beginPath(); at.moveTo(x, y0); at.bezierCurveTo(x + out * 1.3, y0, x + out * 1.3, y1, x, y1); at.stroke();
      }
      at.globalAlpha = 1;
    }
    const first = Math.max(0, Math.floor((scrolled - HEAD) / ROW)), last = Math.min(rows.length, Math.ceil((scrolled + high) / ROW));
    for (let k = first; k < last; k++) {
      const node = rows[k], y = middle(k);
      if (k === chosen) { at.fillStyle = colours.line; at.fillRect(0, y - ROW / 2, label, ROW); }
      at.textAlign = "left"; at.fillStyle = node.operator >= 0 ? colours.soft : colours.text;
      const indent = 10 + Math.min(8, node.depth - 1) * (narrow ? 8 : 14);
      at.save(); at.beginPath(); at.rect(0, y - ROW / 2, label, ROW); at.clip();
      at.fillText(`${node.children.length ? (open.has(node.path) ? "▾ " : "▸ ") : "   "}${node.label}`, indent, y);
      at.restore();
      for (const [list, x, phase] of [[node.forward, box1, "forward"], [node.backward, box2, "backward"]] as const) {
        if (!list.length) continue;
        at.fillStyle = colour(phase, 0); at.globalAlpha = node.operator >= 0 ? 0.55 : 0.9;
        at.beginPath(); at.roundRect(x, y - 9, wide, 18, 4); at.fill(); at.globalAlpha = 1;
        at.fillStyle = node.operator >= 0 ? colours.text : "#fff"; at.textAlign = "center";
        const text = node.operator < 0 ? `${list.length}` : list.length > 1 ? `${words[operators.kind[list[0]]]} +${list.length - 1}` : words[operators.kind[list[0]]];
        const fits = shortened(at, text, wide - 6);
        if (fits) at.fillText(fits, x + wide / 2, y + 0.5);
      }
    }
    at.restore();
    at.fillStyle = colours.soft; at.textAlign = "left"; at.fillText("module", 10, HEAD / 2);
    at.textAlign = "center"; at.fillText("forward ↓", box1 + wide / 2, HEAD / 2); at.fillText("backward ↑", box2 + wide / 2, HEAD / 2);
    if (!narrow) at.fillText("saved for backward", (box1 + wide + box2) / 2, HEAD / 2);
    at.strokeStyle = colours.line; at.lineWidth = 1; at.beginPath(); at.moveTo(0, HEAD - 0.5); at.lineTo(size, HEAD - 0.5); at.stroke();
  };
  useEffect(paint, [size, theme, rows, edges, chosen, high]);

  const toggle = (node: Node) => {
    if (!node.children.length) return;
    const next = new Set(open);
    if (!next.delete(node.path)) next.add(node.path);
    setOpen(next);
  };
  const rowAt = (event: MouseEvent) => {
    const area = canvas.current!.getBoundingClientRect();
    return Math.floor((event.clientY - area.top - HEAD + box.current!.scrollTop) / ROW);
  };
  const say = (k: number) => {
    const node = rows[k];
    if (!node) return "";
    const spent = [...node.forward, ...node.backward].reduce((sum, row) => sum + (operators.seconds[row] ?? 0), 0);
    const saved = edges.filter((edge) => edge.from === k && edge.kind === "saved");
    const parts = [node.operator >= 0 ? `${node.label} (${words[operators.kind[node.operator]]})` : node.path];
    if (node.operator < 0) parts.push(`${plural(node.forward.length, "operator")} forward, ${node.backward.length.toLocaleString("en")} backward`);
    if (spent) parts.push(seconds(spent, step.origin));
    for (const edge of saved.slice(-3)) parts.push(`${bytes(edge.bytes)} ${edge.decision} for backward`);
    if (node.operator >= 0 && operators.source[node.operator]) parts.push(words[operators.source[node.operator]].split("/").pop()!);
    return parts.join(" · ");
  };
  const onKey = (event: KeyboardEvent) => {
    const node = rows[chosen];
    let next = chosen;
    if (event.key === "ArrowDown") next = Math.min(rows.length - 1, chosen + 1);
    else if (event.key === "ArrowUp") next = Math.max(0, chosen - 1);
    else if (event.key === "Enter" || event.key === " ") { if (node) toggle(node); }
    else if (event.key === "ArrowRight") { if (node && !open.has(node.path)) toggle(node); }
    else if (event.key === "ArrowLeft") { if (node && open.has(node.path)) toggle(node); }
    else return;
    event.preventDefault();
    setChosen(next);
    setTip(say(next));
    const y = HEAD + next * ROW, area = box.current!;
    if (y - ROW < area.scrollTop + HEAD) area.scrollTop = y - HEAD; else if (y + ROW > area.scrollTop + high) area.scrollTop = y + ROW - high;
  };
  const all = (depth: number) => { const next = new Set<string>(); const visit = (node: Node) => { for (const child of node.children) { if (child.depth <= depth && child.children.length) { next.add(child.path); visit(child); } } }; visit(tree); setOpen(next); };
  return (
    <section>
      <h2>The step, by module</h2>
      <div class="legend">
        {["kept", "recomputed", "offloaded", "tiled", "in place"].filter((name) => edges.some((edge) => edge.decision === name)).map((name) => <span key={name}><Swatch of={name} />saved, {name}</span>)}
        <span>numbers: operators; click a row to open or fold it</span>
      </div>
      <div class="chips" role="group" aria-label="Fold">
        <button type="button" data-fold="0" onClick={() => all(0)}>fold all</button>
        <button type="button" data-fold="1" onClick={() => all(1)}>one level</button>
        <button type="button" data-fold="2" onClick={() => all(2)}>two levels</button>
        <button type="button" data-fold="9" onClick={() => all(99)}>open all</button>
      </div>
      <p class="small" role="status" data-graph-tip style={{ minHeight: "1.5em", overflowWrap: "anywhere" }}>{tip || `${plural(rows.length, "row")}, ${plural(operators.name.length, "operator")}${step.operators_in_all > operators.name.length ? ` of ${step.operators_in_all.toLocaleString("en")}` : ""}`}</p>
      <div class="graph" ref={box} data-field="graph" data-rows={rows.length} style={{ height: `${high + 2}px` }} onScroll={paint}>
        <div style={{ height: `${rows.length * ROW + HEAD}px` }}>
          <canvas
            ref={canvas} class="base" tabIndex={0} role="img" aria-label={`The step by module: ${rows.length} rows; arrow keys move, Enter opens or folds`} style={{ position: "sticky", top: 0, display: "block", width: "100%", height: `${high}px` }}
            onPointerMove={(event) => setTip(say(rowAt(event)))} onPointerLeave={() => setTip("")}
            onClick={(event) => { const k = rowAt(event); if (rows[k]) { setChosen(k); toggle(rows[k]); } }} onKeyDown={onKey}
          />
        </div>
      </div>
    </section>
  );
}

/** A text as far as it fits, with a mark where it was cut; nothing where hardly any of it fits. */
function shortened(at: CanvasRenderingContext2D, text: string, width: number): string {
  if (at.measureText(text).width <= width) return text;
  const fits = Math.floor((text.length * width) / at.measureText(text).width) - 1;
  return fits >= 4 ? `${text.slice(0, fits)}…` : "";
}

/** A first state that shows some structure: levels are opened while there are few rows. */
function firstOpen(tree: Node): ReadonlySet<string> {
  let open = new Set<string>();
  for (let depth = 1; depth <= 3; depth++) {
    const next = new Set(open);
    const visit = (node: Node) => { for (const child of node.children) if (child.operator < 0 && child.depth <= depth) { if (child.children.some((one) => one.operator < 0)) next.add(child.path); visit(child); } };
    visit(tree);
    if (shownRows(tree, next).length > (open.size || tree.children.length > 1 ? 60 : 1200)) break;  // one row says nothing
    open = next;
  }
  return open;
}
