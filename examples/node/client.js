// Schedules COUNT timers, receives and acks them, and continues through failovers of the cluster.
//
//   node client.js HOST:PORT,HOST:PORT,… TOPIC GROUP COUNT
//
// Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked. With
// TLS, the variables TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
"use strict";

const { randomUUID } = require("node:crypto");
const { readFileSync } = require("node:fs");
const path = require("node:path");
const { setTimeout: sleep } = require("node:timers/promises");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PROTO = process.env.TIMER_PROTO || path.join(__dirname, "../../timerclient/proto");
const CALL_MS = 10_000; // the deadline of one attempt
const GIVE_UP_MS = 60_000; // of all attempts of a call
const OPTIONS = { "grpc.max_receive_message_length": 32 << 20 }; // a payload has 4 MiB at most by default

const definition = loader.loadSync("timer/v1/timer.proto", {
  includeDirs: [PROTO],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
});
const { TimerService, ConsumeService } = grpc.loadPackageDefinition(definition).timer.v1;
const PAUSE_MS = 200;

/** Return the cluster's own error. Undefined: gRPC failed, such as a connection. */
function failureOf(error) {
  const [encoded] = error.metadata?.get("timer-error-bin") ?? [];
  return encoded && definition["timer.v1.Error"].deserialize(encoded);
}

function passes(error, failure) {
  if (failure) return failure.retryable;
  return error.code === grpc.status.UNAVAILABLE || error.code === grpc.status.DEADLINE_EXCEEDED;
}

/** Return the credentials for TLS, if its variables are set. */
function transport() {
  const { TIMERCTL_TLS_CA: ca, TIMERCTL_TLS_CERT: own, TIMERCTL_TLS_KEY: key } = process.env;
  if (!ca) return grpc.credentials.createInsecure();
  return grpc.credentials.createSsl(...[ca, key, own].map((file) => readFileSync(file)));
}

/** A cluster: each call goes to one node, and to the next one after a failure that may pass. */
class Cluster {
  constructor(addresses) {
    const credentials = transport();
    this.nodes = addresses.map((address) => ({
      timers: new TimerService(address, credentials, OPTIONS),
      consuming: new ConsumeService(address, credentials, OPTIONS),
    }));
    this.at = 0;
  }

  /** Call a method whose request may be repeated. */
  async call(service, method, request) {
    const end = Date.now() + GIVE_UP_MS;
    for (;;) {
      const stub = this.nodes[this.at % this.nodes.length][service];
      try {
        return await new Promise((resolve, reject) => {
          stub[method](request, { deadline: Date.now() + CALL_MS }, (error, answer) =>
            error ? reject(error) : resolve(answer),
          );
        });
      } catch (error) {
        const failure = failureOf(error);
        if (!passes(error, failure) || Date.now() > end) throw error;
        this.at += 1;
        await sleep(Math.max(PAUSE_MS, failure?.retry_after_ms ?? 0));
      }
    }
  }

  close() {
    for (const node of this.nodes) {
      node.timers.close();
      node.consuming.close();
    }
  }
}

async function schedule(cluster, topic, count) {
  for (let n = 0; n < count; n += 1) {
    const { result } = await cluster.call("timers", "ScheduleTimer", {
      topic,
      payload: Buffer.from(`timer ${n}`),
      headers: { language: "javascript" },
      delay: { seconds: 1 },
      request_id: randomUUID(), // a repetition schedules nothing more
    });
    // A conflict of keys is no error.
    if (result !== "SCHEDULE_RESULT_SCHEDULED") throw new Error(`not scheduled: ${result}`);
    console.log(`scheduled ${n + 1}`);
  }
}

async function consume(cluster, topic, group, count) {
  const seen = new Set(); // messages may come again: each counts once
  while (seen.size < count) {
    const { messages } = await cluster.call("consuming", "Receive", {
      topic,
      group,
      max_messages: 16,
      wait_ms: 2_000,
      rows: true,
    });
    if (!messages.length) continue;
    const leases = messages.map((message) => message.lease);
    const { results } = await cluster.call("consuming", "Ack", { topic, group, leases });
    results.forEach((result, at) => {
      if (result === "ACK_RESULT_ACKED" || result === "ACK_RESULT_ALREADY_ACKED") {
        seen.add(messages[at].payload.toString());
      }
    });
    console.log(`acked ${seen.size}`);
  }
}

async function main() {
  const [addresses, topic, group, count] = process.argv.slice(2);
  if (!(Number(count) > 0)) throw new Error("usage: client.js HOST:PORT,… TOPIC GROUP COUNT");
  const cluster = new Cluster(addresses.split(","));
  try {
    await Promise.all([
      schedule(cluster, topic, Number(count)),
      consume(cluster, topic, group, Number(count)),
    ]);
  } finally {
    cluster.close();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
