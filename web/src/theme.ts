// Colours: one for each thing, the same in every view.

export const PALETTE = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#8a94a3"];

const FIXED: Record<string, string> = {
  kept: "#4e79a7", recomputed: "#f28e2b", offloaded: "#b07aa1", tiled: "#59a14f", fused: "#76b7b2", "in place": "#e58aa0",
  temporary: "#9aa5b1", resident: "#6b7785", result: "#9c755f", sharded: "#edc948", replicated: "#8a94a3", summed: "#59a14f",
  halo: "#f28e2b", gather: "#b07aa1", sum: "#59a14f", "scattered sum": "#76b7b2", communication: "#f28e2b",
  parameter: "#6b7785", buffer: "#8a94a3", constant: "#a8b0ba", input: "#59a14f", optimizer: "#9c755f", activation: "#4e79a7",
  gradient: "#e15759", "made by backward": "#e8a3a0", workspace: "#edc948", again: "#f28e2b", fetched: "#b07aa1", given: "#76b7b2", copy: "#ff9da7", restore: "#ff9da7", other: "#8a94a3", leaf: "#6b7785",
  forward: "#4e79a7", backward: "#e15759", update: "#9c755f",
  "taken in forward": "#4e79a7", "taken in backward": "#e15759", "taken in update": "#9c755f", "before the step": "#6b7785",
  "outside the step": "#a8b0ba", "not annotated": "#9aa5b1", "no module": "#9aa5b1",
};

/** The colour of a category; others get one from the palette by their number. */
export const colour = (name: string, number: number): string => FIXED[name] ?? PALETTE[number % PALETTE.length];

export type Theme = "light" | "dark";

export function preferred(): Theme {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Colours of the page as it is shown now, for canvases. */
export interface Ink { text: string; soft: string; line: string; panel: string; before: string; after: string; budget: string; measured: string }

export function ink(): Ink {
  const style = getComputedStyle(document.documentElement);
  const value = (name: string) => style.getPropertyValue(name).trim();
  return {
    text: value("--text"), soft: value("--soft"), line: value("--line"), panel: value("--panel"),
    before: value("--before"), after: value("--after"), budget: value("--budget"), measured: value("--measured"),
  };
}
