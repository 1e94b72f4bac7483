"""What of a sequence's cache is final, and so may be kept for others: it depends on what its drafter caches, and when."""

from furcate.builder.network.spec import HeadKind
from furcate.decoding.adaptive import Ladder
from furcate.decoding.cache import PagePool
from furcate.decoding.drafters.merged import MergedProposer
from furcate.decoding.prefix_tree import PrefixTree
from furcate.decoding.sequence import Sequence
from furcate.decoding.sequence_pages import SequencePages
from furcate.decoding.step import Step

HEADS_THAT_READ_AHEAD = (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.HYDRA)
"""Their cache row of a position is made with the token after it."""


def pages_of(step: Step, pool: PagePool, *, is_reusing: bool) -> SequencePages:
    """The pages of this step's engine, none of them held yet."""
    executor = step.executor
    tree = None
    if is_reusing:
        kinds = [head.kind for head in executor.manifest.heads]
        reads_ahead = step.proposer is not None and any(kind in HEADS_THAT_READ_AHEAD for kind in kinds)
        tree = PrefixTree(pool.page_size, int(reads_ahead))
    drafted = [drafter.head_pool for drafter in executor.drafters if drafter.head_pool is not None]
    return SequencePages(pool, tree, [executor.target_pool, *drafted])


def num_lasting_rows(sequence: Sequence, step: Step, ladder: Ladder | None) -> int:
    """Rows before the root, of the target and the drafter, that no pass writes again once they are computed.

    A draft model computes a step's accepted tokens again when it starts its next draft; and tokens decoded without a drafter are
    read by it only when it is tried again.
    """
    num_rows = sequence.num_rows_to_fill
    if sequence.state is None or step.proposer is None:
        return num_rows
    unseen = ladder.unseen.get(sequence.request.request_id) if ladder is not None else None
    if unseen is not None:
        num_rows = unseen.start
    if isinstance(step.proposer, MergedProposer):
        return num_rows - step.proposer.num_behind(sequence.state)
    head = step.executor.head
    if head is not None and head.kind is HeadKind.MODEL:
        num_rows += 1 - int(sequence.state[0])
    return num_rows
