"""One context's processed logits, slow and obvious: float32 numbers in Python lists, straight from the definitions."""

import numpy as np


def processed(logits, params, prompt_ids, answer_ids):
    """The logits of the token after prompt and answer, as `SamplingParams` says (guide excluded)."""
    x = np.array(logits, dtype=np.float32)
    for token, bias in params.embedding_bias:
        x[token] += np.float32(bias)
    for token in range(len(x)):
        count = answer_ids.count(token)
        if token in prompt_ids or count:
            penalty = np.float32(params.repetition_penalty)
            x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
        x[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        x[token] -= np.float32(params.presence_penalty) * np.float32(count > 0)
    text = (*prompt_ids, *answer_ids)
    for word in params.bad_sequences:
        if len(word) <= len(text) + 1 and text[len(text) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    for ending in [*((end,) for end in params.end_ids), *params.stop_sequences]:
        for token in range(len(x)):
            answer = (*answer_ids, token)
            if answer[-len(ending) :] == ending and len(answer) - len(ending) < params.min_tokens:
                x[token] = -np.inf
    return x
