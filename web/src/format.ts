// Numbers as people read them, and ticks of axes.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];

function scaled(value: number, base: number, units: string[]): [number, string] {
  let size = value, k = 0;
  while (Math.abs(size) >= base * 0.9995 && k < units.length - 1) { size /= base; k++; }
  return [size, units[k]];
}

function digits(value: number): string {
  const size = Math.abs(value);
  return size >= 100 || value === 0 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** `1536` as `1.50 KiB`. */
export function bytes(value: number | null | undefined): string {
  if (value == null) return "–";
  const [size, unit] = scaled(value, 1024, BINARY);
  return `${unit === "B" ? size.toFixed(0) : digits(size)} ${unit}`;
}

/** `0.0227` as `22.7 ms`; with unit costs, which are no times, `23 units`. */
export function seconds(value: number | null | undefined, cost = ""): string {
  if (value == null) return "–";
  if (cost === "unit") return `${Number(value.toFixed(3))} units`;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-6) return `${digits(value * 1e9)} ns`;
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  return `${digits(value)} s`;
}

/** `8.1e10` as `81.0 G`, with the unit behind it. */
export function count(value: number | null | undefined, unit = ""): string {
  if (value == null) return "–";
  const [size, prefix] = scaled(value, 1000, DECIMAL);
  return `${prefix === "" && Number.isInteger(size) ? size : digits(size)} ${prefix}${unit}`.trim();
}

/** `0.135` as `+13.5%`. */
export function change(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const text = (value * 100).toFixed(Math.abs(value) < 0.0995 ? 1 : 0);
  return `${value >= 0 ? "+" : "−"}${text.replace("-", "")}%`;
}

export function share(value: number): string {
  return value > 0 && value < 0.001 ? "<0.1%" : `${(value * 100).toFixed(value < 0.0995 ? 1 : 0)}%`;
}

export type Scale = "bytes" | "seconds" | "number" | "whole" | "log";

/** Round values for an axis from `low` to `high`, about as many as asked. */
export function ticks(low: number, high: number, about: number, scale: Scale): number[] {
  if (!(high > low) || about < 1) return [];
  if (scale === "log") return decades(low, high, about);
  const base = scale === "bytes" ? 2 : 10;
  const rough = (high - low) / about;
  let step: number;
  if (base === 2) {
    const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(rough, 1)) / Math.log(1024) + 1e-9));
    const inUnit = rough / unit;
    step = unit * (inUnit > 512 ? 1024 : inUnit > 100 ? 2 ** Math.ceil(Math.log2(inUnit)) : nice(inUnit));
    if (unit === 1) step = Math.max(1, Math.ceil(step));
  } else {
    step = scale === "whole" ? Math.max(1, nice(rough)) : nice(rough);
  }
  const found: number[] = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + 1e-300; k++) found.push(k * step + 0);
  return found;
}

function nice(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value));
  const lead = value / power;
  return power * (lead <= 1.000001 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
}

function decades(low: number, high: number, about: number): number[] {
  const from = Math.floor(Math.log10(low) + 1e-9), to = Math.floor(Math.log10(high) + 1e-9);
  const each = Math.max(1, Math.ceil((to - from + 1) / about));
  const leads = (to - from + 1) * 3 <= about ? [1, 2, 5] : [1];
  const found: number[] = [];
  for (let k = from; k <= to; k += each) for (const lead of leads) if (lead * 10 ** k >= low && lead * 10 ** k <= high) found.push(lead * 10 ** k);
  return found;
}

/** The last parts of a path that fit into so many characters. */
export function tail(text: string, most: number): string {
  return text.length <= most ? text : `…${text.slice(text.length - most + 1)}`;
}

/** `1 row`, `2,000 rows`. */
export const plural = (count: number, what: string): string => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
