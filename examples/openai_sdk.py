"""Asks a model with OpenAI's library: python openai_sdk.py "What is …?" [MODEL] [BASE_URL]"""

import sys

from openai import OpenAI

PROMPT = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of Japan?"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct-q4_1"
BASE_URL = sys.argv[3] if len(sys.argv) > 3 else "http://127.0.0.1:8000/v1"

client = OpenAI(base_url=BASE_URL, api_key="none")
for chunk in client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": PROMPT}],
    temperature=0,
    max_tokens=64,
    stream=True,
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
