// Asks a model over NATS: node ask.ts "What is the capital of Japan?" [MODEL] [BROKER]
import { connect, createInbox } from "@nats-io/transport-node";

type Event =
  | { event: "accepted"; request_id: string; prompt_tokens: number }
  | { event: "status"; state: string }
  | { event: "token"; i: number; text: string; tokens: number[] }
  | { event: "done"; finish_reason: "stop" | "length" | "cancelled" }
  | { event: "error"; class: string; message: string; retry_after_ms?: number };

const [
  prompt = "What is the capital of Japan?",
  model = "smollm2-135m-instruct-q4_1",
  broker = "nats://127.0.0.1:4222",
] = process.argv.slice(2);

const nc = await connect({ servers: broker });
const inbox = createInbox();
const events = nc.subscribe(inbox);
const request = { messages: [{ role: "user", content: prompt }], max_tokens: 64 };
nc.publish(`stagebus.v1.${model}.prompt`, JSON.stringify(request), { reply: inbox });

for await (const message of events) {
  if (message.headers?.code === 503) throw new Error(`no coordinator serves ${model}`);
  // An empty message follows the last event.
  if (message.data.length === 0) break;
  const event = message.json<Event>();
  if (event.event === "token") process.stdout.write(event.text);
  if (event.event === "error") throw new Error(`${event.class}: ${event.message}`);
}
process.stdout.write("\n");
await nc.drain();
