// What both pages need: the token, requests, the stream of events, and how numbers are shown.

const KEY = "trainbus token";
const brought = /^#token=([^&]+)$/.exec(location.hash);
if (brought) {
  sessionStorage.setItem(KEY, decodeURIComponent(brought[1]));
  history.replaceState(null, "", location.pathname + location.search);  // it is not left in the address bar
}
addEventListener("hashchange", () => location.hash.startsWith("#token=") && location.reload());

export const $ = id => document.getElementById(id);
const headers = () => (sessionStorage.getItem(KEY) ? { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});
const sleep = seconds => new Promise(done => setTimeout(done, 1000 * seconds));

/** Send a request; return {ok, status, error, body}. */
export async function ask(url, options = {}) {
  const answer = await fetch(url, { ...options, headers: headers(), cache: "no-store" }).catch(() => null);
  if (!answer) return { ok: false, status: 0, error: "The server does not answer." };
  const text = await answer.text();
  let body = null;
  try { body = JSON.parse(text); } catch { /* no JSON */ }
  return { ok: answer.ok, status: answer.status, error: body?.error ?? text, body };
}

/** Call handle(kind, data) for each server-sent event until the last one; status(text, error) when the connection changes. */
export async function listen(url, handle, status) {
  let last = "", wait = 0.5;
  for (;;) {
    try {
      const accept = { Accept: "text/event-stream" };  // some proxies pass an answer on as it comes only if this asks for it
      const answer = await fetch(url, { headers: { ...headers(), ...accept, ...(last && { "Last-Event-ID": last }) }, cache: "no-store" });
      if (answer.status === 204) return;
      if (answer.status === 401 || answer.status === 404) return status("refused", (await answer.json().catch(() => ({}))).error);
      if (answer.ok) {
        status("connected");
        wait = 0.5;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let rest = "";;) {
          const { value, done } = await reader.read();
          if (done) break;
          const messages = (rest + value).split("\n\n");
          rest = messages.pop();
          for (const message of messages) {
            const fields = Object.fromEntries(message.split("\n").map(line => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
            if (!fields.data) continue;
            last = fields.id;
            if (handle(fields.event, JSON.parse(fields.data)) === "last") return;
          }
        }
      }
    } catch { /* the connection was lost */ }
    status("lost");
    await sleep(wait);
    wait = Math.min(2 * wait, 10);
  }
}

/** Make an element: make("td", {className: "number"}, "text", child). */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function show(number) {
  if (number === null || number === undefined) return "–";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-4) return number.toExponential(2);
  return size >= 100 ? number.toFixed(1) : String(Number(number.toPrecision(4)));
}

export const whole = number => Number(number).toLocaleString("en");
export const clock = seconds => new Date(1000 * seconds).toLocaleTimeString("en-GB");

export function duration(seconds) {
  if (seconds < 1e-3) return `${(1e6 * seconds).toFixed(0)} µs`;
  if (seconds < 1) return `${(1e3 * seconds).toPrecision(3)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

export function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return `${Number(bytes.toPrecision(3))} ${unit}`;
    bytes /= 1000;
  }
  return `${Number(bytes.toPrecision(3))} TB`;
}
