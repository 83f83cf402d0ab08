"""How a segment that differs by rank is taken apart."""

from tpu_backend.runtime.sketch import Common, Sketch, aligned, own_stages, stages


def sketch(operations: str, *reads: list[int], shapes: str = "") -> Sketch:
    """Of operations with these names, of which those in upper case are collectives, and what each reads."""
    names = tuple(operations.split())
    identities = tuple(f"{name}{shapes}" if name.islower() else name for name in names)
    starts = tuple(() for _ in names)
    is_collective = tuple(name.isupper() for name in names)
    read = tuple(tuple((maker, 0) for maker in makers) for makers in reads)
    return Sketch(tuple(range(len(names))), names, identities, is_collective, read, starts)


def whole(one: Sketch) -> Common:
    return Common(one, tuple(range(len(one.names))))


def test_what_differs_by_rank_is_between_the_links_that_all_ranks_launch():
    names = "GATHER forward SCATTER norm REDUCE clip step MEAN"
    one = whole(sketch(names, [], [0], [1], [2], [3], [4], [2, 5], [1]))
    assert stages([one], local={3, 6}) == [0, 0, 0, 1, 2, 2, 3, 0]


def test_without_a_difference_all_is_one_link():
    assert stages([whole(sketch("a B c", [], [0], [1]))], local=()) == [0, 0, 0]


def test_what_reads_nothing_is_made_where_it_is_read_first():
    assert stages([whole(sketch("zeros A step", [], [], [0, 1]))], local={2}) == [1, 0, 1]


def test_what_one_rank_alone_has_is_its_own_and_collectives_wait_for_it_in_all():
    one, other = sketch("slice SUM twice", [], [0], [1]), sketch("slice pad SUM twice", [], [0], [1], [2])
    found = aligned([one, other])
    assert found == [[0, 1, 2], [0, 2, 3]]
    commons = [Common(each, tuple(own)) for each, own in zip([one, other], found, strict=True)]
    assert stages(commons, local=()) == [1, 2, 2]
    assert own_stages(commons[1], [1, 2, 2]) == [1, 1, 2, 2]


def test_collectives_correspond_by_number_whatever_is_between_them():
    one, other = sketch("SUM a SUM", [], [0], [1]), sketch("SUM SUM a", [], [0], [1])
    assert aligned([one, other]) == [[0, 2], [0, 1]]


def test_digests_tell_what_an_operation_is_and_what_it_reads():
    base = whole(sketch("a SUM b", [], [0], [1])).digests()
    other_shapes = whole(sketch("a SUM b", [], [0], [1], shapes="4")).digests()
    other_reads = whole(sketch("a SUM b", [], [], [0])).digests()
    assert [one == other for one, other in zip(base, other_shapes, strict=True)] == [False, True, False]
    assert [one == other for one, other in zip(base, other_reads, strict=True)] == [True, True, False]


def commons_of(*sketches: Sketch) -> list[Common]:
    found = aligned(sketches)
    return [Common(each, tuple(own)) for each, own in zip(sketches, found, strict=True)]


def test_what_a_collective_reads_is_made_in_its_link_by_all_ranks_or_by_none():
    # One rank gathers what the first collective gave, the other what it made of an input.
    commons = commons_of(sketch("SUM pad GATHER", [], [], [0]), sketch("SUM pad GATHER", [], [], [1]))
    assert stages(commons, local={1}) == [0, 1, 2]
    assert commons[0].within([0, 1, 2]) == commons[1].within([0, 1, 2]) == [[], [None]]
    assert commons[0].within([0, 1, 0]) == [[], [(0, 0)]]


def test_zeros_that_a_collective_reads_on_some_ranks_alone_are_made_before_its_link():
    assert stages(commons_of(sketch("zeros SUM", [], [0]), sketch("zeros SUM", [], [-1])), local=()) == [1, 2]
    assert stages(commons_of(sketch("zeros SUM", [], [0])), local=()) == [0, 0]
