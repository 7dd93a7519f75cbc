// The frame of the page: title, views, and which ways to run the step are compared.
import type { FunctionComponent } from "preact";
import { useEffect, useState } from "preact/hooks";
import { firstPair } from "./data";
import { preferred, type Theme } from "./theme";
import type { Report, RunView } from "./types";
import { Categories } from "./views/categories";
import { Compare } from "./views/compare";
import { Tradeoff } from "./views/tradeoff";
import { Decisions } from "./views/decisions";
import { GraphView } from "./views/graph";
import { Lanes } from "./views/lanes";
import { Layout } from "./views/layout";
import { Operators } from "./views/operators";
import { Overview } from "./views/overview";
import { Peak } from "./views/peak";
import { Shards } from "./views/shards";
import { Tiles } from "./views/tiles";

/** What every view is given. */
export interface Shown {
  report: Report; before: RunView; after: RunView; run: RunView; which: "before" | "after";
  setWhich: (which: "before" | "after") => void;
  /** The moment that `Peak` looks at; null: the peak itself. */
  moment: number | null;
  look: (which: "before" | "after", moment: number | null) => void;
  go: (view: string) => void;
}

interface View { id: string; title: string; component: FunctionComponent<Shown>; single: boolean; has: (report: Report) => boolean }

const some = (test: (run: RunView) => boolean) => (report: Report) => report.runs.some(test);
const drawn = some((run) => run.moments.live.length > 0);

const VIEWS: View[] = [
  { id: "overview", title: "Overview", component: Overview, single: false, has: () => true },
  { id: "peak", title: "Peak", component: Peak, single: true, has: drawn },
  { id: "categories", title: "Categories", component: Categories, single: true, has: drawn },
  { id: "decisions", title: "Decisions", component: Decisions, single: true, has: some((run) => run.decisions !== null) },
  { id: "budgets", title: "Budgets", component: Tradeoff, single: false, has: (report) => report.tradeoff !== null },
  { id: "compare", title: "Difference", component: Compare, single: false, has: (report) => report.runs.filter((run) => run.moments.live.length).length > 1 },
  { id: "layout", title: "Layout", component: Layout, single: true, has: some((run) => run.layout !== null) },
  { id: "lanes", title: "Lanes", component: Lanes, single: true, has: some((run) => run.moments.start.length > 0 || run.lanes.length > 0) },
  { id: "operators", title: "Operators", component: Operators, single: true, has: (report) => report.steps.some((step) => step.operators.name.length > 0) },
  { id: "tiles", title: "Tiles", component: Tiles, single: true, has: some((run) => run.loops.length > 0) },
  { id: "shards", title: "Shards", component: Shards, single: false, has: (report) => report.shards.length > 0 },
  { id: "graph", title: "Graph", component: GraphView, single: true, has: (report) => report.steps.some((step) => step.operators.name.length > 0) },
];

/** Views that are not about a way to run the step, or two. */
const ALONE = new Set(["budgets", "shards"]);

const EMPTY = { title: "", about: "" };

export function App({ report }: { report: Report }) {
  const views = VIEWS.filter((view) => view.has(report) && (report.runs.length > 0 || view.id === "budgets"));
  const known = (name: string) => views.find((view) => view.id === name)?.id ?? views[0]?.id ?? "";
  const [view, setView] = useState(known(location.hash.slice(1)));
  const [pair, setPair] = useState<[number, number]>(firstPair(report.runs));
  const [which, setWhich] = useState<"before" | "after">("after");
  const [moment, setMoment] = useState<number | null>(null);
  const [theme, setTheme] = useState<Theme>(preferred());

  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("lowtide-theme"));
  }, [theme]);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)"), changed = () => setTheme(preferred()), moved = () => setView(known(location.hash.slice(1)));
    media.addEventListener("change", changed);
    addEventListener("hashchange", moved);
    return () => { media.removeEventListener("change", changed); removeEventListener("hashchange", moved); };
  }, []);

  useEffect(() => document.getElementById(`tab-${view}`)?.scrollIntoView({ block: "nearest", inline: "nearest" }), [view]);
  const go = (name: string) => { setView(known(name)); history.replaceState(null, "", `#${name}`); };
  const onKey = (event: KeyboardEvent) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!by) return;
    const at = views.findIndex((one) => one.id === view), next = views[(at + by + views.length) % views.length];
    go(next.id);
    document.getElementById(`tab-${next.id}`)?.focus();
    event.preventDefault();
  };
  const chosen = views.find((one) => one.id === view);
  const before = report.runs[pair[0]], after = report.runs[pair[1]];
  const shown: Shown = {
    report, before, after, run: which === "before" ? before : after, which, setWhich, moment,
    look: (side, at) => { setWhich(side); setMoment(at); go("peak"); }, go,
  };
  const pick = (side: 0 | 1, value: number) => { setPair(side ? [pair[0], value] : [value, pair[1]]); setMoment(null); };
  const { title, about } = report ?? EMPTY;
  return (
    <>
      <header>
        <div class="head">
          <div><h1>{title}</h1>{about && <p class="soft">{about}</p>}</div>
          <button type="button" id="theme" onClick={() => setTheme(theme === "dark" ? "light" : "dark")} aria-label={`Switch to ${theme === "dark" ? "light" : "dark"} colours`} title="Light or dark">{theme === "dark" ? "☀" : "☾"}</button>
        </div>
      </header>
      <nav aria-label="Views">
        <div class="tabs" role="tablist" onKeyDown={onKey}>
          {views.map((one) => (
            <button key={one.id} id={`tab-${one.id}`} type="button" role="tab" aria-selected={one.id === view} aria-controls="view" tabIndex={one.id === view ? 0 : -1} onClick={() => go(one.id)}>{one.title}</button>
          ))}
        </div>
      </nav>
      <main id="view" role="tabpanel" aria-labelledby={`tab-${view}`}>
        {report.runs.length > 1 && !ALONE.has(chosen?.id ?? "") && (
          <div class="pair">
            {(["before", "after"] as const).map((side, k) => (
              <label key={side}>
                {chosen?.single
                  ? <button type="button" aria-pressed={which === side} data-which={side} style={which === side ? { borderColor: "var(--accent)", background: "var(--mark)" } : {}} onClick={() => { setWhich(side); setMoment(null); }}><span class="swatch" style={{ background: `var(--${side})` }} /> {side}</button>
                  : <><span class="swatch" style={{ background: `var(--${side})` }} /> {side}</>}
                <select aria-label={`The way that is shown as ${side}`} value={pair[k]} onChange={(event) => pick(k as 0 | 1, Number(event.currentTarget.value))}>
                  {report.runs.map((run, n) => <option key={n} value={n}>{run.name}</option>)}
                </select>
              </label>
            ))}
          </div>
        )}
        {(report.runs.length <= 1 || ALONE.has(chosen?.id ?? "")) && <div style={{ height: "16px" }} />}
        {chosen && <chosen.component {...shown} key={chosen.id} />}
      </main>
      <footer>
        {report.notes.map((note) => <div key={note}>{note}.</div>)}
        <div>{report.made_by && `Made by ${report.made_by}. `}Bytes are those that the allocator takes; 1 MiB = 2²⁰ bytes.</div>
      </footer>
    </>
  );
}
