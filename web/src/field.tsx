// A canvas with axes: zoom by dragging or by keys, a cursor that answers in one line.
import { useEffect, useRef, useState } from "preact/hooks";
import { type Scale, ticks } from "./format";
import { type Ink, ink } from "./theme";

export interface AxisOf { label: string; min: number; max: number; scale: Scale; format: (value: number) => string }

/** What a view draws with: places of values, and the rectangle they lie in. */
export interface Pen {
  at: CanvasRenderingContext2D; ink: Ink; x: (value: number) => number; y: (value: number) => number;
  left: number; top: number; width: number; height: number; from: number; to: number;
}

export interface Tip { text: string; x?: number; y?: number }

export interface FieldProps {
  name: string; height: number; label: string; x: AxisOf; y: AxisOf;
  draw: (pen: Pen) => void;
  /** What is at a place, in one line. */
  tip?: (x: number, y: number, near: { x: number; y: number }) => Tip | null;
  pick?: (x: number, y: number) => void;
  /** The place to the left or right of another, for keys. */
  move?: (x: number, by: number) => number;
  /** Anything whose change means drawing anew. */
  depends?: unknown[];
  flip?: boolean;
  zooms?: boolean;
}

const FONT = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";

function forward(axis: AxisOf, value: number, from: number, to: number): number {
  if (axis.scale === "log") return (Math.log(value) - Math.log(from)) / (Math.log(to) - Math.log(from));
  return (value - from) / (to - from);
}

function inverse(axis: AxisOf, part: number, from: number, to: number): number {
  if (axis.scale === "log") return Math.exp(Math.log(from) + part * (Math.log(to) - Math.log(from)));
  return from + part * (to - from);
}

