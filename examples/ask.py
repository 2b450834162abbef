"""Asks a model over NATS: python ask.py "What is the capital of Japan?" [MODEL] [BROKER]"""
import asyncio
import json
import sys

import nats

PROMPT = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of Japan?"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct-q4_1"
BROKER = sys.argv[3] if len(sys.argv) > 3 else "nats://127.0.0.1:4222"


async def main():
    nc = await nats.connect(BROKER)
    inbox = nc.new_inbox()
    events = await nc.subscribe(inbox)
    request = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64}
    await nc.publish(f"stagebus.v1.{MODEL}.prompt", json.dumps(request).encode(), reply=inbox)
    async for message in events.messages:
        if message.headers and message.headers.get("Status") == "503":
            raise SystemExit(f"no coordinator serves {MODEL}")
        if not message.data:
            break
        event = json.loads(message.data)
        if event["event"] == "token":
            print(event["text"], end="", flush=True)
        elif event["event"] == "error":
            raise SystemExit(f"{event['class']}: {event['message']}")
    print()
    await nc.close()


asyncio.run(main())
