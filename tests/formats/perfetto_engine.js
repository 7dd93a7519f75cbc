// Perfetto's trace processor, compiled to WebAssembly: requests from standard input, replies to standard output.
// node perfetto_engine.js FOLDER, where FOLDER has engine_bundle.js and trace_processor.wasm.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const log = (...words) => process.stderr.write(words.join(" ") + "\n");

/** The engine reads its module as a worker of a browser does. */
class FileRequest {
  open(_, name) {
    this.name = path.basename(name);
  }
  send() {
    this.response = fs.readFileSync(path.join(folder, this.name));
  }
}

const scope = {
  console: { log, warn: log, error: log, debug: log, info: log },
  XMLHttpRequest: FileRequest,
  WorkerGlobalScope: class {},
  location: { href: "http://localhost/engine_bundle.js" },
  importScripts() {},
  process: undefined,
  require: undefined,
};
scope.self = scope;
const script = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
vm.compileFunction(script, Object.keys(scope), { filename: "engine_bundle.js" })(...Object.values(scope));

const port = {
  onmessage: null,
  postMessage(reply) {
    for (let at = 0; at < reply.length; ) at += fs.writeSync(1, reply, at);
  },
};
scope.onmessage({ data: port });
setImmediate(() => {
  process.stdin.on("data", (chunk) => port.onmessage({ data: chunk }));
  process.stdin.on("end", () => process.exit(0));
});
