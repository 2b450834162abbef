"""An agent of OpenAI's Agents SDK: python agents_sdk.py QUESTION [MODEL] [BASE_URL]"""

import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

QUESTION = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of Japan?"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct-q4_1"
BASE_URL = sys.argv[3] if len(sys.argv) > 3 else "http://127.0.0.1:8000/v1"

# Traces would go to OpenAI.
set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(
    model=MODEL, openai_client=AsyncOpenAI(base_url=BASE_URL, api_key="none")
)
agent = Agent(
    name="Guide",
    instructions="You answer in one sentence.",
    model=model,
    model_settings=ModelSettings(temperature=0, max_tokens=64),
)
print(Runner.run_sync(agent, QUESTION).final_output)
