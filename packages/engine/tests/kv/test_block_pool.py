from __future__ import annotations

import random

from headrace_engine.kv.block_pool import BlockPool


def test_blocks_come_in_order_and_return_to_the_front_while_empty() -> None:
    pool = BlockPool(6)
    assert pool.take(3) == [1, 2, 3]
    for block_id in (3, 2, 1):
        pool.release(block_id)
    assert pool.free_blocks() == [1, 2, 3, 4, 5]
    assert pool.num_free == 5


def test_cached_blocks_go_to_the_end_and_are_evicted_oldest_first() -> None:
    pool = BlockPool(4)
    pool.take(3)
    for block_id, digest in ((1, b"a"), (2, b"b")):
        pool.register(block_id, 0, digest)
    for block_id in (2, 1, 3):
        pool.release(block_id)
    assert pool.free_blocks() == [3, 2, 1]
    assert pool.take(2) == [3, 2]
    assert (pool.lookup(0, b"a"), pool.lookup(0, b"b")) == (1, None)
    assert pool.num_cached == 1


def test_acquiring_a_free_block_takes_it_out_of_the_middle() -> None:
    pool = BlockPool(4)
    pool.take(3)
    for block_id in (1, 2, 3):
        pool.register(block_id, 0, bytes([block_id]))
        pool.release(block_id)
    pool.acquire([0, 2, 2])
    assert pool.free_blocks() == [1, 3]
    assert pool.ref_counts == [0, 0, 2, 0]
    pool.release(2)
    assert pool.num_free == 2
    pool.release(2)
    assert pool.free_blocks() == [1, 3, 2]


def test_one_block_per_digest_and_group() -> None:
    pool = BlockPool(5, num_groups=2)
    pool.take(4)
    pool.register(1, 0, b"x")
    pool.register(2, 0, b"x")
    pool.register(1, 0, b"y")
    pool.register(3, 1, b"x")
    assert (pool.lookup(0, b"x"), pool.lookup(1, b"x"), pool.lookup(0, b"y")) == (1, 3, None)
    assert [pool.digest_of(b) for b in range(1, 5)] == [b"x", None, b"x", None]


def test_clearing_leaves_blocks_where_they_are() -> None:
    pool = BlockPool(3)
    pool.take(2)
    pool.register(1, 0, b"x")
    pool.release(1)
    pool.clear_cached()
    assert (pool.num_cached, pool.lookup(0, b"x"), pool.free_blocks()) == (0, None, [1])


def test_the_null_block_is_never_counted() -> None:
    pool = BlockPool(2)
    pool.acquire([0])
    pool.release(0)
    assert (pool.num_free, pool.free_blocks()) == (1, [1])


def test_several_blocks_at_once_are_one_after_another() -> None:
    """Random traffic on two pools: one is told of each block by itself."""
    draw = random.Random(0)
    single, several = BlockPool(30, 2), BlockPool(30, 2)
    held: list[list[int]] = []
    for _ in range(500):
        if single.num_free >= 5 and draw.random() < 0.6:
            count = draw.randrange(1, 6)
            taken = single.take(count)
            assert several.take(count) == taken
            digests = [bytes([draw.randrange(12)]) for _ in taken]
            group = draw.randrange(2)
            is_new = [single.register(b, group, digest) for b, digest in zip(taken, digests)]
            found = several.register_each([0, *taken], group, [b"null", *digests])
            assert [place - 1 for place in found] == [i for i, new in enumerate(is_new) if new]
            assert several.lookup(group, b"null") is None
            held.append(taken)
            if draw.random() < 0.3:
                single.acquire(taken)
                several.acquire(taken)
                held.append(taken)
        elif held:
            block_ids = [0, *held.pop(draw.randrange(len(held)))]
            for block_id in block_ids:
                single.release(block_id)
            several.release_each(block_ids)
        prefix = [bytes([draw.randrange(12)]) for _ in range(3)]
        looked_up = [single.lookup(1, digest) for digest in prefix]
        whole = looked_up.index(None) if None in looked_up else 3
        assert several.found_prefix(1, prefix) == looked_up[:whole]
        assert single.free_blocks() == several.free_blocks()
        assert (single.num_free, single.ref_counts) == (several.num_free, several.ref_counts)
