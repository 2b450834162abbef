#!/bin/sh
# Asks a model over HTTP with curl: sh ask.sh [MODEL] [BASE_URL]; the events come as they are made.
set -eu
MODEL=${1:-smollm2-135m-instruct-q4_1}
BASE_URL=${2:-http://127.0.0.1:8000/v1}
curl --silent --show-error --fail-with-body --no-buffer "$BASE_URL/chat/completions" \
  -H "Content-Type: application/json" \
  -d "{\"model\": \"$MODEL\", \"temperature\": 0, \"max_tokens\": 64, \"stream\": true,
       \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of Japan?\"}]}"
