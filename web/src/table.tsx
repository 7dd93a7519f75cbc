// A table that can be searched and sorted; only the rows in sight are part of the page.
import type { ComponentChildren } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";

export interface ColumnOf<T> {
  title: string; key: (row: T) => number | string | null; show?: (row: T) => ComponentChildren; right?: boolean; wide?: boolean; help?: string;
}

const ROW = 30, MOST = 14;

export function Table<T>(props: { name: string; rows: T[]; columns: ColumnOf<T>[]; text: (row: T) => string; sort: number; up?: boolean; label: string; pick?: (row: T) => void; children?: ComponentChildren }) {
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState<[number, boolean]>([props.sort, props.up ?? false]);
  const [scrolled, setScrolled] = useState(0);
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
  const sortBy = (k: number) => setOrder(order[0] === k ? [k, !order[1]] : [k, typeof props.columns[k].key(props.rows[0]) === "string"]);
  return (
    <div class="table" data-table={props.name}>
      <div class="bar">
        <input type="search" placeholder="Search names, modules, lines …" aria-label={`Search ${props.label}`} value={search} onInput={(event) => { setSearch(event.currentTarget.value); box.current!.scrollTop = 0; }} />
        {props.children}
        <span class="soft" role="status">{found.length === props.rows.length ? `${found.length.toLocaleString("en")} rows` : `${found.length.toLocaleString("en")} of ${props.rows.length.toLocaleString("en")} rows`}</span>
      </div>
      <div class="scroll" ref={box} tabIndex={0} onScroll={(event) => setScrolled(event.currentTarget.scrollTop)} style={{ maxHeight: `${high + 40}px` }} aria-label={props.label}>
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
              <tr key={first + k} class={props.pick ? "picks" : ""} onClick={props.pick && (() => props.pick!(row))}>
                {props.columns.map((column) => {
                  const shown = column.show ? column.show(row) : column.key(row) ?? "–";
                  return <td key={column.title} class={`${column.right ? "right" : ""} ${column.wide ? "wide" : ""}`} title={column.wide && typeof shown === "string" ? shown : undefined}>{shown}</td>;
                })}
              </tr>
            ))}
            {last < found.length && <tr style={{ height: `${(found.length - last) * ROW}px` }} aria-hidden="true" />}
          </tbody>
        </table>
        {!found.length && <p class="soft pad">Nothing matches.</p>}
      </div>
    </div>
  );
}
