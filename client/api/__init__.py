"""The OpenAI-compatible front end: `furcate api`."""
