"""An answer, a stream and a cancelled stream, through furcate's client library.

python examples/requests/generate.py [grpc://127.0.0.1:8001]
"""

import sys

from furcate.client import Client

url = sys.argv[1] if len(sys.argv) > 1 else "grpc://127.0.0.1:8001"

with Client(url, deadline_s=120) as client:
    answer = client.generate("Why is the sky blue?", chat=True, max_tokens=64)
    print(answer.text)
    print(f"[{answer.num_tokens} tokens, tau {answer.tau:.2f}, finish reason: {answer.finish_reason}]\n")

    stream = client.stream("Once upon a time", max_tokens=64, temperature=0.8, top_p=0.95, seed=7)
    for delta in stream:
        print(delta.text, end="", flush=True)
    print(f"\n[{stream.generation.tokens_per_s:.1f} tokens/s]\n")

    # Leaving a stream early ends it on the server too.
    with client.stream("1, 2, 3, 4,", max_tokens=200) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
            if delta.token_ids:
                break
    print("\n[left]")
