#!/usr/bin/env bash
# One answer over HTTP, as one JSON object.
#   examples/requests/generate.sh [http://127.0.0.1:8000]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
curl --silent --show-error --fail-with-body "$url/v2/models/ensemble/generate" \
    --header 'Content-Type: application/json' \
    --data '{
        "text_input": "Why is the sky blue?",
        "apply_chat_template": true,
        "max_tokens": 64,
        "stop_words": ["\n\n"]
    }'
echo
