"""Token sequences as one INT32 [2, n] tensor: the form of STOP_WORDS_IDS and BAD_WORDS_IDS.

Row 0 holds the sequences end to end, row 1 where each of them ends; the rest of row 1 is -1. Two sequences (5, 6) and
(7,) are [[5, 6, 7], [2, 3, -1]]; none at all is [[], []], and [[0], [-1]] is read as none too.
"""

from collections.abc import Sequence

import numpy as np

from furcate.builder.errors import RequestError


def tensor_from_sequences(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """INT32 [2, n]; every sequence holds at least one token."""
    tokens = [token for sequence in sequences for token in sequence]
    ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int32)
    tensor = np.full((2, len(tokens)), -1, dtype=np.int32)
    tensor[0] = tokens
    tensor[1, : len(ends)] = ends
    return tensor


def sequences_from_tensor(field_name: str, tensor: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """The sequences of an INT32 [2, n] tensor; RequestError when its ends do not ascend within its tokens."""
    tokens, ends = tensor[0], tensor[1]
    ends = ends[ends != -1]
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    if np.any(ends <= starts) or np.any(ends > len(tokens)):
        raise RequestError(
            f"'{field_name}' has the ends {ends[:16].tolist()} for {len(tokens)} tokens; row 1 must hold ascending ends"
            " of the sequences in row 0, then -1."
        )
    return tuple(tuple(tokens[start:end].tolist()) for start, end in zip(starts, ends, strict=True))