export function Field(props: FieldProps) {
  const box = useRef<HTMLDivElement>(null), base = useRef<HTMLCanvasElement>(null), top = useRef<HTMLCanvasElement>(null);
  const tipBox = useRef<HTMLDivElement>(null), said = useRef<HTMLDivElement>(null);
  const [zoom, setZoom] = useState<[number, number] | null>(null);
  const [size, setSize] = useState(0);
  const [theme, setTheme] = useState(0);
  const pen = useRef<Pen | null>(null), cursor = useRef<number | null>(null), drag = useRef<number | null>(null);
  const { x, y } = props;
  const from = zoom ? zoom[0] : x.min, to = zoom ? zoom[1] : x.max;

  useEffect(() => setZoom(null), [x.min, x.max, x.label]);
  useEffect(() => {
    const watch = new ResizeObserver((seen) => setSize(Math.floor(seen[0].contentRect.width)));
    watch.observe(box.current!);
    const changed = () => setTheme((n) => n + 1);
    addEventListener("lowtide-theme", changed);
    return () => { watch.disconnect(); removeEventListener("lowtide-theme", changed); };
  }, []);

  useEffect(() => {
    if (!size) return;
    const ratio = devicePixelRatio || 1;
    for (const canvas of [base.current!, top.current!]) {
      canvas.width = size * ratio; canvas.height = props.height * ratio;
    }
    const at = base.current!.getContext("2d")!;
    at.setTransform(ratio, 0, 0, ratio, 0, 0);
    top.current!.getContext("2d")!.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.current = drawAxes(at, size, props, from, to);
    at.save();
    at.beginPath();
    at.rect(pen.current.left, pen.current.top, pen.current.width, pen.current.height);
    at.clip();
    props.draw(pen.current);
    at.restore();
    performance.mark("lowtide-drawn");
  }, [size, theme, from, to, props.height, x.min, x.max, x.label, y.min, y.max, y.label, ...(props.depends ?? [])]);

  const valueAt = (event: { clientX: number; clientY: number }) => {
    const p = pen.current!, area = base.current!.getBoundingClientRect();
    const px = event.clientX - area.left, py = event.clientY - area.top;
    const along = (py - p.top) / p.height;
    return {
      px, py, x: inverse(x, (px - p.left) / p.width, from, to),
      y: inverse(y, props.flip ? along : 1 - along, y.min, y.max),
      inside: px >= p.left && px <= p.left + p.width && py >= p.top && py <= p.top + p.height,
    };
  };

  const clear = () => {
    top.current!.getContext("2d")!.clearRect(0, 0, size, props.height);
    tipBox.current!.hidden = true;
  };

  const show = (vx: number, vy: number) => {
    const p = pen.current;
    if (!p || !props.tip) return;
    clear();
    const found = props.tip(vx, vy, { x: Math.abs(inverse(x, 6 / p.width, from, to) - from), y: Math.abs(inverse(y, 6 / p.height, y.min, y.max) - y.min) });
    const at = top.current!.getContext("2d")!;
    const cx = p.x(found?.x ?? vx);
    at.strokeStyle = p.ink.soft; at.lineWidth = 1; at.setLineDash([3, 3]);
    at.beginPath(); at.moveTo(cx, p.top); at.lineTo(cx, p.top + p.height); at.stroke(); at.setLineDash([]);
    if (!found) return;
    if (found.y !== undefined) {
      at.fillStyle = p.ink.text; at.beginPath(); at.arc(cx, p.y(found.y), 3.5, 0, 7); at.fill();
    }
    const tip = tipBox.current!;
    tip.textContent = found.text;
    tip.hidden = false;
    const wide = tip.offsetWidth, tall = tip.offsetHeight;
    tip.style.left = `${Math.max(0, Math.min(size - wide, cx + 12 + wide > size ? cx - wide - 12 : cx + 12))}px`;
    tip.style.top = `${Math.max(0, Math.min(props.height - 30, (found.y !== undefined ? p.y(found.y) : p.y(vy)) - tall - 8))}px`;
    said.current!.textContent = found.text;
  };

  const shade = (a: number, b: number) => {
    const at = top.current!.getContext("2d")!, p = pen.current!;
    at.fillStyle = p.ink.soft; at.globalAlpha = 0.25;
    at.fillRect(Math.min(a, b), p.top, Math.abs(b - a), p.height); at.globalAlpha = 1;
  };

  const onMove = (event: PointerEvent) => {
    if (!pen.current) return;
    const v = valueAt(event);
    if (drag.current !== null && Math.abs(v.px - drag.current) > 4 && props.zooms !== false) { clear(); shade(drag.current, v.px); return; }
    if (v.inside) { cursor.current = v.x; show(v.x, v.y); } else clear();
  };
  const onDown = (event: PointerEvent) => {
    if (event.pointerType === "touch") { onMove(event); return; }
    const v = valueAt(event);
    if (v.inside) { drag.current = v.px; (event.target as Element).setPointerCapture(event.pointerId); }
  };
  const onUp = (event: PointerEvent) => {
    if (drag.current === null) return;
    const start = drag.current, v = valueAt(event), p = pen.current!;
    drag.current = null;
    clear();
    if (Math.abs(v.px - start) > 4 && props.zooms !== false) {
      const a = inverse(x, (Math.min(start, v.px) - p.left) / p.width, from, to), b = inverse(x, (Math.max(start, v.px) - p.left) / p.width, from, to);
      setZoom([Math.max(x.min, a), Math.min(x.max, b)]);
    } else if (v.inside) props.pick?.(v.x, v.y);
  };
  const scaleBy = (factor: number) => {
    const middle = cursor.current !== null && cursor.current >= from && cursor.current <= to ? cursor.current : (from + to) / 2;
    const half = ((to - from) * factor) / 2;
    if (half * 2 >= x.max - x.min) setZoom(null);
    else setZoom([Math.max(x.min, Math.min(x.max - 2 * half, middle - half)), Math.min(x.max, Math.max(x.min + 2 * half, middle + half))]);
  };
  const onKey = (event: KeyboardEvent) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (by) {
      const now = cursor.current ?? (by > 0 ? from : to);
      const next = props.move ? props.move(now, by * (event.shiftKey ? 10 : 1)) : now + (by * (to - from)) / (event.shiftKey ? 20 : 200);
      cursor.current = Math.max(x.min, Math.min(x.max, next));
      if (cursor.current < from || cursor.current > to) {
        const half = (to - from) / 2;
        setZoom([Math.max(x.min, cursor.current - half), Math.min(x.max, cursor.current + half)]);
      }
      show(cursor.current, (y.min + y.max) / 2);
    } else if (event.key === "+" || event.key === "=") scaleBy(0.5);
    else if (event.key === "-") scaleBy(2);
    else if (event.key === "0" || event.key === "Escape") { setZoom(null); clear(); }
    else if (event.key === "Enter" && cursor.current !== null) props.pick?.(cursor.current, (y.min + y.max) / 2);
    else return;
    event.preventDefault();
  };

  return (
    <div class="field" ref={box} data-field={props.name} style={{ height: `${props.height}px` }}>
      <canvas ref={base} class="base" style={{ height: `${props.height}px` }} />
      <canvas
        ref={top} class="top" style={{ height: `${props.height}px` }} tabIndex={0} role="img" aria-label={props.label}
        onPointerMove={onMove} onPointerDown={onDown} onPointerUp={onUp} onPointerLeave={clear} onKeyDown={onKey}
        onDblClick={() => setZoom(null)} onBlur={clear}
      />
      <div class="tip" ref={tipBox} hidden />
      <div class="unseen" aria-live="polite" ref={said} />
      {props.zooms !== false && (
        <div class="zoom">
          {zoom && <button type="button" onClick={() => setZoom(null)} title="Show everything (0)">whole</button>}
          <button type="button" onClick={() => scaleBy(0.5)} aria-label="Zoom in" title="Zoom in (+), or drag over a part">+</button>
          <button type="button" onClick={() => scaleBy(2)} aria-label="Zoom out" title="Zoom out (−)" disabled={!zoom}>−</button>
        </div>
      )}
    </div>
  );
}

