"""A LangChain chain with a model of the fleet: python langchain_chat.py QUESTION [MODEL] [BASE_URL]"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

QUESTION = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of Japan?"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct-q4_1"
BASE_URL = sys.argv[3] if len(sys.argv) > 3 else "http://127.0.0.1:8000/v1"

model = ChatOpenAI(
    model=MODEL, base_url=BASE_URL, api_key="none", temperature=0, max_completion_tokens=64
)
prompt = ChatPromptTemplate.from_messages([("user", "{question}")])
chain = prompt | model | StrOutputParser()
for text in chain.stream({"question": QUESTION}):
    print(text, end="", flush=True)
print()
