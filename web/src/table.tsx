// A table that can be searched and sorted; only the rows in sight are part of the page.
import type { ComponentChildren } from "preact";
import { plural } from "./format";
import { useMemo, useRef, useState } from "preact/hooks";

export interface ColumnOf<T> {
  title: string; key: (row: T) => number | string | null; show?: (row: T) => ComponentChildren; right?: boolean; wide?: boolean; help?: string;
  /** What the row below the table says, where a cell has less. */
  full?: (row: T) => string;
}

const ROW = 30, MOST = 14;

export function Table<T>(props: { name: string; rows: T[]; columns: ColumnOf<T>[]; text: (row: T) => string; sort: number; up?: boolean; label: string; pick?: (row: T) => void; children?: ComponentChildren; /** Why there are no rows. */ none?: string }) {
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState<[number, boolean]>([props.sort, props.up ?? false]);
  const [scrolled, setScrolled] = useState(0);
  const [chosen, setChosen] = useState<T | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const found = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = words.length ? props.rows.filter((row) => { const text = props.text(row).toLowerCase(); return words.every((word) => text.includes(word)); }) : props.rows.slice();
    const key = props.columns[Math.min(order[0], props.columns.length - 1)].key, sign = order[1] ? 1 : -1;
    const value = (row: T) => key(row) ?? -Infinity;
    return rows.sort((a, b) => { const x = value(a), y = value(b); return x < y ? -sign : x > y ? sign : 0; });
  }, [props.rows, search, order]);
  const high = Math.min(found.length, MOST) * ROW;
  const first = Math.max(0, Math.floor(scrolled / ROW) - 4), last = Math.min(found.length, first + MOST + 9);
  const sortBy = (k: number) => setOrder(order[0] === k ? [k, !order[1]] : [k, props.rows.length > 0 && typeof props.columns[k].key(props.rows[0]) === "string"]);
  const at = chosen === null ? -1 : found.indexOf(chosen);
  const onKey = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: MOST, PageUp: -MOST, Home: -found.length, End: found.length }[event.key];
    if (event.key === "Escape") setChosen(null);
    else if (event.key === "Enter" && at >= 0) props.pick?.(found[at]);
    else if (step !== undefined && found.length && event.target === box.current) {
      const rows = box.current!, next = Math.max(0, Math.min(found.length - 1, at < 0 ? Math.floor(rows.scrollTop / ROW) : at + step));
      setChosen(found[next]);
      rows.scrollTop = Math.max(Math.min(rows.scrollTop, next * ROW), (next + 1) * ROW - high);
      event.preventDefault();
    }
  };
  return (
    <div class="table" data-table={props.name}>
      <div class="bar">
        <input type="search" placeholder="Search names, modules, lines …" aria-label={`Search ${props.label}`} value={search} onInput={(event) => { setSearch(event.currentTarget.value); box.current!.scrollTop = 0; }} />
        {props.children}
        {!props.pick && found.length > 0 && <span class="soft">Click a row to read it whole</span>}
        <span class="soft" role="status">{found.length === props.rows.length ? plural(found.length, "row") : `${found.length.toLocaleString("en")} of ${plural(props.rows.length, "row")}`}</span>
      </div>
      <div class="scroll" ref={box} tabIndex={0} onKeyDown={onKey} onScroll={(event) => setScrolled(event.currentTarget.scrollTop)} style={{ maxHeight: `${high + 40}px` }} aria-label={props.label}>
        <table>
          <thead>
            <tr>{props.columns.map((column, k) => (
              <th key={column.title} class={`${column.right ? "right" : ""} ${column.wide ? "wide" : ""}`} aria-sort={order[0] === k ? (order[1] ? "ascending" : "descending") : "none"}>
                <button type="button" title={column.help ?? `Sort by ${column.title}`} onClick={() => sortBy(k)}>{column.title}{order[0] === k ? (order[1] ? " ↑" : " ↓") : ""}</button>
              </th>
            ))}</tr>
          </thead>
          <tbody>
            {first > 0 && <tr style={{ height: `${first * ROW}px` }} aria-hidden="true" />}
            {found.slice(first, last).map((row, k) => (
              <tr key={first + k} class={`picks${row === chosen ? " chosen" : ""}`} onClick={() => (props.pick ? props.pick(row) : setChosen(row === chosen ? null : row))}>
                {props.columns.map((column) => {
                  const shown = column.show ? column.show(row) : column.key(row) ?? "–";
                  return <td key={column.title} class={`${column.right ? "right" : ""} ${column.wide ? "wide" : ""}`} title={column.wide && typeof shown === "string" ? shown : undefined}>{shown}</td>;
                })}
              </tr>
            ))}
            {last < found.length && <tr style={{ height: `${(found.length - last) * ROW}px` }} aria-hidden="true" />}
          </tbody>
        </table>
        {!found.length && <p class="soft pad">{props.rows.length ? "Nothing matches." : props.none ?? "There is nothing to list."}</p>}
      </div>
      {at >= 0 && (
        <dl class="detail" role="status" aria-label={`The row that is chosen in ${props.label}`}>
          {props.columns.map((column) => <div key={column.title}><dt>{column.title}</dt><dd>{column.full?.(found[at]) ?? (column.show ? column.show(found[at]) : column.key(found[at]) ?? "–")}</dd></div>)}
        </dl>
      )}
    </div>
  );
}