/** Axes with round values and their units; the margin is as wide as the widest label, so none is cut off. */
function drawAxes(at: CanvasRenderingContext2D, size: number, props: FieldProps, from: number, to: number): Pen {
  const colours = ink(), { x, y, height } = props;
  at.clearRect(0, 0, size, height);
  at.font = FONT;
  const rows = ticks(y.min, y.max, Math.max(2, Math.floor(height / 48)), y.scale);
  const widest = Math.max(24, ...rows.map((value) => at.measureText(y.format(value)).width));
  const left = Math.ceil(widest) + 10, top = 22, bottom = 40, right = 14;
  const width = Math.max(10, size - left - right), high = Math.max(10, height - top - bottom);
  const px = (value: number) => left + width * forward(x, value, from, to);
  const py = (value: number) => top + high * (props.flip ? forward(y, value, y.min, y.max) : 1 - forward(y, value, y.min, y.max));
  at.strokeStyle = colours.line; at.fillStyle = colours.soft; at.lineWidth = 1;
  at.textBaseline = "middle"; at.textAlign = "right";
  for (const value of rows) {
    const place = Math.round(py(value)) + 0.5;
    at.beginPath(); at.moveTo(left, place); at.lineTo(left + width, place); at.stroke();
    at.fillText(y.format(value), left - 6, place);
  }
  at.textBaseline = "alphabetic"; at.textAlign = "left";
  at.fillText(y.label, 0, 12);
  const room = Math.max(...[from, to].map((value) => at.measureText(x.format(value)).width)) + 28;
  at.textAlign = "center";
  let last = -1e9;
  for (const value of ticks(from, to, Math.max(2, Math.floor(width / room)), x.scale)) {
    const place = Math.round(px(value)) + 0.5, text = x.format(value), half = at.measureText(text).width / 2;
    at.beginPath(); at.moveTo(place, top + high); at.lineTo(place, top + high + 4); at.stroke();
    const middle = Math.max(half, Math.min(size - half, place));
    if (middle - half > last + 8) { at.fillText(text, middle, top + high + 17); last = middle + half; }
  }
  at.textAlign = "right";
  at.fillText(x.label, left + width, height - 5);
  at.strokeStyle = colours.soft;
  at.beginPath(); at.moveTo(left + 0.5, top); at.lineTo(left + 0.5, top + high + 0.5); at.lineTo(left + width, top + high + 0.5); at.stroke();
  return { at, ink: colours, x: px, y: py, left, top, width, height: high, from, to };
}

/** Which moments are drawn, and where the last one ends. */
export interface Stretch { count: number; end: number; first?: number; after?: number; join?: boolean }

/** A step line through places and values; of neighbours in one pixel no more than the extremes are drawn. */
export function stepPath(pen: Pen, place: (k: number) => number, value: (k: number) => number, stretch: Stretch): void {
  const { at } = pen, { count, end, first = 0, after = count, join = false } = stretch;
  if (after <= first) return;
  let px = pen.x(place(first)), py = pen.y(value(first)), low = py, high = py, column = Math.floor(px);
  if (join) at.lineTo(px, py); else at.moveTo(px, py);
  for (let k = first + 1; k < after; k++) {
    const x = pen.x(place(k)), y = pen.y(value(k));
    if (Math.floor(x) !== column) {
      at.lineTo(px, py);
      at.lineTo(x, py);
      at.lineTo(x, y);
      column = Math.floor(x);
      low = high = y;
    } else if (y < low) { low = y; at.lineTo(x, y); } else if (y > high) { high = y; at.lineTo(x, y); }
    px = x; py = y;
  }
  at.lineTo(px, py);
  at.lineTo(pen.x(after < count ? place(after) : end), py);
}

/** A dashed line with its words above it at one end, moved inside where they would be cut off. */
export function marked(pen: Pen, value: number, words: string, stroke: string, end: "left" | "right" = "right"): void {
  const { at } = pen, place = Math.round(pen.y(value)) + 0.5;
  at.save();
  at.strokeStyle = stroke; at.setLineDash([7, 5]); at.lineWidth = 1.5;
  at.beginPath(); at.moveTo(pen.left, place); at.lineTo(pen.left + pen.width, place); at.stroke();
  at.setLineDash([]);
  at.font = FONT; at.textAlign = "right";
  const wide = at.measureText(words).width, above = place - 6 > pen.top + 10;
  const middle = above ? place - 6 : place + 15, right = end === "right" ? pen.left + pen.width - 5 : pen.left + 8 + wide;
  at.fillStyle = pen.ink.panel; at.globalAlpha = 0.8;
  at.fillRect(right - wide - 3, middle - 11, wide + 6, 14);
  at.globalAlpha = 1; at.fillStyle = stroke;
  at.fillText(words, right, middle);
  at.restore();
}
