// The web view: asks for the status every two seconds and shows it. It changes nothing anywhere.
"use strict";

const PERIOD_MS = 2000;
const MOST_SAMPLES = 900;
const MOST_ROWS = 200;
const KEY = "skyproxy-key";
const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEY) || "";
let samples = [];
let last = null;

function size(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = Number(count) || 0, unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit > 0 ? 1 : 0)} ${units[unit]}`;
}
const count = (value) => (Number(value) || 0).toLocaleString("en", { maximumFractionDigits: 1 });
const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
function age(seconds) {
  const all = Math.round(Number(seconds) || 0);
  return all < 120 ? `${all} s` : all < 7200 ? `${Math.round(all / 60)} min` : `${Math.round(all / 3600)} h`;
}

function table(id, head, rows, empty) {
  const line = (cells, kind) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const made = document.createElement(kind);
      made.textContent = cell === undefined || cell === null ? "" : String(cell);
      row.append(made);
    }
    return row;
  };
  const lines = rows.slice(0, MOST_ROWS).map((cells) => line(cells, "td"));
  if (lines.length === 0) {
    const nothing = line([empty], "td");
    nothing.firstChild.className = "empty";
    lines.push(nothing);
  } else {
    lines.unshift(line(head, "th"));
  }
  byId(id).replaceChildren(...lines);
}

// What a worker answers by itself, in the form that the local server gives.
const document_of = (answer) => (answer.workers ? answer : {
  at: Date.now() / 1000, title: answer.client, workers: [{ name: location.host, ...answer }], program: null,
});

function sample_of(status) {
  const sum = (name) => status.workers.reduce(
    (all, worker) => all + (worker.sessions || []).reduce((part, row) => part + (row[name] || 0), 0), 0);
  const commands = status.workers.reduce((all, one) => all + ((one.worker || {}).commands || 0), 0);
  const memory = status.workers.reduce((all, one) => all + ((one.worker || {}).devices || []).reduce(
    (part, device) => part + (device.used_memory_bytes || 0), 0), 0);
  const now = {
    at: status.at, memory: memory || sum("tensor_bytes"), commands: commands || sum("commands"),
    received: sum("bytes_received"), sent: sum("bytes_sent"),
  };
  const before = last;
  last = now;
  const seconds = before ? now.at - before.at : 0;
  const rate = (name) => (seconds > 0 ? Math.max(now[name] - before[name], 0) / seconds : 0);
  return [now.at, now.memory, rate("commands"), rate("received"), rate("sent")];
}

function show_plots(status) {
  samples = (status.history || [...samples, sample_of(status)]).slice(-MOST_SAMPLES);
  const column = (number) => samples.map((row) => [row[0], row[number]]);
  const now = samples[samples.length - 1] || [0, 0, 0, 0, 0];
  byId("memory-now").textContent = `${size(now[1])}, at most ${size(drawLines(byId("memory"), [column(1)]))}`;
  byId("ops-now").textContent = `${count(now[2])}, at most ${count(drawLines(byId("ops"), [column(2)]))}`;
  drawLines(byId("bytes"), [column(3), column(4)]);
  byId("bytes-now").textContent = `${size(now[3])} in, ${size(now[4])} out`;
}

function show_workers(workers) {
  table("workers", ["worker", "state", "devices", "memory used", "functions", "idle", "torch"], workers.map((one) => {
    const worker = one.worker || {};
    const devices = (worker.devices || []).map((row) => `${row.type}:${row.index}`).join(", ");
    const used = (worker.devices || []).reduce((all, row) => all + (row.used_memory_bytes || 0), 0);
    const state = one.problem || (one.is_admin ? "answers" : "answers; the token shows its own sessions only");
    return [one.name, state, devices, used ? size(used) : "", worker.calls_running,
      worker.idle_seconds === undefined ? "" : age(worker.idle_seconds), (worker.software || {}).torch];
  }), "No worker yet: the first use of sky:0 starts or connects one.");
}

function show_sessions(workers, program) {
  const own = new Map(((program || {}).sessions || []).map((row) => [row.session, row]));
  const rows = workers.flatMap((worker) => (worker.sessions || []).map((row) => {
    const mine = own.get(row.session) || {};
    const running = (row.running || {}).op ? `${row.running.op}${mine.line ? ` at ${mine.line}` : ""}` : row.state;
    // What left the program and is not executed yet, where the program tells; else what waits on the worker.
    const queue = mine.queued_batches === undefined
      ? `${count(row.queued_operations)} operations, ${size(row.queued_bytes)}`
      : `${count(mine.queued_batches)} batches, ${size(mine.queued_bytes)}`;
    return [row.session, `${row.client}${row.address ? ` (${row.address})` : ""}`, age(row.seconds), running,
      count(row.commands), count(row.tensors), size(row.tensor_bytes), queue,
      `${size(row.bytes_received)} in, ${size(row.bytes_sent)} out`];
  }));
  table("sessions", ["session", "client", "since", "running", "operations", "tensors", "bytes", "queue", "transfers"],
    rows, "No session.");
}

function show_calls(workers) {
  const rows = workers.flatMap((worker) => (worker.sessions || []).flatMap(
    (row) => (row.calls || []).map((call) => [worker.name, row.session, call.name, age(call.seconds)])));
  table("calls", ["worker", "session", "function", "for"], rows, "No function runs.");
}

function show_jobs(workers) {
  const jobs = workers.flatMap((worker) => (worker.jobs || []).map((job) => ({ worker: worker.name, ...job })));
  table("jobs", ["job", "client", "worker", "state", "exit status", "restarts", "age"], jobs.map((job) => [
    job.name, job.client, job.worker, job.state, job.signal ? `signal ${job.signal}` : job.exit_code, job.restarts,
    job.age_seconds === undefined ? "" : age(job.age_seconds)]), "No job: skyproxy run --detach begins one.");
  show_lines("job-logs", jobs.flatMap((job) => (job.tail || []).map((line) => `${job.name}: ${line}`)));
}

/** Show the lines of a log, and stay at its end where the reader was there. */
function show_lines(id, lines) {
  const log = byId(id), at_end = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = lines.join("\n");
  if (at_end) log.scrollTop = log.scrollHeight;
}

function show_errors(workers, program) {
  const known = new Map(((program || {}).errors || []).map(
    (row) => [`${row.session}/${row.graph}/${row.sequence}/${row.position}`, row]));
  const rows = workers.flatMap((worker) => (worker.sessions || []).flatMap((row) => (row.failures || []).map((one) => {
    const place = `${row.session}/${one.graph || 0}/${one.sequence}/${one.position}`;
    const line = (known.get(place) || {}).line || "";
    known.delete(place);
    return [one.at, row.session, `${one.type}: ${one.message}`, one.op, line];
  })));
  for (const row of known.values()) rows.push([row.at, row.session, row.message, row.op, row.line]);
  rows.sort((one, other) => other[0] - one[0]);
  const empty = "None.";
  table("errors", ["at", "session", "error", "operation", "line"],
    rows.map((row) => [time(row[0]), ...row.slice(1)]), empty);
}

function show_pools(program) {
  const rows = ((program || {}).pools || []).flatMap((pool) => pool.ranks.map(
    (rank) => [pool.name, rank.rank, rank.worker, rank.state, rank.busy, pool.waiting]));
  table("pools", ["pool", "rank", "worker", "state", "calls running", "calls waiting"], rows, program
    ? "This program has no pool." : "Pools are known to their program only: skyproxy.ui() in it, or %sky dashboard.");
}

function show_profile(program) {
  const profile = (program || {}).profile;
  byId("profile-note").textContent = profile
    ? `${time(profile.at)}, ${(profile.total / 1000).toFixed(1)} ms; the ${profile.shown} longest of ${profile.all} spans`
    : program ? "No profile ended since the view began: with skyproxy.profile(): ..."
      : "Profiles are known to their program only: skyproxy.ui() in it, or %sky dashboard.";
  drawSpans(byId("profile"), profile ? profile.rows : [], profile ? profile.total : 0);
}

function show(status) {
  byId("title").textContent = status.title || "";
  show_plots(status);
  show_workers(status.workers);
  show_sessions(status.workers, status.program);
  show_calls(status.workers);
  show_jobs(status.workers);
  show_errors(status.workers, status.program);
  show_pools(status.program);
  show_profile(status.program);
  show_lines("log", status.workers.flatMap((worker) => worker.log || []));
}

function state(text, bad) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}

async function ask(method, path) {
  return fetch(path, {
    method, cache: "no-store", credentials: "omit", headers: { Authorization: `Bearer ${key}` },
    signal: AbortSignal.timeout(10000),
  });
}

/** Exchange the secret of the link, which works once, for a key that this tab keeps. */
async function enter() {
  const secret = location.hash.slice(1);
  if (!secret) return;
  history.replaceState(null, "", location.pathname);
  key = secret;
  const answer = await ask("POST", "enter");
  key = answer.ok ? (await answer.json()).key : "";
  if (key) sessionStorage.setItem(KEY, key);
}

function want_token(text) {
  key = "";
  sessionStorage.removeItem(KEY);
  byId("view").hidden = true;
  byId("entry").hidden = !is_worker;
  state(is_worker ? text : "This link was already used, or its program has ended. Get another: skyproxy ui, or skyproxy.ui()", true);
}

async function refresh() {
  if (!key) { want_token("Enter the worker's token."); return; }
  try {
    const answer = await ask("GET", is_worker ? "../status" : "status");
    if (answer.status === 401 || answer.status === 403) { want_token("The token was refused."); return; }
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const status = document_of(await answer.json());
    byId("view").hidden = false;
    byId("entry").hidden = true;
    show(status);
    state(`read at ${time(status.at)}`, false);
  } catch (error) {
    state(`no answer: ${error.message}`, true);
  }
}

// A worker serves the page at /ui/, the local server at /.
const is_worker = location.pathname.endsWith("/ui/");
byId("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("token").value.trim();
  byId("token").value = "";
  if (key) sessionStorage.setItem(KEY, key);
  refresh();
});
(async () => {
  try {
    await enter();
  } catch (error) {
    state(`no answer: ${error.message}`, true);
  }
  for (;;) {
    if (!document.hidden || samples.length === 0) await refresh();
    await new Promise((done) => setTimeout(done, PERIOD_MS));
  }
})();
