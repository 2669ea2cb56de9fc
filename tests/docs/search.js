// node search.js SITE: run the site's own search for each line of standard input; write the addresses of the pages found, best first.
const fs = require("fs"), path = require("path");
const workers = path.join(process.argv[2], "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(process.argv[2], "search/search_index.json")));

let receive, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => (receive = listener);
globalThis.postMessage = (message) => answer(message);
require(path.join(workers, worker));
const ask = (type, data) => new Promise((resolve) => ((answer = resolve), receive({ data: { type, data } })));

(async () => {
  await ask(0, { ...index, options: {} });
  for (const line of fs.readFileSync(0, "utf8").trim().split("\n")) {
    const { data } = await ask(2, line);
    console.log(JSON.stringify({ query: line, pages: data.items.map((sections) => sections[0].location.split("#")[0]) }));
  }
})();
