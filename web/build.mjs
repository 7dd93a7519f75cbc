// Builds the one file that ships in the package: src/lowtide/report/page/page.html. With --test: the tests.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "src", "lowtide", "report", "page", "page.html");

/** All files below a folder, sorted. */
function files(folder) {
  return readdirSync(folder, { withFileTypes: true })
    .flatMap((one) => (one.isDirectory() ? files(join(folder, one.name)) : [join(folder, one.name)]))
    .sort();
}

/** What the page is built from: tests/report/test_page.py computes the same. */
function sourceHash() {
  const hash = createHash("sha256");
  const all = [...files(join(here, "src")), ...["build.mjs", "package-lock.json"].map((name) => join(here, name))];
  for (const path of all) {
    hash.update(relative(here, path).replaceAll("\\", "/"));
    hash.update("\0");
    hash.update(readFileSync(path));
    hash.update("\0");
  }
  return hash.digest("hex");
}

const common = { bundle: true, target: "es2022", jsx: "automatic", jsxImportSource: "preact", logLevel: "warning" };

if (process.argv.includes("--test")) {
  const tests = files(join(here, "test")).filter((name) => name.endsWith(".test.ts"));
  await build({ ...common, entryPoints: tests, outdir: join(here, "build"), platform: "node", format: "esm", outExtension: { ".js": ".mjs" } });
} else {
  const script = await build({ ...common, entryPoints: [join(here, "src", "main.tsx")], write: false, minify: true, format: "iife", charset: "utf8" });
  const style = await build({ entryPoints: [join(here, "src", "style.css")], write: false, minify: true, charset: "utf8" });
  const parts = {
    STYLE: style.outputFiles[0].text.trim(),
    SCRIPT: script.outputFiles[0].text.trim().replaceAll("</script", "<\\/script"),
    SOURCE: sourceHash(),
  };
  let page = readFileSync(join(here, "src", "index.html"), "utf8");
  for (const [name, text] of Object.entries(parts)) page = page.split(`{{${name}}}`).join(text);
  mkdirSync(dirname(target), { recursive: true });
  writeFileSync(target, page);
  console.log(`${relative(process.cwd(), target)}: ${page.length} characters, source ${parts.SOURCE.slice(0, 12)}`);
}
