// A Tailrace tool worker in plain JavaScript: `node worker.js`, with TAILRACE_NATS_URL (and, where the
// server asks for them, TAILRACE_NATS_USER and TAILRACE_NATS_PASSWORD) in the environment.
//
// The contract is in docs/tools.md. This file keeps all of it: acceptance, results, refusal when full,
// repeated calls, probes, cancellation, timeouts. Sessions it has none, since its tools have no state.

import { randomUUID } from "node:crypto";
import { connect, headers, JSONCodec } from "nats";

const MAX_CONCURRENCY = 16;
const REMEMBER_MS = 120_000;
const FORBIDDEN = 10_000; // an arbitrary bound, to show an error that the model can read

const sleep = (ms, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new Error("cancelled"));
    });
  });

// name -> what a model is told of the tool, what the worker promises, and the code.
const tools = {
  js_reverse: {
    description: "Reverse a text.",
    schema: {
      type: "object",
      properties: { text: { type: "string", description: "What to reverse." } },
      required: ["text"],
      additionalProperties: false,
    },
    idempotent: true,
    timeoutMs: 5_000,
    check: ({ text }) => (typeof text === "string" ? "" : "text must be a string"),
    run: async ({ text }) => [...text].reverse().join(""),
  },
  js_wait: {
    description: "Wait for some milliseconds.",
    schema: {
      type: "object",
      properties: { ms: { type: "number", description: "How long." } },
      required: ["ms"],
      additionalProperties: false,
    },
    idempotent: false,
    timeoutMs: 10_000,
    check: ({ ms }) => (typeof ms === "number" && ms >= 0 ? "" : "ms must be a number from 0"),
    run: async ({ ms }, signal) => {
      if (ms > FORBIDDEN) throw new Error(`will not wait longer than ${FORBIDDEN} ms`);
      await sleep(ms, signal);
      return `waited ${ms} ms`;
    },
  },
};

const codec = JSONCodec();
const workerId = randomUUID();
const running = new Map(); // call id -> { request, replies, abort }
const finished = new Map(); // call id -> result

const json = () => {
  const h = headers();
  h.set("Content-Type", "application/json");
  return h;
};

const refuse = (message, code, kind, reason, retryAfterS) => {
  const h = headers();
  h.set("Nats-Service-Error-Code", code);
  h.set("Nats-Service-Error", reason);
  h.set("Tailrace-Error", kind);
  if (retryAfterS) h.set("Retry-After", String(retryAfterS));
  message.respond(new Uint8Array(), { headers: h });
};

async function outcome(tool, request, abort) {
  const wrong = tool.check(request.arguments ?? {});
  if (wrong) return { content: wrong, is_error: true, error_kind: "invalid_arguments" };
  const limitMs = Math.min(tool.timeoutMs, (request.timeout_s || Infinity) * 1000);
  const timer = new AbortController();
  const tooLate = sleep(limitMs, timer.signal).then(
    () => ({
      content: `${request.name} did not answer within ${limitMs / 1000} s`,
      is_error: true,
      error_kind: "timeout",
    }),
    () => undefined,
  );
  try {
    const work = tool.run(request.arguments ?? {}, abort.signal).then((content) => ({ content }));
    return await Promise.race([work, tooLate]);
  } catch (error) {
    return { content: `${request.name} raised ${error}`, is_error: true, error_kind: "raised" };
  } finally {
    timer.abort();
    abort.abort(); // what was too late
  }
}

async function serve(call, nc) {
  const { request, abort } = call;
  const started = performance.now();
  const ended = await outcome(tools[request.name], request, abort);
  running.delete(request.call_id);
  if (call.isCancelled) return;
  const result = {
    type: "tool_result",
    call_id: request.call_id,
    name: request.name,
    elapsed_s: (performance.now() - started) / 1000,
    ...ended,
  };
  finished.set(request.call_id, result);
  setTimeout(() => finished.delete(request.call_id), REMEMBER_MS).unref();
  for (const reply of call.replies) nc.publish(reply, codec.encode(result), { headers: json() });
}

function accept(message, request, nc) {
  const tool = Object.hasOwn(tools, request.name) ? tools[request.name] : undefined;
  const earlier = finished.get(request.call_id);
  if (!tool) return refuse(message, "400", "invalid", `no tool '${request.name}' here`);
  if (earlier) return message.respond(codec.encode(earlier), { headers: json() });
  let call = running.get(request.call_id);
  if (!call && running.size >= MAX_CONCURRENCY) {
    return refuse(message, "503", "overloaded", `${running.size} calls here`, 0.05);
  }
  const accepted = {
    type: "tool_accepted",
    call_id: request.call_id,
    worker_id: workerId,
    is_idempotent: tool.idempotent,
  };
  message.respond(codec.encode(accepted), { headers: json() });
  if (call) return call.replies.push(message.reply);
  call = { request, replies: [message.reply], abort: new AbortController(), isCancelled: false };
  running.set(request.call_id, call);
  return serve(call, nc);
}

function cancel(callId) {
  const call = running.get(callId);
  if (call) {
    call.isCancelled = true;
    call.abort.abort();
  }
}

function probed(ids) {
  return {
    type: "tools_probed",
    running: ids.filter((id) => running.has(id)),
    finished: ids.filter((id) => finished.has(id)),
  };
}

function handle(message, nc) {
  let request;
  try {
    request = codec.decode(message.data);
  } catch (error) {
    return refuse(message, "400", "invalid", `this worker reads JSON only: ${error.message}`);
  }
  const ids = request?.call_ids ?? [];
  if (!Array.isArray(ids)) return refuse(message, "400", "invalid", "call_ids must be a list");
  switch (request?.type) {
    case "call_tool":
      return accept(message, request, nc);
    case "probe_tools":
      return message.respond(codec.encode(probed(ids)), { headers: json() });
    case "cancel_tools":
      return ids.forEach(cancel);
    case "release_tool_session":
      return message.respond(
        codec.encode({ type: "tool_session_released", session_id: request.session_id }),
        { headers: json() },
      );
    default:
      return refuse(message, "400", "invalid", `unknown message ${request?.type}`);
  }
}

const user = process.env.TAILRACE_NATS_USER;
const nc = await connect({
  servers: process.env.TAILRACE_NATS_URL ?? "nats://127.0.0.1:4222",
  name: "tool_worker_js",
  reconnect: true,
  maxReconnectAttempts: -1,
  ...(user ? { user, pass: process.env.TAILRACE_NATS_PASSWORD, inboxPrefix: `_INBOX.${user}` } : {}),
});

const service = await nc.services.add({
  name: "tool_worker", // discovery asks for this name
  version: "1.0.0",
  description: "Tailrace tool worker in JavaScript",
  metadata: { worker_id: workerId },
  statsHandler: async () => ({ num_running: running.size, max_concurrency: MAX_CONCURRENCY }),
});
const handler = (error, message) => {
  if (!error) handle(message, nc);
};
service.addEndpoint("worker", { subject: `tool_worker.${workerId}`, handler });
for (const [name, tool] of Object.entries(tools)) {
  service.addEndpoint(name, {
    subject: `tool.${name}`,
    handler,
    metadata: {
      tool: name,
      description: tool.description,
      schema: JSON.stringify(tool.schema),
      is_idempotent: String(tool.idempotent),
      is_stateful: "false",
    },
  });
}
await nc.flush();
console.log(`serving ${Object.keys(tools).join(", ")} as ${workerId}`);

for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => nc.drain());
await nc.closed();
