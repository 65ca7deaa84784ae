// An agent outside of the cluster in plain JavaScript (Node 18 or later): the same as agent.py, with fetch.
//   TAILRACE_GATEWAY_ADMIN_KEY=... node agent.mjs http://127.0.0.1:8017/v1 agent-0 16

const [url, name = "agent-0", slots = "16"] = process.argv.slice(2);
const adminKey = process.env.TAILRACE_GATEWAY_ADMIN_KEY;
if (!url || !adminKey) {
  console.error("give the gateway's address, and set TAILRACE_GATEWAY_ADMIN_KEY to the key with which the run was started");
  process.exit(2);
}
const GIVE_UP_MS = 60_000; // of silence: the run is over
const calculator = {
  type: "function",
  function: {
    name: "calculator",
    parameters: { type: "object", properties: { expression: { type: "string" } } },
  },
};

class Refused extends Error {
  constructor(status, error) {
    super(`${status} ${error?.message}`);
    this.status = status;
  }
}

// Posts JSON; tries again while the gateway is down or says that a retry can help.
async function post(base, path, key, body) {
  const idempotencyKey = crypto.randomUUID();
  const giveUp = Date.now() + GIVE_UP_MS;
  for (let delayMs = 100; ; delayMs = Math.min(2 * delayMs, 5000)) {
    let failure;
    try {
      const answer = await fetch(base + path, {
        method: "POST",
        headers: { authorization: `Bearer ${key}`, "idempotency-key": idempotencyKey },
        body: JSON.stringify(body),
      });
      if (answer.status === 204) return null;
      const content = await answer.json();
      if (answer.ok) return content;
      failure = new Refused(answer.status, content.error);
      if (answer.headers.get("x-should-retry") !== "true") throw failure;
    } catch (error) {
      if (error === failure || Date.now() > giveUp) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, delayMs));
  }
}

function calculate(text) {
  const [, left, sign, right] = /^\s*(\d+)\s*([-+*])\s*(\d+)\s*$/.exec(text ?? "") ?? [];
  if (!sign) return "Error: no sum";
  return String({ "+": +left + +right, "-": left - right, "*": left * right }[sign]);
}

async function play({ base_url, api_key, task }) {
  const messages = [{ role: "user", content: task.prompt }];
  for (let turn = 0; turn < 4; turn++) {
    const body = { model: "policy", messages, tools: [calculator] };
    const { message } = (await post(base_url, "/chat/completions", api_key, body)).choices[0];
    if (!message.tool_calls) return Number(message.content.trim() === task.answer);
    messages.push(message);
    for (const call of message.tool_calls) {
      const content = calculate(JSON.parse(call.function.arguments).expression);
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
  return 0;
}

async function slot(agent) {
  for (;;) {
    const leased = await post(url, "/episodes", adminKey, { agent, wait_s: 20 });
    if (leased === null) continue; // nothing to play at present
    try {
      let end;
      try {
        const reward = await play(leased);
        end = { reward, metrics: { success: reward } };
      } catch (error) {
        if (error.status !== 400) throw error; // 400: the tokens of the episode are used up
        end = { outcome: "policy_failure", reward: 0, reason: error.message };
      }
      await post(leased.base_url, "/episodes/current/reward", leased.api_key, end);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      console.log(`${leased.episode_id}: ${error.message}`); // another agent has it, or it is over
    }
  }
}

// A run may begin with minutes of preparation.
for (let isUp = false; !isUp; await new Promise((resolve) => setTimeout(resolve, 1000))) {
  isUp = await fetch(new URL("/health", url)).then((answer) => answer.ok, () => false);
}
Promise.all(Array.from({ length: Number(slots) }, (_, number) => slot(`${name}/${number}`))).catch(
  (error) => console.log(`the gateway is gone, the run is over: ${error.message}`),
);
