import { render } from "preact";
import { App } from "./app";
import type { Report } from "./types";

const holder = document.getElementById("report")!;
const root = document.getElementById("app")!;
performance.mark("lowtide-started");
try {
  const report = JSON.parse(holder.textContent!) as Report;
  if (report.lowtide !== "report" || report.version !== 1) throw new Error(`a report of version ${report.version}`);
  performance.mark("lowtide-read");
  document.title = report.title;
  root.textContent = "";
  render(<App report={report} />, root);
} catch (error) {
  root.textContent = `This page has no report that it can draw: ${(error as Error).message}`;
}
