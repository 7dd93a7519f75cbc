// Address by time: where every block lies in one arena, and what fragmentation costs.
import { useMemo, useState } from "preact/hooks";
import type { Shown } from "../app";
import { Missing, Swatch } from "../bits";
import { type By, categoryOf, type Live, nameOf, sourceOf } from "../data";
import { Field, marked } from "../field";
import { bytes, count, share } from "../format";
import { colour } from "../theme";

const BUCKETS = 512;

export function Layout({ report, run }: Shown) {
  const { blocks, layout } = run;
  const [by, setBy] = useState<By>("role");
  const width = Math.max(1, blocks.events);
  const one = (k: number): Live => ({ tensor: blocks.tensor[k], operator: blocks.operator[k], bytes: blocks.bytes[k], use: report.words[blocks.use[k]], leaf: false });
  /** Blocks by the part of the axis that they live in: a cursor asks one part only. */
  const index = useMemo(() => {
    const found: number[][] = Array.from({ length: BUCKETS }, () => []);
    for (let k = 0; k < blocks.bytes.length; k++) {
      if (blocks.offset[k] < 0) continue; // its place is not known
      const first = Math.floor((blocks.birth[k] / width) * BUCKETS), last = Math.min(BUCKETS - 1, Math.floor(((blocks.death[k] - 1) / width) * BUCKETS));
      for (let bucket = first; bucket <= last; bucket++) found[bucket].push(k);
    }
    return found;
  }, [run]);
  const painted = useMemo(() => {
    const category = categoryOf(report, run, by, 1), names: string[] = [], of = new Map<string, number>();
    const which = blocks.bytes.map((_, k) => {
      const name = category(one(k));
      if (!of.has(name)) { of.set(name, names.length); names.push(name); }
      return of.get(name)!;
    });
    return { names, which };
  }, [run, by]);
  if (!layout || !blocks.offset.length) return <Missing>{run.name} has no addresses{blocks.in_all > blocks.bytes.length ? `: there are ${blocks.in_all.toLocaleString("en")} blocks, too many to be placed for a picture` : ""}.</Missing>;
  const top = Math.max(layout.arena_bytes, ...sampled(blocks.offset, blocks.bytes)) * 1.02 || 1;
  const told = layout.method.startsWith("as the");
  const lost = layout.arena_bytes - layout.live_bytes;
  return (
    <section>
      <h2>Where blocks lie in memory</h2>
      <p>{told ? "As the document says, " : "One arena of "}<b>{bytes(layout.arena_bytes)}</b> {told ? "of addresses are touched by what takes" : "holds everything that takes"} {bytes(layout.live_bytes)} at once: fragmentation costs <b>{bytes(lost)}</b> ({share(layout.live_bytes ? lost / layout.live_bytes : 0)}){layout.optimal ? ", and no arena can be smaller" : ""}. {layout.greedy_bytes > layout.arena_bytes ? `Greedy placement by size takes ${bytes(layout.greedy_bytes)}. ` : ""}<span class="soft">Method: {layout.method}; leaves that stay ({bytes(run.resident_bytes)}) are not part of it.</span></p>
      <div class="chips" role="group" aria-label="Colours">
        {(["role", "phase", "module", ...(run.decisions ? ["decision"] : [])] as By[]).map((name) => <button key={name} type="button" data-by={name} aria-pressed={by === name} onClick={() => setBy(name)}>{name}</button>)}
      </div>
      <Field
        name="layout" height={420} label={`Address by time: an arena of ${bytes(layout.arena_bytes)} for ${blocks.bytes.length} blocks`}
        x={{ label: run.decisions ? "instructions" : "operators", min: 0, max: width, scale: "whole", format: (value) => count(value) }}
        y={{ label: told ? "address, without what nobody touches" : "address", min: 0, max: top, scale: "bytes", format: bytes }}
        depends={[painted]}
        tip={(x, y) => {
          const bucket = index[Math.max(0, Math.min(BUCKETS - 1, Math.floor((x / width) * BUCKETS)))];
          const event = Math.floor(x);
          const k = bucket.find((n) => blocks.birth[n] <= event && event < blocks.death[n] && blocks.offset[n] <= y && y < blocks.offset[n] + blocks.bytes[n]);
          if (k === undefined) return { text: `free at ${bytes(y)}` };
          const found = one(k), source = sourceOf(report, run, found);
          return { text: `${nameOf(report, run, found)} · ${bytes(found.bytes)} at ${bytes(blocks.offset[k])} · live from ${blocks.birth[k]} to ${blocks.death[k]}${source ? ` · ${source.split("/").pop()}` : ""}` };
        }}
        draw={(pen) => {
          const { at } = pen;
          for (let k = 0; k < blocks.bytes.length; k++) {
            if (blocks.offset[k] < 0 || blocks.death[k] < pen.from || blocks.birth[k] > pen.to) continue;
            const x = pen.x(blocks.birth[k]), y = pen.y(blocks.offset[k] + blocks.bytes[k]);
            const w = Math.max(0.7, pen.x(blocks.death[k]) - x), h = Math.max(0.7, pen.y(blocks.offset[k]) - y);
            at.fillStyle = colour(painted.names[painted.which[k]], painted.which[k]);
            at.globalAlpha = 0.85; at.fillRect(x, y, w, h); at.globalAlpha = 1;
            if (w > 3 && h > 3) { at.strokeStyle = pen.ink.panel; at.lineWidth = 0.6; at.strokeRect(x, y, w, h); }
          }
          if (!told) marked(pen, layout.live_bytes, `most live at once ${bytes(layout.live_bytes)}`, pen.ink.text);
        }}
      />
      <div class="legend">{painted.names.slice(0, 12).map((name, n) => <span key={name}><Swatch of={name} number={n} />{name}</span>)}</div>
    </section>
  );
}

function sampled(offset: number[], size: number[]): number[] {
  let most = 0;
  for (let k = 0; k < offset.length; k++) most = Math.max(most, offset[k] + size[k]);
  return [most];
}
