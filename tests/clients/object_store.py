"""A client of the broker's object store that knows nothing of Stagebus.

Takes the broker's address and the name of a bucket; prints one JSON object with size and SHA-256 of
every object, as the client of NATS reads them (which checks the digest on its way).
"""

import asyncio
import hashlib
import json
import sys

import nats


async def main(broker, bucket):
    client = await nats.connect(broker)
    store = await client.jetstream().object_store(bucket)
    found = {}
    for entry in await store.list():
        result = await store.get(entry.name)
        digest = hashlib.sha256(result.data).hexdigest()
        found[entry.name] = {"bytes": len(result.data), "sha256": digest}
    await client.close()
    print(json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
