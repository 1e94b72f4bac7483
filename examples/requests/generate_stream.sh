#!/usr/bin/env bash
# The answer piece by piece over HTTP: one "data: {...}" line for each step, and a seeded, sampled text.
#   examples/requests/generate_stream.sh [http://127.0.0.1:8000]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
curl --silent --show-error --fail-with-body --no-buffer "$url/v2/models/ensemble/generate_stream" \
    --header 'Content-Type: application/json' \
    --data '{
        "text_input": "Once upon a time",
        "max_tokens": 64,
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 7,
        "stream": true
    }'
