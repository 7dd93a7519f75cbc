// Small parts that views share.
import type { ComponentChildren } from "preact";
import { colour } from "./theme";
import type { Report, RunView } from "./types";
import { bytes } from "./format";

export const Swatch = ({ of, number = 0 }: { of: string; number?: number }) => <span class="swatch" style={{ background: colour(of, number) }} />;

export const Tag = ({ of }: { of: string }) => <span class="tag"><Swatch of={of} />{of}</span>;

/** The phases of a step with their colours. */
export function Phases({ report, run }: { report: Report; run: RunView }) {
  const names = [...new Set(report.steps[run.step].operators.phase)].map((word) => report.words[word]);
  return <>{names.map((name) => <span key={name}><Swatch of={name} />{name}</span>)}</>;
}

export function Meter({ part, of }: { part: number; of: string }) {
  return <span class="meter" style={{ width: `${Math.max(1, Math.round(part * 90))}px`, background: colour(of, 0) }} />;
}

export function Missing({ children }: { children: ComponentChildren }) {
  return <section><p class="soft">{children}</p></section>;
}

/** The line that a moment says about itself. */
export function momentText(report: Report, run: RunView, k: number): string {
  const { operators } = report.steps[run.step], { moments } = run, words = report.words;
  const row = moments.operator[k];
  const parts = [`${bytes(moments.live[k])}`, `${words[operators.name[row]]}${words[operators.module[row]] ? ` in ${words[operators.module[row]]}` : ""}`, words[operators.phase[row]]];
  if (moments.again[k]) parts.push("run again");
  if (moments.tile.length && moments.tile[k] >= 0) parts.push(`tile ${moments.tile[k] + 1}`);
  const parent = operators.parent[row];
  if (parent >= 0) parts.push(`inside ${words[operators.name[parent]]}`);
  return parts.join(" · ");
}

/** Text that is copied by a button. */
export function Code({ text, name }: { text: string; name: string }) {
  const copy = async (event: MouseEvent) => {
    const button = event.currentTarget as HTMLButtonElement;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(button.previousElementSibling!);
      const chosen = getSelection()!;
      chosen.removeAllRanges();
      chosen.addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  };
  return <div class="copy"><pre data-code={name}>{text}</pre><button type="button" onClick={copy}>copy</button></div>;
}
