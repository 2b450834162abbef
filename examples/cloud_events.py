"""Asks a model with a CloudEvent: python cloud_events.py "What is …?" [MODEL] [BROKER]

The text goes to standard output, type and id of every event to standard error.
"""

import asyncio
import json
import sys
import uuid

import nats

PROMPT = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of Japan?"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct-q4_1"
BROKER = sys.argv[3] if len(sys.argv) > 3 else "nats://127.0.0.1:4222"


async def main():
    nc = await nats.connect(BROKER)
    inbox = nc.new_inbox()
    events = await nc.subscribe(inbox)
    request = {
        "specversion": "1.0",
        "type": "io.stagebus.prompt.v1",
        "source": "/examples/cloud_events.py",
        "id": str(uuid.uuid4()),
        "data": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64},
    }
    # Whoever asks with a CloudEvent is answered with CloudEvents.
    headers = {"Content-Type": "application/cloudevents+json"}
    subject = f"stagebus.v1.{MODEL}.prompt"
    await nc.publish(subject, json.dumps(request).encode(), reply=inbox, headers=headers)
    seen = set()
    async for message in events.messages:
        if message.headers and message.headers.get("Status") == "503":
            raise SystemExit(f"no coordinator serves {MODEL}")
        if not message.data:
            break
        event = json.loads(message.data)
        # After a broken connection the last events come again, under the same names.
        if (event["source"], event["id"]) in seen:
            continue
        seen.add((event["source"], event["id"]))
        print(event["type"], event["id"], file=sys.stderr)
        data = event["data"]
        if event["type"] == "io.stagebus.token.v1":
            print(data["text"], end="", flush=True)
        elif event["type"] == "io.stagebus.error.v1":
            raise SystemExit(f"{data['class']}: {data['message']}")
    print()
    await nc.close()


asyncio.run(main())
