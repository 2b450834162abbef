"""Has many prompts answered by way of the durable queue: python jobs.py MODEL BROKER PROMPT...

Prints one line of JSON for each prompt. The queue keeps the prompts, the broker the answers. Stop
this program whenever you like and start it again: it asks for nothing twice and reads on.
"""

import asyncio
import hashlib
import json
import sys

import nats

MODEL, BROKER, PROMPTS = sys.argv[1], sys.argv[2], sys.argv[3:]


async def submit(js, prompt):
    """Puts a prompt into the queue, under a name that follows from it."""
    name = "job-" + hashlib.sha256(prompt.encode()).hexdigest()[:24]
    request = {
        "request_id": name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 64,
    }
    # The broker stores one job of a name, however often it comes.
    stored = await js.publish(
        f"stagebus.v1.{MODEL}.job",
        json.dumps(request).encode(),
        headers={"Nats-Msg-Id": name},
    )
    return name, bool(stored.duplicate)


async def answer(js, name):
    """Reads the events of a job from the first one on, and waits for those that are missing."""
    events = await js.subscribe(
        f"stagebus.v1.{MODEL}.result.{name}",
        stream=f"STAGEBUS_RESULTS_{MODEL}",
        ordered_consumer=True,
    )
    text = ""
    async for message in events.messages:
        event = json.loads(message.data)
        if event["event"] == "token":
            text += event["text"]
        elif event["event"] == "error":
            raise SystemExit(f"{name}: {event['class']}: {event['message']}")
        elif event["event"] == "done":
            break
    await events.unsubscribe()
    return text


async def main():
    nc = await nats.connect(BROKER)
    js = nc.jetstream()
    jobs = [(prompt, *await submit(js, prompt)) for prompt in PROMPTS]
    for prompt, name, known in jobs:
        line = {"prompt": prompt, "job": name, "known": known, "answer": await answer(js, name)}
        print(json.dumps(line), flush=True)
    await nc.close()


asyncio.run(main())
