"""A client of the public subject that knows nothing but NATS and JSON.

Takes the broker's address and the model's name; prints one JSON object with the events of three
requests: one that is answered, one that is cancelled after three token events, and one that is
refused. The empty message that ends each stream stands as null.
"""

import asyncio
import json
import sys

import nats


async def events(client, model, payload, cancel=None):
    """Sends a request and collects its events up to and including the empty message."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(f"stagebus.v1.{model}.prompt", payload, reply=inbox)
    found = []
    while not found or found[-1] is not None:
        message = await subscription.next_msg(timeout=100)
        event = json.loads(message.data) if message.data else None
        # On a busy machine a request may hear how it fares before its next token.
        if event is None or event["event"] != "status":
            found.append(event)
        n_tokens = sum(1 for event in found if event and event["event"] == "token")
        if cancel is not None and n_tokens == 3:
            await client.publish(f"stagebus.v1.{model}.cancel.{cancel}", b"")
            cancel = None
    await subscription.unsubscribe()
    return found


async def main(broker, model):
    client = await nats.connect(broker)
    question = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    endless = {
        "request_id": "python-1",
        "prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,",
        "max_tokens": 4000,
    }
    found = {
        "answered": await events(client, model, json.dumps(question).encode()),
        "cancelled": await events(client, model, json.dumps(endless).encode(), cancel="python-1"),
        "refused": await events(client, model, b'{"prompt": 5}'),
    }
    await client.close()
    print(json.dumps(found))


asyncio.run(main(sys.argv[1], sys.argv[2]))
